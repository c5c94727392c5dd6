"""A faithful JAX and Flax implementation of the Transformer from "Attention Is All You Need".

Translate with the model from a run, on any device:

    >>> import transformer_jax
    >>> run = transformer_jax.load("runs/demo")
    >>> run.translate(["forty-two"], beam_size=4)
    ['zweiundvierzig']

Describe an experiment. The default values are those of the paper's base model, so an ablation
specifies only the fields that it changes. For example, this config matches the row in group (A) of
Table 3 that has one attention head:

    >>> from transformer_jax import Config
    >>> config = Config().change(model={"num_heads": 1, "d_k": 512, "d_v": 512})

Build the Flax module for a config, with a shared vocabulary of 37,000 tokens:

    >>> from transformer_jax import build_transformer
    >>> model = build_transformer(config.model, vocab_size=37_000)

Compare the metrics of several runs, without loading their parameters:

    >>> from transformer_jax import compare
    >>> compare(["runs/sinusoidal", "runs/learned"]).plot("dev/perplexity").save("curves.svg")
    PosixPath('curves.svg')

The `transformer-jax` command trains, evaluates, and compares runs.

The subpackages follow the paper: `model` (section 3), `data` (5.1), `training` (5.2 to 5.4), and
`inference` (6.1). Only the names that `transformer_jax` exports are part of the stable API. The
package imports JAX lazily, when a name that requires JAX is first used.
"""

import importlib
from typing import TYPE_CHECKING

from transformer_jax.config import Config, DataConfig, DecodeConfig, ModelConfig, TrainConfig
from transformer_jax.errors import (
    ConfigError,
    DataError,
    OutOfMemoryError,
    StorageError,
    TransformerJaxError,
    UsageError,
)
from transformer_jax.registry import register

if TYPE_CHECKING:
    from transformer_jax.analysis.comparison import compare
    from transformer_jax.analysis.head_importance import head_importance
    from transformer_jax.analysis.plots import plot_losses, plot_positions, plot_schedule
    from transformer_jax.inference.attention import Attention
    from transformer_jax.inference.trained_run import Run, load
    from transformer_jax.inference.translate import Translator
    from transformer_jax.model.build import build_transformer
    from transformer_jax.model.head_mask import mask_heads
    from transformer_jax.model.transformer import Transformer

__all__ = [
    "Attention",
    "Config",
    "ConfigError",
    "DataConfig",
    "DataError",
    "DecodeConfig",
    "ModelConfig",
    "OutOfMemoryError",
    "Run",
    "StorageError",
    "TrainConfig",
    "Transformer",
    "TransformerJaxError",
    "Translator",
    "UsageError",
    "build_transformer",
    "compare",
    "head_importance",
    "load",
    "mask_heads",
    "plot_losses",
    "plot_positions",
    "plot_schedule",
    "register",
]

# The names that require JAX, mapped to the modules that define them. A module is imported when one
# of its names is first used.
_MODULES = {
    "Attention": "inference.attention",
    "Run": "inference.trained_run",
    "Transformer": "model.transformer",
    "Translator": "inference.translate",
    "build_transformer": "model.build",
    "compare": "analysis.comparison",
    "head_importance": "analysis.head_importance",
    "load": "inference.trained_run",
    "mask_heads": "model.head_mask",
    "plot_losses": "analysis.plots",
    "plot_positions": "analysis.plots",
    "plot_schedule": "analysis.plots",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'transformer_jax' has no attribute {name!r}")
    return getattr(importlib.import_module(f"transformer_jax.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return list({*globals(), *__all__})
