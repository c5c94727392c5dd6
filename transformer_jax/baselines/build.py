"""Build a model for any `model.architecture`, and decode with it.

Only this file maps architecture names to the functions that build and run models.
Shapes: B batch, S source positions, T target positions, J hypotheses per sentence, L maximum
translation length, N vocab_size.
"""

from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Array, Float, Int

from transformer_jax.baselines import incremental
from transformer_jax.baselines.convolutional import ConvolutionalModel
from transformer_jax.baselines.recurrent import RecurrentModel
from transformer_jax.config import Config, ModelConfig
from transformer_jax.model import decoding, inspect
from transformer_jax.model.build import build_transformer, check_dtype
from transformer_jax.model.encoder_decoder import EncoderDecoder, Params

DecodingState = decoding.DecodingState | incremental.DecodingState
"""The arrays that are carried from one decoding step to the next."""


@dataclass(frozen=True)
class Architecture:
    """The functions that build, run, and inspect the models of one architecture."""

    build: Callable[..., EncoderDecoder]
    init_decoding: Callable[..., DecodingState]
    decode_step: Callable[..., tuple[Array, DecodingState]]
    attention_weights: Callable[..., dict[str, Array]]


INCREMENTAL = (incremental.init_decoding, incremental.decode_step, incremental.attention_weights)
ARCHITECTURES = {
    "transformer": Architecture(
        build_transformer,
        decoding.init_decoding,
        decoding.decode_step,
        inspect.attention_weights,
    ),
    "rnn": Architecture(RecurrentModel, *INCREMENTAL),
    "conv": Architecture(ConvolutionalModel, *INCREMENTAL),
}


def build_model(
    config: ModelConfig, vocab_size: int, source_vocab_size: int | None = None
) -> EncoderDecoder:
    """Build the model that the config describes. `EncoderDecoder` explains the vocabulary sizes.

    Models that are built from equal arguments compare equal, so `jax.jit` compiles each of the
    model's functions only once.

    Raises:
        ConfigError: the dtype is float64, but JAX's 64-bit types are disabled.
    """
    check_dtype(config)
    return ARCHITECTURES[config.architecture].build(config, vocab_size, source_vocab_size)


def count_parameters(config: Config) -> dict[str, int]:
    """Return the model's parameter counts, given the vocabulary sizes in the config."""
    model = build_model(config.model, config.data.vocab_size, config.data.source_vocab_size)
    return inspect.parameter_counts(model)


def init_decoding(
    model: EncoderDecoder,
    params: Params,
    source: Int[Array, "B S"],
    *,
    num_hypotheses: int,
    max_length: int,
) -> DecodingState:
    """Encode the source, and return the initial state for generating up to `max_length` tokens."""
    start = ARCHITECTURES[model.config.architecture].init_decoding
    return start(model, params, source, num_hypotheses=num_hypotheses, max_length=max_length)


def decode_step(
    model: EncoderDecoder,
    params: Params,
    tokens: Int[Array, "B J"],
    position: Int[Array, ""],
    ancestors: Int[Array, "B J L"],
    state: DecodingState,
) -> tuple[Float[Array, "B J N"], DecodingState]:
    """Return the logits that `decode` would return at `position`, and the new state.

    With `model` and `params` bound, `inference.search` can use this function as its step function.
    """
    step = ARCHITECTURES[model.config.architecture].decode_step
    return step(model, params, tokens, position, ancestors, state)


def attention_weights(
    model: EncoderDecoder, params: Params, source: Int[Array, "B S"], target: Int[Array, "B T"]
) -> dict[str, Float[Array, "layers B heads _ _"]]:
    """Return a forward pass's attention weights, stacked over layers and keyed by attention kind.

    The kinds of attention are those in `model.inspect.attention_weights`, but an architecture might
    have only some of them.
    """
    return ARCHITECTURES[model.config.architecture].attention_weights(model, params, source, target)
