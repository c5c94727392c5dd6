"""Wrappers of all private names of JAX that this package uses.

JAX may move these names in any release; `tests/unit/test_private_jax.py` then reports which names
are missing.

The public `jax.experimental.multihost_utils` also offers a barrier and a broadcast, but they run on
the devices, in C++ code. A process that waits in one of them does not handle signals or send
heartbeats, and a wait longer than the timeout of the collective aborts the process.
"""

from typing import Protocol, cast, runtime_checkable


@runtime_checkable
class KeyValueStore(Protocol):
    """The store of strings that `jax.distributed` shares between processes."""

    def key_value_set(self, key: str, value: str) -> None:
        """Store a value under a key that is not in use yet."""

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        """Wait for the value of a key, or raise `JaxRuntimeError` with DEADLINE_EXCEEDED."""
        ...


def key_value_store() -> KeyValueStore:
    """Return the store shared by the processes that `jax.distributed.initialize` connected."""
    from jax._src.distributed import global_state

    return cast(KeyValueStore, global_state.client)


def detect_cluster(timeout_seconds: int) -> tuple[str, int, int, list[int] | None] | None:
    """Return the `ProcessSpec` that Slurm, Open MPI, Kubernetes, or Cloud TPU describes, or None.

    `jax.distributed.initialize` uses the same detection but aborts the process if it fails. This
    function raises the error instead. The timeout limits the wait for the coordinator's address.
    """
    from jax._src.clusters import ClusterEnv

    coordinator, count, index, devices = ClusterEnv.auto_detect_unset_distributed_params(
        None, None, None, None, None, timeout_seconds
    )
    if coordinator is None or count is None or index is None:
        return None
    return coordinator, count, index, None if devices is None else list(devices)
