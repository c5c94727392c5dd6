"""Test that JAX still contains the private APIs that this package uses.

If an API is missing, the error explains what to do.
"""

import importlib
import inspect

import pytest

MODULE = "transformer_jax/distributed/_private_jax.py"


def private_name(module: str, name: str) -> object:
    """Return a private JAX object, or fail with a message that names the module to change."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        pytest.fail(
            f"JAX no longer has {module}.{name}: find its replacement for {MODULE}: {error}"
        )


def test_jax_still_has_a_client_of_the_coordination_service() -> None:
    state = private_name("jax._src.distributed", "global_state")
    assert hasattr(state, "client"), f"global_state has no client: change {MODULE}"
    client_type = private_name("jax._src.lib", "_jax")
    client = getattr(client_type, "DistributedRuntimeClient", None)
    for method in ("key_value_set", "blocking_key_value_get"):
        assert hasattr(client, method), f"the client has no {method}: change {MODULE}"


def test_jax_still_has_the_logger_that_warns_about_proxies() -> None:
    logger = private_name("jax._src.distributed", "logger")
    assert getattr(logger, "name", None) == "jax._src.distributed", f"change {MODULE}"


def test_jax_still_detects_clusters_with_the_same_parameters() -> None:
    cluster_env = private_name("jax._src.clusters", "ClusterEnv")
    detect = getattr(cluster_env, "auto_detect_unset_distributed_params", None)
    assert detect is not None, f"ClusterEnv no longer detects clusters: change {MODULE}"
    assert list(inspect.signature(detect).parameters) == [
        "coordinator_address",
        "num_processes",
        "process_id",
        "local_device_ids",
        "cluster_detection_method",
        "initialization_timeout",
    ], f"the parameters of the detection changed: change {MODULE}"
