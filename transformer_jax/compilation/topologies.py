"""Create JAX devices that serve only as compilation targets."""

import importlib.util
from typing import Any

import jax
from jax.experimental import topologies

from transformer_jax.compilation.targets import Target
from transformer_jax.errors import UsageError
from transformer_jax.optional import missing_library

CUDA_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")


def make_devices(target: Target) -> list[jax.Device]:
    """Return a target's devices. Programs can be compiled for them, but not run on them."""
    check_installed(target)
    options: dict[str, Any] = {"topology": target.topology}
    if target.is_tpu:
        options = {"topology_name": target.topology, "chips_per_host_bounds": target.host_bounds}
        if target.kind == "v4":
            options["chip_config_name"] = "megacore"
    else:
        options["target_config"] = target.gpu_description
    try:
        platform = "tpu" if target.is_tpu else "cuda"
        return list(topologies.get_topology_desc(platform=platform, **options).devices)
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"XLA cannot compile for {target}: {reason}") from error


def check_installed(target: Target) -> None:
    """If the target's compiler is missing, raise a UsageError with the command to install it."""
    if target.is_tpu and not _is_installed("libtpu"):
        raise missing_library("libtpu", "compiling for TPUs")
    if not target.is_tpu and not any(map(_is_installed, CUDA_PLUGINS)):
        raise missing_library("JAX's CUDA plugin", "compiling for GPUs")


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
