"""Several processes, on one machine or on many, that train one run together.

Each has devices of its own, reads rows of its own, and runs the same program. The first of them,
process 0, alone writes the run's folder, apart from the arrays of checkpoints. Whatever is decided
by a clock, a disk or a signal must be agreed: were one process to save, and another not, both would
wait for one another.

This module imports no JAX until processes are to be joined.
"""

import atexit
import contextlib
import importlib.util
import itertools
import json
import logging
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

from transformer_jax.config import ConfigError
from transformer_jax.errors import (
    LostProcessError,
    OutOfMemoryError,
    ProjectError,
    StorageError,
    UnreachableError,
    UsageError,
)
from transformer_jax.training import heartbeat

T = TypeVar("T")

# How long processes wait for one another at the beginning.
MEETING_SECONDS = 300.0
# JAX waits in C++, where no Ctrl-C is heard: so long at a time.
POLL_MILLISECONDS = 2000


class Address(NamedTuple):
    """Where the processes meet, how many they are, and which one this is."""

    coordinator: str
    """Host and port of process 0."""
    count: int
    index: int
    local_devices: list[int] | None = None
    """Those that are this process's own; None for all of this machine."""


class FaultElsewhereError(ProjectError):
    """What ended another process ends this one, with the same line and the same exit code."""

    def __init__(self, line: str, exit_code: int) -> None:
        super().__init__(line)
        self.exit_code = exit_code


class Hosts:
    """The processes of a run. Every one of them must call each method, in the same order."""

    def __init__(self, count: int = 1, index: int = 0) -> None:
        self.count, self.index = count, index
        self._calls = itertools.count()
        self._known: BaseException | None = None

    @property
    def is_first(self) -> bool:
        """Whether this process writes what is written once."""
        return self.index == 0

    def is_known(self, error: BaseException) -> bool:
        """Tell whether the other processes end with the same error."""
        return error is self._known

    def first(self, action: Callable[[], T]) -> T:
        """Let the first process do something; all return what came out, or fail as it failed.

        The result must be plain data.
        """
        if self.count == 1:
            return action()
        key = f"transformer_jax/{next(self._calls)}"
        if not self.is_first:
            return self._read(key)
        result = self._try(key, action)
        self._write(key, {"result": result})
        return result

    def together(self, action: Callable[[], T]) -> T:
        """Do something in each process, each for itself; where it fails in one, fail in all."""
        if self.count == 1:
            return action()
        key = f"transformer_jax/{next(self._calls)}"
        result = self._try(f"{key}/{self.index}", action)
        self._write(f"{key}/{self.index}", {"result": None})
        for index in range(self.count):
            self._read(f"{key}/{index}")
        return result

    def _try(self, key: str, action: Callable[[], T]) -> T:
        try:
            return action()
        # Whatever it is: the others wait for word.
        except BaseException as error:
            self._known = error
            self._write(key, {"fault": str(error), "code": exit_code_of(error)})
            raise

    def _write(self, key: str, content: dict[str, Any]) -> None:
        _client().key_value_set(key, json.dumps(content))

    def _read(self, key: str) -> Any:
        import jax

        while True:
            # The other has a supervisor of its own.
            heartbeat.busy("waiting for another process")
            try:
                content = json.loads(_client().blocking_key_value_get(key, POLL_MILLISECONDS))
                break
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    heartbeat.lose_peers()
                    line = str(error).splitlines()[0]
                    raise LostProcessError(
                        f"another process of this run is gone: {line}"
                    ) from error
        if "fault" in content:
            self._known = FaultElsewhereError(content["fault"], content["code"])
            raise self._known
        return content["result"]


ALONE = Hosts()


class Noted(NamedTuple):
    """What was noted after a step, by any of the processes."""

    step: int
    signal: int
    """Its number; 0 for none."""
    is_due: bool
    """Whether the clock, or a failure to write, asks for a checkpoint."""


class Agreement:
    """What one process notes after a step all know two steps later; of one alone, at once.

    It travels as a maximum over all devices, behind the step itself, so nothing waits for it:
    two steps later it is there.
    """

    DELAY = 2

    def __init__(self, hosts: Hosts) -> None:
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

    def after(self, step: int, signal: int, is_due: bool) -> Noted:
        """Note something after this step; return what holds now, after whichever step."""
        if self._is_alone:
            return Noted(step, signal, is_due)
        self._pending.append((step, self._spread(signal, is_due)))
        if len(self._pending) <= self.DELAY:
            return Noted(0, 0, False)
        earlier, found = self._pending.popleft()
        largest_signal, any_due = found.addressable_data(0).tolist()
        return Noted(earlier, largest_signal, bool(any_due))


@contextlib.contextmanager
def joined(
    coordinator: str | None, num_processes: int | None, process_id: int | None
) -> Iterator[Hosts]:
    """Meet the other processes of a run, if there are any, before any device is touched.

    Args:
        coordinator: HOST:PORT of process 0. With it, and with the other two, nothing is guessed;
            without them Slurm, Open MPI, Kubernetes or a Cloud TPU may say them.
        num_processes: how many there are; 1 for this one alone, whatever the environment says.
        process_id: which one this is, from 0.

    Raises:
        UsageError: not all of the three are given, or they cannot be.
        UnreachableError: the others did not come.
    """
    address = _given(coordinator, num_processes, process_id)
    if address is None and num_processes is None:
        address = _found()
    if address is None or address.count == 1:
        yield ALONE
        return
    meet(address, MEETING_SECONDS)
    _initialize(address)
    hosts = Hosts(address.count, address.index)
    try:
        yield hosts
    except BaseException as error:
        if not hosts.is_known(error):
            # The others are in the middle of a step that needs this process. JAX would wait for
            # them at exit; when it is gone they end.
            atexit.register(_leave, exit_code_of(error))
            raise
        _part()
        raise
    _part()


def _given(
    coordinator: str | None, num_processes: int | None, process_id: int | None
) -> Address | None:
    """Return what the options say; None where they say nothing, or that this process is alone."""
    given = {
        "--coordinator": coordinator,
        "--num-processes": num_processes,
        "--process-id": process_id,
    }
    missing = [name for name, value in given.items() if value is None]
    if num_processes == 1 or len(missing) == len(given):
        return None
    if coordinator is None or num_processes is None or process_id is None:
        raise UsageError(f"several processes need {', '.join(given)}: {missing[0]} is missing")
    if not 0 <= process_id < num_processes:
        raise UsageError(
            f"--process-id must be from 0 to {num_processes - 1}, one below --num-processes, "
            f"got {process_id}"
        )
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UsageError(f"--coordinator must be HOST:PORT, got {coordinator!r}")
    return Address(coordinator, num_processes, process_id)


def _found() -> Address | None:
    """Return what the environment says; None where this process is alone."""
    environ = os.environ
    # A step of srun's; the script of sbatch is none, although it knows the number of tasks.
    is_slurm = int(environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1
    is_mpi = int(environ.get("OMPI_COMM_WORLD_SIZE", 1)) > 1
    is_pod = {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= environ.keys()
    is_tpu = importlib.util.find_spec("libtpu") is not None
    if not (is_slurm or is_mpi or is_pod or is_tpu):
        return None
    try:
        address = _found_by_jax()
    # Whatever the environment's own tools raise.
    except Exception as error:
        raise UnreachableError(
            f"{_ADVICE}: {str(error).strip() or type(error).__name__}"
        ) from error
    if address is None and not (is_slurm or is_mpi or is_pod):
        # One TPU, or none at all.
        return None
    if address is None:
        raise UsageError(f"{_ADVICE}, or --num-processes 1 for this one alone")
    # JAX would give each process one device, as clusters do that start one for each. One that is
    # alone on its machine has all of them.
    is_alone_here = (
        environ.get("SLURM_STEP_NUM_TASKS") == environ.get("SLURM_STEP_NUM_NODES")
        if is_slurm
        else environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == "1"
    )
    return address._replace(local_devices=None) if is_alone_here else address


_ADVICE = (
    "this seems to be one of several processes, but the others cannot be found: say --coordinator "
    "HOST:PORT, --num-processes and --process-id"
)


def _found_by_jax() -> Address | None:
    # `jax.distributed.initialize` does the same, and then ends in C++ where it does not succeed.
    from jax._src.clusters import ClusterEnv

    detect: Any = ClusterEnv.auto_detect_unset_distributed_params
    coordinator, count, index, devices = detect(None, None, None, None, None, int(MEETING_SECONDS))
    if coordinator is None or count is None or index is None:
        return None
    return Address(coordinator, count, index, devices)


def meet(address: Address, seconds: float) -> None:
    """Wait until all processes are there.

    JAX itself would abort, with pages of C++, whichever process is there when another is not.

    Raises:
        UnreachableError: they are not, in that time, or the port is taken.
    """
    until = time.monotonic() + seconds
    host, _, port = address.coordinator.rpartition(":")
    if address.index == 0:
        _await_others(int(port), address, until, seconds)
    else:
        _call_first(host.strip("[]"), int(port), address, until, seconds)


def _await_others(port: int, address: Address, until: float, seconds: float) -> None:
    try:
        # Of either kind of address, where the machine has both.
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        server = socket.create_server(("", port), family=family, dualstack_ipv6=both)
    except OSError as error:
        raise UnreachableError(
            f"the processes cannot meet at {address.coordinator}: {error.strerror}; "
            f"is another run there? Choose another port"
        ) from error
    with contextlib.ExitStack() as stack:
        stack.enter_context(server)
        here: dict[int, socket.socket] = {}
        while len(here) < address.count - 1:
            try:
                server.settimeout(max(until - time.monotonic(), 0.01))
                connection = stack.enter_context(server.accept()[0])
                connection.settimeout(5)
                word = connection.recv(64).decode().split()
            except TimeoutError:
                if time.monotonic() < until:
                    continue
                missing = [str(i) for i in range(1, address.count) if i not in here]
                raise UnreachableError(
                    f"{len(missing)} of {address.count} processes did not come within "
                    f"{seconds:.0f} s: {', '.join(missing)}"
                ) from None
            except (OSError, ValueError):
                continue
            # Anyone may knock; only those of this run are counted.
            expected = {_word(address._replace(index=i)): i for i in range(1, address.count)}
            if (index := expected.get(" ".join(word))) is not None:
                here[index] = connection
        for connection in here.values():
            with contextlib.suppress(OSError):
                connection.sendall(b"all here")


def _call_first(host: str, port: int, address: Address, until: float, seconds: float) -> None:
    while True:
        left = until - time.monotonic()
        try:
            with socket.create_connection((host, port), timeout=max(left, 0.01)) as connection:
                connection.sendall(_word(address).encode())
                # Process 0 gives up when its own time is over.
                connection.settimeout(seconds + 10)
                if connection.recv(64) == b"all here":
                    return
                why = "process 0 ended, or expects others"
        except OSError as error:
            why = error.strerror or str(error)
        if time.monotonic() >= until:
            raise UnreachableError(
                f"process 0 was not found at {address.coordinator} within {seconds:.0f} s: {why}"
            )
        time.sleep(0.2)


def _word(address: Address) -> str:
    return f"transformer-jax {address.index} of {address.count}"


def _initialize(address: Address) -> None:
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
    )


def _part() -> None:
    """Wait for the others, who come to their end too, before process 0 takes the store away."""
    import jax

    jax.distributed.shutdown()


def _client() -> Any:
    """Return the store of words that JAX's processes share; public names have none that waits."""
    from jax._src.distributed import global_state

    return global_state.client


def exit_code_of(error: BaseException) -> int:
    """Return the exit code with which the command line ends for this error."""
    if isinstance(error, ProjectError):
        return error.exit_code
    codes: dict[type[BaseException], int] = {
        ConfigError: UsageError.exit_code,
        MemoryError: OutOfMemoryError.exit_code,
        OSError: StorageError.exit_code,
        KeyboardInterrupt: 130,
    }
    return next((code for kind, code in codes.items() if isinstance(error, kind)), 1)


def _leave(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
