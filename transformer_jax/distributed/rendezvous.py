"""How the processes of a run find one another, before JAX is there."""

import contextlib
import importlib.util
import os
import socket
import time
from typing import NamedTuple

from transformer_jax.distributed._private_jax import detect_cluster
from transformer_jax.errors import ConnectionFailedError, UsageError

# How long processes wait for one another at the beginning.
RENDEZVOUS_SECONDS = 300.0
# A machine that is gone without a word is noticed after so many seconds, in all.
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
ALL_HERE = b"all here\n"


class ProcessSpec(NamedTuple):
    """Where the processes meet, how many they are, and which one this is."""

    coordinator: str
    """Host and port of process 0."""
    count: int
    index: int
    local_devices: list[int] | None = None
    """Those that are this process's own; None for all of this machine."""


def resolve_cluster(
    coordinator: str | None, num_processes: int | None, process_id: int | None
) -> ProcessSpec | None:
    """Return what the options say, or else the environment; None where this process is alone.

    Raises:
        UsageError: not all of the three options are given, or they cannot be.
        UnreachableError: the environment says that there are others, but not where.
    """
    address = _from_options(coordinator, num_processes, process_id)
    if address is None and num_processes is None:
        address = _from_environment()
    return None if address is None or address.count == 1 else address


def _from_options(
    coordinator: str | None, num_processes: int | None, process_id: int | None
) -> ProcessSpec | None:
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
    return ProcessSpec(coordinator, num_processes, process_id)


def _from_environment() -> ProcessSpec | None:
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
        raise ConnectionFailedError(
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


def _found_by_jax() -> ProcessSpec | None:
    cluster = detect_cluster(int(RENDEZVOUS_SECONDS))
    return None if cluster is None else ProcessSpec(*cluster)


def rendezvous(address: ProcessSpec, seconds: float) -> dict[int, socket.socket]:
    """Wait until all processes are there; return a connection to each by its index.

    Process 0 has one to each other, and each other one to process 0. JAX itself would abort, with
    pages of C++, whichever process is there when another is not.

    Raises:
        UnreachableError: they are not, in that time, or the port is taken.
    """
    until = time.monotonic() + seconds
    if address.index == 0:
        found = _await_others(address, until, seconds)
    else:
        found = {0: _call_first(address, until, seconds)}
    for connection in found.values():
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            # Not every system lets a program choose.
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return found


def _await_others(address: ProcessSpec, until: float, seconds: float) -> dict[int, socket.socket]:
    try:
        # Of either kind of address, where the machine has both.
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        port = int(address.coordinator.rpartition(":")[2])
        server = socket.create_server(("", port), family=family, dualstack_ipv6=both)
    except OSError as error:
        raise ConnectionFailedError(
            f"the processes cannot meet at {address.coordinator}: {error.strerror}; "
            f"is another run there? Choose another port"
        ) from error
    # Anyone may knock; only those of this run are counted.
    expected = {_handshake(address._replace(index=i)): i for i in range(1, address.count)}
    here: dict[int, socket.socket] = {}
    with server:
        while len(here) < len(expected):
            server.settimeout(max(until - time.monotonic(), 0.01))
            try:
                connection, _ = server.accept()
                connection.settimeout(5)
                index = expected.get(connection.recv(len(min(expected)) + 9).decode())
            except (OSError, ValueError) as error:
                if time.monotonic() < until:
                    continue
                missing = [str(i) for i in expected.values() if i not in here]
                raise ConnectionFailedError(
                    f"{len(missing)} of {address.count} processes did not come within "
                    f"{seconds:.0f} s: {', '.join(missing)}"
                ) from error
            if index is None:
                connection.close()
            else:
                here[index] = connection
    for connection in here.values():
        with contextlib.suppress(OSError):
            connection.sendall(ALL_HERE)
    return here


def _call_first(address: ProcessSpec, until: float, seconds: float) -> socket.socket:
    host, _, port = address.coordinator.rpartition(":")
    while True:
        left = max(until - time.monotonic(), 0.01)
        try:
            connection = socket.create_connection((host.strip("[]"), int(port)), timeout=left)
            connection.sendall(_handshake(address).encode())
            # Process 0 gives up when its own time is over.
            connection.settimeout(seconds + 10)
            if connection.recv(len(ALL_HERE)) == ALL_HERE:
                return connection
            connection.close()
            why = "process 0 ended, or expects others"
        except OSError as error:
            why = error.strerror or str(error)
        if time.monotonic() >= until:
            raise ConnectionFailedError(
                f"process 0 was not found at {address.coordinator} within {seconds:.0f} s: {why}"
            )
        time.sleep(0.2)


def _handshake(address: ProcessSpec) -> str:
    return f"transformer-jax {address.index} of {address.count}\n"
