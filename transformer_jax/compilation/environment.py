"""Environment variables for compiling programs without the target's devices.

This module does not import JAX.
"""

import os

from transformer_jax.xla_flags import GPU_FLAGS, add_flags

FLAGS = {
    # XLA chooses kernels by timing candidates, which is impossible without a GPU.
    "xla_gpu_autotune_level": "0",
    **GPU_FLAGS,
}
"""The flags for programs that are compiled for GPUs."""

VARIABLES = {
    # Keep JAX from preallocating memory on this machine's devices.
    "JAX_PLATFORMS": "cpu",
    # JAX's compilation cache cannot load programs for devices that this machine does not have.
    "JAX_ENABLE_COMPILATION_CACHE": "false",
    # Hide XLA's warning about compilations that take more than two minutes. JAX raises XLA's errors
    # as exceptions, so they remain visible.
    "TF_CPP_MIN_LOG_LEVEL": "3",
    # By default, libtpu allows only one process at a time and queries the cloud's metadata server.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_LOG_DIR": "disabled",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
}


def configure_environment(*, for_gpus: bool) -> None:
    """Set the environment variables that JAX and libtpu read when they are loaded."""
    os.environ.update(VARIABLES)
    if for_gpus:
        add_flags(FLAGS)
