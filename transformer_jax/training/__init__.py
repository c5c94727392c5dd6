"""Training: the training step, the training loop, and the metrics (sections 5.2 to 5.4)."""

from typing import TYPE_CHECKING

from transformer_jax.exports import lazy_exports

if TYPE_CHECKING:
    from transformer_jax.training.schedule import learning_rate
    from transformer_jax.training.step import TrainState, TrainStep, init_state

__all__ = ["TrainState", "TrainStep", "init_state", "learning_rate"]

__getattr__ = lazy_exports(__name__)
