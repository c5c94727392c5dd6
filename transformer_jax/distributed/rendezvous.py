"""Connect a run's processes before JAX is initialized."""

import contextlib
import importlib.util
import os
import re
import socket
import time
from typing import NamedTuple

from transformer_jax.distributed._private_jax import detect_cluster
from transformer_jax.errors import ConnectionFailedError, Setting, UsageError, summarize_error

# The number of seconds that processes wait for each other at startup.
RENDEZVOUS_SECONDS = 300.0
# With these options, the operating system detects the loss of a machine after 10 + 3 * 5 seconds.
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
# Process 0 sends this line once all processes are connected.
READY = b"ready\n"
# The number of seconds within which a connecting process must identify itself.
HANDSHAKE_SECONDS = 5.0
RETRY_SECONDS = 0.2
EXAMPLES = (
    Setting("coordinator", "HOST:PORT"),
    Setting("num_processes", "N"),
    Setting("process_id", "INDEX"),
)


class ProcessSpec(NamedTuple):
    """One of the `count` processes in a run. `index` is zero-based."""

    coordinator: str
    """The address of process 0, in the form HOST:PORT."""
    count: int
    index: int
    local_devices: list[int] | None = None
    """The indices of this process's devices on its machine, or None for all devices."""

    @property
    def handshake(self) -> str:
        """The line that this process sends to identify itself to process 0."""
        return f"transformer-jax {self.index} of {self.count}\n"


def resolve_cluster(
    coordinator: str | None, num_processes: int | None, process_id: int | None
) -> ProcessSpec | None:
    """Return the `ProcessSpec` for this process, or None if it is the only process.

    The arguments are the address of process 0 (HOST:PORT), the number of processes, and the
    zero-based index of this process. If all are None, they are read from the environment of Slurm,
    Open MPI, Kubernetes, or Cloud TPU. If `num_processes` is 1, the environment is ignored.
    """
    options = (coordinator, num_processes, process_id)
    if num_processes == 1:
        return None
    if num_processes is not None and num_processes < 1:
        raise UsageError(Setting("num_processes", num_processes), " must be positive")
    if options == (None, None, None):
        spec = _from_environment()
        return None if spec is None or spec.count == 1 else spec
    if coordinator is None or num_processes is None or process_id is None:
        settings = (Setting(e.name, v) for e, v in zip(EXAMPLES, options, strict=True))
        given = next(setting for setting in settings if setting.value is not None)
        raise UsageError(given, " also needs ", EXAMPLES[options.index(None)])
    if not 0 <= process_id < num_processes:
        raise UsageError(
            Setting("process_id", process_id),
            f" must be from 0 to {num_processes - 1}, given ",
            Setting("num_processes", num_processes),
        )
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UsageError(Setting("coordinator", coordinator), " must be HOST:PORT")
    return ProcessSpec(coordinator, num_processes, process_id)


def _from_environment() -> ProcessSpec | None:
    """Return the `ProcessSpec` that the environment describes, or None if there is no cluster."""
    environ = os.environ
    # srun sets SLURM_STEP_NUM_TASKS, the number of tasks in a job step. An sbatch script sees only
    # the number of tasks in the whole job, although the script itself is a single process.
    is_slurm = _read_count("SLURM_STEP_NUM_TASKS") > 1
    is_mpi = _read_count("OMPI_COMM_WORLD_SIZE") > 1
    is_pod = {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= environ.keys()
    is_tpu = importlib.util.find_spec("libtpu") is not None
    if not (is_slurm or is_mpi or is_pod or is_tpu):
        return None
    coordinator, count, index = EXAMPLES
    advice = (
        "this seems to be one of several processes, but the others cannot be found: pass ",
        *(coordinator, " ", count, " ", index),
    )
    try:
        cluster = detect_cluster(int(RENDEZVOUS_SECONDS))
        spec = None if cluster is None else ProcessSpec(*cluster)
    # Cluster detection may raise any exception.
    except Exception as error:
        raise ConnectionFailedError(*advice, f": {summarize_error(error)}") from error
    if spec is None:
        if is_slurm or is_mpi or is_pod:
            alone = Setting("num_processes", 1)
            raise UsageError(*advice, ", or ", alone, " to train in this process alone")
        # The machine has a single TPU, or has libtpu but no TPU.
        return None
    # JAX assigns one device to each process, because it expects one process per device. However, a
    # process that is alone on its machine should use all of the machine's devices.
    is_alone_on_machine = environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == "1"
    if re.fullmatch("[^,]+", environ.get("CUDA_VISIBLE_DEVICES", "")):
        # The launcher gave this process a single GPU, for example with srun --gpus-per-task=1.
        return spec._replace(local_devices=None)
    if is_slurm and not is_mpi:
        is_alone_on_machine = environ["SLURM_STEP_NUM_TASKS"] == environ.get("SLURM_STEP_NUM_NODES")
    return spec._replace(local_devices=None) if is_alone_on_machine else spec


def _read_count(name: str) -> int:
    """Return the number in an environment variable, or 1 if the variable is not set or empty."""
    value = os.environ.get(name) or "1"
    if not value.isdecimal():
        alone = Setting("num_processes", 1)
        problem = f"{name} must be a number, got {value!r}: correct it, or pass "
        raise UsageError(problem, alone, " to train in this process alone")
    return int(value)


def rendezvous(spec: ProcessSpec, seconds: float) -> dict[int, socket.socket]:
    """Connect process 0 to all other processes; return the connections, keyed by index."""
    deadline = time.monotonic() + seconds
    if spec.index == 0:
        connections = _accept_others(spec, deadline, seconds)
    else:
        connections = {0: _connect_to_first(spec, deadline, seconds)}
    for connection in connections.values():
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            # Some systems do not support these socket options.
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connections


def _accept_others(spec: ProcessSpec, deadline: float, seconds: float) -> dict[int, socket.socket]:
    """Accept a connection from every other process, and then notify them all."""
    # Other programs may also connect, so accept only handshakes from this run's processes.
    indices = {spec._replace(index=i).handshake: i for i in range(1, spec.count)}
    connections: dict[int, socket.socket] = {}
    port = int(spec.coordinator.rpartition(":")[2])
    is_dualstack = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dualstack else socket.AF_INET
    try:
        server = socket.create_server(("", port), family=family, dualstack_ipv6=is_dualstack)
    except OSError as error:
        raise ConnectionFailedError(
            f"process 0 cannot listen at {spec.coordinator}: {error.strerror}; if another run uses "
            f"this port, choose a different one"
        ) from error
    with server:
        while missing := [str(i) for i in indices.values() if i not in connections]:
            server.settimeout(max(deadline - time.monotonic(), 0.01))
            try:
                connection, _ = server.accept()
                connection.settimeout(HANDSHAKE_SECONDS)
                index = indices.get(connection.recv(len(min(indices)) + 9).decode())
            except (OSError, ValueError) as error:
                if time.monotonic() < deadline:
                    continue
                raise ConnectionFailedError(
                    f"{len(missing)} of {spec.count} processes did not connect within "
                    f"{seconds:.0f} s: {', '.join(missing)}"
                ) from error
            if index is None:
                connection.close()
            else:
                connections[index] = connection
    for connection in connections.values():
        with contextlib.suppress(OSError):
            connection.sendall(READY)
    return connections


def _connect_to_first(spec: ProcessSpec, deadline: float, seconds: float) -> socket.socket:
    """Connect to process 0, and wait until it reports that all processes are connected."""
    host, _, port = spec.coordinator.rpartition(":")
    address = (host.strip("[]"), int(port))
    while True:
        try:
            timeout = max(deadline - time.monotonic(), 0.01)
            connection = socket.create_connection(address, timeout=timeout)
            connection.sendall(spec.handshake.encode())
            # Wait a little longer than process 0, which has its own deadline.
            connection.settimeout(seconds + 10)
            if connection.recv(len(READY)) == READY:
                return connection
            connection.close()
            reason = "process 0 exited or belongs to another run"
        except OSError as error:
            reason = error.strerror or str(error)
        if time.monotonic() >= deadline:
            raise ConnectionFailedError(
                f"process 0 was not found at {spec.coordinator} within {seconds:.0f} s: {reason}"
            )
        time.sleep(RETRY_SECONDS)
