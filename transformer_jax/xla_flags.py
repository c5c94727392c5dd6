"""Flags in XLA_FLAGS, which XLA reads when JAX starts.

This module does not import JAX.
"""

import os
import re
from collections.abc import Mapping

GPU_FLAGS = {
    # Timing Triton's kernels for matrix products doubles the compile time of small models and does
    # not make any step faster.
    "xla_gpu_enable_triton_gemm": "false",
    # Without this flag, XLA times kernels to choose them, and the order in which some kernels add
    # numbers varies.
    "xla_gpu_deterministic_ops": "true",
}
"""The flags that runs on GPUs set by default."""


def add_flags(flags: Mapping[str, str]) -> None:
    """Add `flags` (name: value) to XLA_FLAGS, except those that it already sets."""
    present = os.environ.get("XLA_FLAGS", "")
    new = (f"--{k}={v}" for k, v in flags.items() if not re.search(rf"--{k}\b", present))
    os.environ["XLA_FLAGS"] = " ".join([*present.split(), *new])
