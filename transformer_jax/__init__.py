"""The Transformer of "Attention Is All You Need", in JAX and Flax.

`transformer_jax.load("runs/x")` opens a trained run on any device. JAX is imported when it is
first asked for, not before.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformer_jax.inference.trained_run import Run, load

__all__ = ["Run", "load"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'transformer_jax' has no attribute {name!r}")
    from transformer_jax.inference import trained_run

    return getattr(trained_run, name)
