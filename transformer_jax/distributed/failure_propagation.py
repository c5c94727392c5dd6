"""When one of a run's processes fails, end all of them with the same message and exit code.

While a process waits in a collective, its main thread does not run Python code. Each process
therefore uses separate threads and dedicated connections to listen for failures.
"""

import contextlib
import json
import os
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import NoReturn

from transformer_jax.console import clear_progress_bar, message_and_exit_code, stderr
from transformer_jax.errors import LostProcessError, is_lost_peer, summarize_error

# The maximum number of seconds that process 0 waits for the other processes to exit first.
GRACE_SECONDS = 10.0
GOODBYE = "goodbye"


class FailurePropagation:
    """Connections between process 0 and the other processes, which stay open during a run.

    A process that fails sends its error message and exit code to all others, which immediately exit
    with the same message and code. A process that is killed sends nothing, but its operating system
    closes the connection.
    """

    def __init__(
        self, connections: dict[int, socket.socket], run: Path, *, is_primary: bool
    ) -> None:
        """Listen on the connections, keyed by process index. Process 0 relays all messages."""
        self._connections, self._run, self._is_primary = connections, run, is_primary
        self._is_closed = False
        self._ending = threading.Lock()
        for peer in connections.items():
            threading.Thread(target=self._listen, args=peer, daemon=True).start()

    def leave(self) -> None:
        """Announce that this process is exiting successfully, so that it is not considered lost."""
        self._send(GOODBYE)

    def close(self) -> None:
        """Ignore connections that close from now on. All processes must have called `leave`."""
        self._is_closed = True

    def end(self, error: BaseException) -> NoReturn:
        """End all processes after an error in this process."""
        message, is_lost = message_and_exit_code(error), is_lost_peer(error)
        if message is None or is_lost:
            # JAX may report a lost peer before this process knows why the peer was lost. Wait,
            # because the peer usually sends its own message or closes its connection soon, and
            # either event ends this process.
            time.sleep(GRACE_SECONDS / 2)
        if is_lost:
            reason = f"another process exited or is stuck: {summarize_error(error)}"
            message = message_and_exit_code(LostProcessError(reason, self._run))
        if message is None:
            traceback.print_exception(error)
            message = f"transformer-jax: {type(error).__name__} in a process of this run", 1
        self._end(*message)

    def _listen(self, index: int, connection: socket.socket) -> None:
        has_left = False
        # A process that is killed may reset the connection or send only part of a line.
        with contextlib.suppress(OSError, ValueError):
            for line in connection.makefile("rb"):
                if (message := json.loads(line)) != GOODBYE:
                    self._end(*message)
                has_left = True
        if not self._is_closed and not has_left:
            self.end(LostProcessError(f"process {index} of this run was lost", self._run))

    def _send(self, message: str | tuple[str, int]) -> None:
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.sendall(json.dumps(message).encode() + b"\n")

    def _end(self, line: str, exit_code: int) -> NoReturn:
        # Never release the lock, so that this process reports only its first failure.
        self._ending.acquire()
        clear_progress_bar()
        if line:
            stderr.print(line)
        self._send((line, exit_code))
        if self._is_primary:
            # JAX's coordination service runs in this process. If this process exited first, JAX
            # would abort the other processes.
            deadline = time.monotonic() + GRACE_SECONDS
            for connection in self._connections.values():
                with contextlib.suppress(OSError):
                    while (seconds_left := deadline - time.monotonic()) > 0:
                        connection.settimeout(seconds_left)
                        if not connection.recv(1 << 16):
                            break
        # The main thread may have redrawn its progress bar.
        clear_progress_bar()
        sys.stdout.flush()
        sys.stderr.flush()
        # During a normal exit, JAX's and Orbax's exit handlers and threads would wait for the other
        # processes.
        os._exit(exit_code)
