"""Several processes, on one machine or on many, that train one run together.

Each has devices of its own, reads rows of its own, and runs the same program. The first of them,
process 0, alone writes the run's folder, apart from the arrays of checkpoints. Whatever is decided
by a clock, a disk or a signal must be agreed: were one process to save, and another not, both would
wait for one another.

What ends one ends all, with the same line and the same exit code, wherever they wait.

This module imports no JAX until processes are to be joined.
"""

import contextlib
import itertools
import json
import logging
import os
import selectors
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

from transformer_jax.config import Config
from transformer_jax.console import message_and_exit_code, stderr
from transformer_jax.distributed import heartbeat, rendezvous
from transformer_jax.distributed.rendezvous import ProcessSpec
from transformer_jax.errors import LostProcessError, UsageError, is_lost_peer

T = TypeVar("T")

# JAX waits in C++, where no Ctrl-C is heard: so long at a time.
POLL_MILLISECONDS = 2000
# A machine that is gone without a word is noticed by JAX too, if not by the lifeline before.
HEARTBEAT_SECONDS = 60
# How long process 0, at most, lets the others end before itself.
GRACE_SECONDS = 10.0
GOODBYE = "goodbye"


class ProcessGroup:
    """The processes of a run. Every one of them must call each method, in the same order.

    What fails in one of them is raised there, and ends the others by the `Lifeline`.
    """

    def __init__(self, count: int = 1, index: int = 0) -> None:
        self.count, self.index = count, index
        self._calls = itertools.count()

    @property
    def is_primary(self) -> bool:
        """Whether this process writes what is written once."""
        return self.index == 0

    def on_primary(self, action: Callable[[], T]) -> T:
        """Let the first process do something; all return what came out.

        The result must be plain data.
        """
        if self.count == 1:
            return action()
        key = f"transformer_jax/{next(self._calls)}"
        if not self.is_primary:
            return self._read(key)
        result = action()
        self._write(key, result)
        return result

    def on_all(self, action: Callable[[], T]) -> T:
        """Do something in each process, each for itself; return when all have done it."""
        if self.count == 1:
            return action()
        key = f"transformer_jax/{next(self._calls)}"
        result = action()
        self._write(f"{key}/{self.index}", None)
        for index in range(self.count):
            self._read(f"{key}/{index}")
        return result

    def check_same(self, config: Config) -> None:
        """Raise an error where this process was given another experiment than the first one.

        Raises:
            UsageError: it names the fields; where text lies may differ.
        """
        theirs = Config.from_dict(self.on_primary(config.to_dict))
        differing = [
            f"{section}.{key} {there!r} there, {here!r} here"
            for (section, key), (here, there) in config.differences(theirs).items()
            if (section, key) != ("data", "folder")
        ]
        if differing:
            raise UsageError(
                f"process {self.index} was given other options than process 0: "
                f"{', '.join(differing)}"
            )

    def _write(self, key: str, content: Any) -> None:
        _client().key_value_set(key, json.dumps(content))

    def _read(self, key: str) -> Any:
        import jax

        while True:
            # The other has a supervisor of its own.
            heartbeat.busy("waiting for another process")
            try:
                return json.loads(_client().blocking_key_value_get(key, POLL_MILLISECONDS))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise


SINGLE_PROCESS = ProcessGroup()


class Vote(NamedTuple):
    """What was noted after a step, by any of the processes."""

    step: int
    signal: int
    """Its number; 0 for none."""
    is_due: bool
    """Whether the clock, or a failure to write, asks for a checkpoint."""


class StepConsensus:
    """What one process notes after a step all know two steps later; of one alone, at once.

    It travels as a maximum over all devices, behind the step itself, so nothing waits for it:
    two steps later it is there.
    """

    DELAY = 2

    def __init__(self, hosts: ProcessGroup) -> None:
        self._is_alone = hosts.count == 1
        self._pending: deque[tuple[int, Any]] = deque()
        if self._is_alone:
            return
        import jax
        import numpy as np
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        mesh = Mesh(np.array(jax.devices()), ("all",))
        rows = NamedSharding(mesh, PartitionSpec("all"))
        largest = jax.jit(
            lambda notes: notes.max(axis=0), out_shardings=NamedSharding(mesh, PartitionSpec())
        )

        def spread(signal: int, is_due: bool) -> Any:
            mine = np.tile(np.array([signal, is_due], np.int32), (jax.local_device_count(), 1))
            return largest(jax.make_array_from_process_local_data(rows, mine))

        self._spread = spread

    def after(self, step: int, signal: int, is_due: bool) -> Vote:
        """Note something after this step; return what holds now, after whichever step."""
        if self._is_alone:
            return Vote(step, signal, is_due)
        self._pending.append((step, self._spread(signal, is_due)))
        if len(self._pending) <= self.DELAY:
            return Vote(0, 0, False)
        earlier, found = self._pending.popleft()
        largest_signal, any_due = found.addressable_data(0).tolist()
        return Vote(earlier, largest_signal, bool(any_due))


class FailurePropagation:
    """Connections between process 0 and each other process, open as long as the run.

    Who ends says why, by an error's line and exit code, and all others end with them at once,
    wherever they wait. Who is lost says nothing: its system closes the connection.
    """

    def __init__(self, connections: dict[int, socket.socket], run: Path, *, is_first: bool) -> None:
        self._connections, self._run, self._is_first = connections, run, is_first
        self._parted: set[int] = set()
        self._is_over = False
        self._is_ending = threading.Lock()
        threading.Thread(target=self._listen, name="lifeline", daemon=True).start()

    def leave(self) -> None:
        """Let this process end as it should: the others go on without it."""
        self._send(GOODBYE)

    def close(self) -> None:
        """Hear no more of the others, who have parted too."""
        self._is_over = True

    def end(self, error: BaseException) -> NoReturn:
        """End all processes for this error, which came in this one."""
        told, is_lost = message_and_exit_code(error), is_lost_peer(error)
        if told is None or is_lost:
            # Where JAX complains that another process is gone, that one has told why, or will be
            # missed: such news come at once.
            time.sleep(GRACE_SECONDS / 2)
        if is_lost:
            line = str(error).splitlines()[0]
            told = message_and_exit_code(
                LostProcessError(f"another process is gone or stuck: {line}", self._run)
            )
        if told is None:
            traceback.print_exception(error)
            told = f"transformer-jax: {type(error).__name__} in a process of this run", 1
        self._end(*told)

    def _listen(self) -> None:
        selector = selectors.DefaultSelector()
        rest = {}
        for index, connection in self._connections.items():
            rest[index] = b""
            selector.register(connection, selectors.EVENT_READ, index)
        while selector.get_map():
            for key, _ in selector.select():
                try:
                    data = self._connections[key.data].recv(1 << 16)
                except OSError:
                    data = b""
                *words, rest[key.data] = (rest[key.data] + data).split(b"\n")
                for word in map(json.loads, words):
                    if word != GOODBYE:
                        self._end(*word)
                    self._parted.add(key.data)
                if data:
                    continue
                selector.unregister(key.fileobj)
                if not self._is_over and key.data not in self._parted:
                    self.end(LostProcessError(f"process {key.data} of this run is gone", self._run))

    def _send(self, word: Any) -> None:
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.sendall(json.dumps(word).encode() + b"\n")

    def _end(self, line: str, code: int) -> NoReturn:
        # Never released: whoever comes second has nothing to add.
        self._is_ending.acquire()
        if line:
            stderr.print(line)
        self._send((line, code))
        if self._is_first:
            # What JAX's processes talk by is here: without it, the others would be aborted.
            self._wait_for_others(time.monotonic() + GRACE_SECONDS)
        sys.stdout.flush()
        sys.stderr.flush()
        # Not by the usual way: at exit JAX, Orbax and their threads wait for the others.
        os._exit(code)

    def _wait_for_others(self, until: float) -> None:
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                while (left := until - time.monotonic()) > 0:
                    connection.settimeout(left)
                    if not connection.recv(1 << 16):
                        break


@contextlib.contextmanager
def join_processes(
    run: Path, coordinator: str | None, num_processes: int | None, process_id: int | None
) -> Iterator[ProcessGroup]:
    """Meet the other processes of a run, if there are any, before any device is touched.

    Of several processes each ends here if one fails.

    Args:
        run: its folder, for what is said in the end.
        coordinator: HOST:PORT of process 0. With it, and with the other two, nothing is guessed;
            without them Slurm, Open MPI, Kubernetes or a Cloud TPU may say them.
        num_processes: how many there are; 1 for this one alone, whatever the environment says.
        process_id: which one this is, from 0.

    Raises:
        UsageError: not all of the three are given, or they cannot be.
        UnreachableError: the others did not come.
    """
    address = rendezvous.resolve_cluster(coordinator, num_processes, process_id)
    if address is None:
        yield SINGLE_PROCESS
        return
    connections = rendezvous.rendezvous(address, rendezvous.RENDEZVOUS_SECONDS)
    lifeline = FailurePropagation(connections, run, is_first=address.index == 0)
    try:
        _initialize(address)
        yield ProcessGroup(address.count, address.index)
    except BaseException as error:  # noqa: BLE001 (whatever it is, it ends all)
        lifeline.end(error)
    lifeline.leave()
    _shut_down()
    lifeline.close()


def _initialize(address: ProcessSpec) -> None:
    import jax

    # Signals are this program's own to handle.
    jax.config.update("jax_enable_preemption_service", False)
    # It tells at every start that proxies may be in the way.
    logging.getLogger("jax._src.distributed").setLevel(logging.ERROR)
    jax.distributed.initialize(
        address.coordinator,
        address.count,
        address.index,
        local_device_ids=address.local_devices,
        cluster_detection_method="deactivate",
        heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
    )


def _shut_down() -> None:
    """Wait for the others, who come to their end too, before process 0 takes the store away."""
    import jax

    jax.distributed.shutdown()


def _client() -> Any:
    """Return the store of words that JAX's processes share; public names have none that waits."""
    from jax._src.distributed import global_state

    return global_state.client
