"""The configuration of an experiment: frozen, typed dataclasses whose defaults match the paper.

This subpackage does not import JAX, so an invalid config is reported before JAX initializes any
device.
"""

from transformer_jax.config.schema import Config, Paper, Row
from transformer_jax.config.sections import DataConfig, DecodeConfig, ModelConfig, TrainConfig
from transformer_jax.errors import ConfigError

__all__ = [
    "Config",
    "ConfigError",
    "DataConfig",
    "DecodeConfig",
    "ModelConfig",
    "Paper",
    "Row",
    "TrainConfig",
]
