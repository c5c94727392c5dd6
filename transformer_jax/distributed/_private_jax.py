"""The private names of JAX that this package uses, in one place.

JAX may move them in any release; `tests/unit/test_private_jax.py` then names what is missing.

The public `jax.experimental.multihost_utils` offers a barrier and a broadcast too. They run on the
devices, inside C++: a process that waits in one of them handles no signal and sends no heartbeat,
and a wait longer than the collective's own timeout aborts it.
"""

from typing import NamedTuple, Protocol, cast, runtime_checkable


@runtime_checkable
class KeyValueStore(Protocol):
    """The store of strings that `jax.distributed` shares between processes."""

    def key_value_set(self, key: str, value: str) -> None:
        """Store a value under a key that is not taken yet."""
        ...

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        """Return the value of a key, and wait for it if necessary.

        Raises:
            jax.errors.JaxRuntimeError: with DEADLINE_EXCEEDED, if the time is over.
        """
        ...


class DetectedCluster(NamedTuple):
    """What JAX knows about the processes that a cluster's scheduler started."""

    coordinator: str
    """HOST:PORT of process 0."""
    count: int
    index: int
    local_devices: list[int] | None
    """The devices of this process; None means all devices of its machine."""


def key_value_store() -> KeyValueStore:
    """Return the store of the processes that `jax.distributed.initialize` connected."""
    from jax._src.distributed import global_state

    return cast(KeyValueStore, global_state.client)


def detect_cluster(timeout_seconds: int) -> DetectedCluster | None:
    """Return what the environment of Slurm, Open MPI, Kubernetes, or Cloud TPU says, or None.

    `jax.distributed.initialize` detects the same but aborts the process if it fails. This function
    raises any error that the detection raises.

    Args:
        timeout_seconds: how long the detection may wait for the coordinator's address.
    """
    from jax._src.clusters import ClusterEnv

    coordinator, count, index, devices = ClusterEnv.auto_detect_unset_distributed_params(
        None, None, None, None, None, timeout_seconds
    )
    if coordinator is None or count is None or index is None:
        return None
    return DetectedCluster(coordinator, count, index, None if devices is None else list(devices))
