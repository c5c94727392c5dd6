"""The configuration of an experiment: frozen, typed dataclasses whose defaults are the paper's.

`schema` defines the fields, `validation` checks them, and `loading` reads config files. Nothing
here imports JAX, so an invalid config is reported before JAX initializes any device.
"""

from transformer_jax.config.schema import (
    MAX_EXTRA_LENGTH,
    Config,
    DataConfig,
    DecodeConfig,
    ModelConfig,
    Paper,
    Row,
    TrainConfig,
)
from transformer_jax.errors import ConfigError

__all__ = [
    "MAX_EXTRA_LENGTH",
    "Config",
    "ConfigError",
    "DataConfig",
    "DecodeConfig",
    "ModelConfig",
    "Paper",
    "Row",
    "TrainConfig",
]
