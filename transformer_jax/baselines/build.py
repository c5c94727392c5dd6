"""Build a model for any `model.architecture`."""

from collections.abc import Callable

from transformer_jax.backend import start_backend
from transformer_jax.baselines.convolutional import ConvolutionalModel
from transformer_jax.baselines.recurrent import RecurrentModel
from transformer_jax.config import Config, ModelConfig
from transformer_jax.model import inspect
from transformer_jax.model.build import build_transformer, check_dtype
from transformer_jax.model.encoder_decoder import EncoderDecoder
from transformer_jax.registry import Registry

ARCHITECTURES = Registry[Callable[..., EncoderDecoder]]("model.architecture")
"""Classes or functions that take a `ModelConfig` and the two vocabulary sizes."""
ARCHITECTURES.register("transformer")(build_transformer)
ARCHITECTURES.register("rnn")(RecurrentModel)
ARCHITECTURES.register("conv")(ConvolutionalModel)


def build_model(
    config: ModelConfig, vocab_size: int, source_vocab_size: int | None = None
) -> EncoderDecoder:
    """Build the model that the config describes. Models with equal arguments compare equal."""
    check_dtype(config)
    return ARCHITECTURES[config.architecture](config, vocab_size, source_vocab_size)


def count_parameters(config: Config) -> dict[str, int]:
    """Return the model's parameter counts, given the vocabulary sizes in the config."""
    start_backend()
    model = build_model(config.model, config.data.vocab_size, config.data.source_vocab_size)
    return inspect.parameter_counts(model)
