"""Processes that train one model together, on one or more machines.

Each process has its own devices, reads its own rows in each batch, and runs the same program. All
processes write checkpoint arrays, but only the primary process, process 0, writes anything else to
the run's folder. The processes must agree on each decision that depends on a clock, a disk, or a
signal. For example, if one process saved a checkpoint and another did not, they would deadlock.

This module imports JAX only if a run has several processes.
"""

import contextlib
import itertools
import json
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from transformer_jax.config import Config
from transformer_jax.distributed import heartbeat, rendezvous
from transformer_jax.distributed._private_jax import key_value_store, suppress_startup_warning
from transformer_jax.distributed.failure_propagation import FailurePropagation
from transformer_jax.errors import UsageError

if TYPE_CHECKING:
    import jax

T = TypeVar("T")

# Python cannot handle signals while JAX waits in C++, so longer waits are split into intervals of
# this length.
POLL_MILLISECONDS = 2000
# If a machine becomes unreachable, JAX ends the run after this many seconds. `FailurePropagation`
# usually ends the run earlier.
HEARTBEAT_TIMEOUT_SECONDS = 60


class ProcessGroup:
    """The processes that train one model together.

    All processes must call the methods in the same order. If a process fails, `FailurePropagation`
    ends the processes that are waiting for it.
    """

    def __init__(self, count: int = 1, index: int = 0) -> None:
        """Store the number of processes and the zero-based index of this process."""
        self.count, self.index = count, index
        self._calls = itertools.count()

    @property
    def is_primary(self) -> bool:
        """Whether this process does work that only one process may do, such as writing metrics."""
        return self.index == 0

    def barrier(self) -> None:
        """Wait until every process has called `barrier`."""
        self.all_true(True)

    def all_true(self, value: bool) -> bool:
        """Wait until every process has called this, and return whether all values are true."""
        if self.count == 1:
            return value
        # Only the primary process waits for each of the others, so that the number of requests is
        # proportional to the number of processes.
        key = f"transformer_jax/{next(self._calls)}"
        if not self.is_primary:
            key_value_store().key_value_set(f"{key}/{self.index}", json.dumps(value))
            return json.loads(self._wait_for_value(key))
        others = [json.loads(self._wait_for_value(f"{key}/{i}")) for i in range(1, self.count)]
        result = all([value, *others])
        key_value_store().key_value_set(key, json.dumps(result))
        return result

    def broadcast(self, value: T) -> T:
        """Return the primary process's value, which must be JSON-serializable, in all processes."""
        if self.count == 1:
            return value
        key = f"transformer_jax/{next(self._calls)}"
        if not self.is_primary:
            return json.loads(self._wait_for_value(key))
        key_value_store().key_value_set(key, json.dumps(value))
        return value

    def check_same_config(self, config: Config) -> None:
        """Check that all processes have the same config; only `data.folder` may differ."""
        primary = Config.from_dict(self.broadcast(config.to_dict()))
        differences = [
            f"{section}.{key} {theirs!r} in process 0, {ours!r} in this process"
            for (section, key), (ours, theirs) in config.differences(primary).items()
            if (section, key) != ("data", "folder")
        ]
        if differences:
            changes = ", ".join(differences)
            raise UsageError(
                f"process {self.index} has different options from process 0: {changes}"
            )

    def _wait_for_value(self, key: str) -> str:
        import jax

        while True:
            # If the other process is stuck, its own supervisor kills it.
            heartbeat.busy("waiting for another process")
            try:
                return key_value_store().blocking_key_value_get(key, POLL_MILLISECONDS)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise


SINGLE_PROCESS = ProcessGroup()


class Vote(NamedTuple):
    """The combined votes of all processes; `step` and `signal` are 0 if there is none yet."""

    step: int
    signal: int
    needs_recovery_save: bool
    """Whether any process requests a recovery checkpoint."""


class StepConsensus:
    """A nonblocking vote among the processes on whether to stop or to save a recovery checkpoint.

    The devices compute the maximum of all votes, which each process reads `DELAY` steps later.
    """

    DELAY = 2

    def __init__(self, group: ProcessGroup) -> None:
        self._max_over_processes = _make_max_over_processes() if group.count > 1 else None
        self._pending: deque[tuple[int, jax.Array]] = deque()

    def vote(self, step: int, signal: int, needs_recovery_save: bool) -> Vote:
        """Submit this process's vote after a step has started; return the latest combined vote."""
        if self._max_over_processes is None:
            return Vote(step, signal, needs_recovery_save)
        self._pending.append((step, self._max_over_processes(signal, needs_recovery_save)))
        if len(self._pending) <= self.DELAY:
            return Vote(0, 0, False)
        earlier_step, maximum = self._pending.popleft()
        largest_signal, any_needs_save = maximum.addressable_data(0).tolist()
        return Vote(earlier_step, largest_signal, bool(any_needs_save))


def _make_max_over_processes() -> Callable[[int, bool], "jax.Array"]:
    """Return a function that takes this process's vote and returns the maximum of all votes."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()), ("all",))
    by_device = NamedSharding(mesh, PartitionSpec("all"))
    replicated = NamedSharding(mesh, PartitionSpec())
    maximum = jax.jit(lambda votes: votes.max(axis=0), out_shardings=replicated)

    def max_over_processes(signal: int, needs_recovery_save: bool) -> jax.Array:
        vote = np.array([signal, needs_recovery_save], np.int32)
        votes = np.tile(vote, (jax.local_device_count(), 1))
        return maximum(jax.make_array_from_process_local_data(by_device, votes))

    return max_over_processes


@contextlib.contextmanager
def join_processes(
    run: Path, coordinator: str | None, num_processes: int | None, process_id: int | None
) -> Iterator[ProcessGroup]:
    """If a run has several processes, connect them before JAX uses a device.

    If there are several processes, an error inside the context ends all of them instead of
    propagating. Messages about a lost process include the run's folder. For the other arguments,
    see `resolve_cluster`.
    """
    spec = rendezvous.resolve_cluster(coordinator, num_processes, process_id)
    if spec is None:
        yield SINGLE_PROCESS
        return
    connections = rendezvous.rendezvous(spec, rendezvous.RENDEZVOUS_SECONDS)
    failures = FailurePropagation(connections, run, is_primary=spec.index == 0)
    try:
        import jax

        # `GracefulShutdown` handles signals, so turn off JAX's preemption service.
        jax.config.update("jax_enable_preemption_service", False)
        suppress_startup_warning()
        jax.distributed.initialize(
            *spec[:3],
            local_device_ids=spec.local_devices,
            cluster_detection_method="deactivate",
            heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_SECONDS,
        )
        yield ProcessGroup(spec.count, spec.index)
    except BaseException as error:  # noqa: BLE001 (any error ends all processes)
        failures.end(error)
    failures.leave()
    # Wait until all processes are done, because process 0 hosts the key-value store.
    jax.distributed.shutdown()
    failures.close()
