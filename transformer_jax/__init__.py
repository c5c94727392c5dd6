"""A faithful JAX and Flax implementation of the Transformer from "Attention Is All You Need".

Train a model, and translate with it:

    >>> import transformer_jax as tj
    >>> config = tj.load_config("tiny")
    >>> run = tj.train(config, "runs/tiny", callback=print)
    >>> run.translate(["forty-two"])
    ['zweiundvierzig']

Load a trained run on any device, and score it on its test set:

    >>> run = tj.load("runs/tiny")
    >>> run.evaluate().scores.bleu > 99
    True

Describe an experiment. The default values are those of the paper's base model, so an ablation
specifies only the fields that it changes. For example, this config matches the row in group (B) of
Table 3 that has the smallest keys:

    >>> config = tj.Config().change(model={"d_k": 16})

Train the rows in an ablation with several seeds, and compare them:

    >>> tj.sweep("heads", "sweeps/heads", seeds=2)
    >>> tj.report("sweeps/heads").to_pandas()

Register a part of the model in your own file. `docs/extending.md` lists the kinds of parts:

    >>> @tj.register("model.activation", "squared_relu")
    ... def squared_relu(x):
    ...     return jax.nn.relu(x) ** 2

The `transformer-jax` command is a thin layer over these functions.

The stable API consists of the names that this package and its subpackages `model` (section 3),
`data` (section 5.1), and `training` (sections 5.2 to 5.4) export. Modules that require JAX are
imported when a name is first used.
"""

from typing import TYPE_CHECKING

from transformer_jax.config import (
    Config,
    DataConfig,
    DecodeConfig,
    ModelConfig,
    Paper,
    Row,
    TrainConfig,
)
from transformer_jax.config.loading import load_config, load_rows
from transformer_jax.errors import (
    BackendError,
    ConfigError,
    DataError,
    DivergedError,
    OutOfMemoryError,
    RunInterrupted,
    StorageError,
    SweepFailedError,
    TransformerJaxError,
    UsageError,
)
from transformer_jax.exports import lazy_exports
from transformer_jax.registry import register

if TYPE_CHECKING:
    from transformer_jax.analysis.comparison import compare
    from transformer_jax.analysis.head_importance import head_importance, mask_heads
    from transformer_jax.analysis.plots import plot_losses, plot_positions, plot_schedule
    from transformer_jax.api import Report, report, sweep, train
    from transformer_jax.evaluation.tasks import Task
    from transformer_jax.inference.alignments import alignment_error_rate
    from transformer_jax.inference.attention import Attention
    from transformer_jax.inference.ensemble import ensemble
    from transformer_jax.inference.hidden_states import HiddenStates
    from transformer_jax.inference.pairs import PairScore
    from transformer_jax.inference.sampling import Sampling
    from transformer_jax.inference.trained_run import Run, load
    from transformer_jax.inference.translate import Translator
    from transformer_jax.model.attention import MultiHeadAttention
    from transformer_jax.model.build import PositionScheme, build_transformer
    from transformer_jax.model.dropout import Dropout
    from transformer_jax.model.layers import FeedForward
    from transformer_jax.model.linear import Dense
    from transformer_jax.model.losses import Loss
    from transformer_jax.model.positions import AddPositions
    from transformer_jax.model.transformer import Transformer
    from transformer_jax.training.trackers import TrackedRun, Tracker

__all__ = [
    "AddPositions",
    "Attention",
    "BackendError",
    "Config",
    "ConfigError",
    "DataConfig",
    "DataError",
    "DecodeConfig",
    "Dense",
    "DivergedError",
    "Dropout",
    "FeedForward",
    "HiddenStates",
    "Loss",
    "ModelConfig",
    "MultiHeadAttention",
    "OutOfMemoryError",
    "PairScore",
    "Paper",
    "PositionScheme",
    "Report",
    "Row",
    "Run",
    "RunInterrupted",
    "Sampling",
    "StorageError",
    "SweepFailedError",
    "Task",
    "TrackedRun",
    "Tracker",
    "TrainConfig",
    "Transformer",
    "TransformerJaxError",
    "Translator",
    "UsageError",
    "alignment_error_rate",
    "build_transformer",
    "compare",
    "ensemble",
    "head_importance",
    "load",
    "load_config",
    "load_rows",
    "mask_heads",
    "plot_losses",
    "plot_positions",
    "plot_schedule",
    "register",
    "report",
    "sweep",
    "train",
]

__getattr__ = lazy_exports(__name__)


def __dir__() -> list[str]:
    return __all__
