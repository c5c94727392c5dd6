"""Wrappers for the private JAX APIs that this package uses.

JAX may move or remove these APIs in any release. If an API is missing,
`tests/unit/distributed/test_private_jax.py` fails and names it.

The public `jax.experimental.multihost_utils` also offers a barrier and a broadcast, but these
functions run collectives on the devices. A process waits for the devices in C++, where it cannot
handle signals or send heartbeats, and it is aborted if the wait exceeds the collective's timeout.
"""

import logging
from typing import Protocol, cast, runtime_checkable


@runtime_checkable
class KeyValueStore(Protocol):
    """The key-value store that `jax.distributed` shares between processes."""

    def key_value_set(self, key: str, value: str) -> None:
        """Store a value under a new key."""

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        """Wait for a key's value; on timeout, raise `JaxRuntimeError` with DEADLINE_EXCEEDED."""
        ...


def key_value_store() -> KeyValueStore:
    """Return the store shared by the processes that `jax.distributed.initialize` connected."""
    from jax._src.distributed import global_state

    return cast(KeyValueStore, global_state.client)


def suppress_startup_warning() -> None:
    """Suppress the warning about proxies that `jax.distributed.initialize` logs every time."""
    logging.getLogger("jax._src.distributed").setLevel(logging.ERROR)


def detect_cluster(timeout_seconds: int) -> tuple[str, int, int, list[int] | None] | None:
    """Return the fields of this process's `ProcessSpec`, or None outside a cluster.

    Supported clusters are Slurm, Open MPI, Kubernetes, and Cloud TPU. `timeout_seconds` limits the
    search for the coordinator's address. Unlike `jax.distributed.initialize`, which aborts, this
    function raises errors.
    """
    from jax._src.clusters import ClusterEnv

    coordinator, count, index, devices = ClusterEnv.auto_detect_unset_distributed_params(
        None, None, None, None, None, timeout_seconds
    )
    if coordinator is None or count is None or index is None:
        return None
    return coordinator, count, index, None if devices is None else list(devices)
