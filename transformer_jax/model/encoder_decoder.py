"""The structure of all models: an encoder, a decoder, and shared embeddings (section 3).

Shapes: B batch, S source positions, T target positions, N vocab_size, J hypotheses per sentence, L
maximum translation length, H heads. Tokens are integers. Padding is 0 and occurs only after the end
of a sentence.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int, PyTree

from transformer_jax.config import ModelConfig
from transformer_jax.model.embeddings import Embedding
from transformer_jax.model.masks import source_mask
from transformer_jax.special_tokens import BOS

Params = dict[str, Any]
"""Parameters, keyed by module and nested as in Flax."""
Intermediates = Mapping[str, Any]
"""Values that modules recorded with `sow`, keyed by module and nested as in Flax."""
EncoderOutput = PyTree
"""The memory: a PyTree of arrays that the model's decoder reads."""
DecodingState = PyTree
"""The arrays that are carried from one decoding step to the next."""


def shift_right(target: Int[Array, "B T"], start: int = BOS) -> Int[Array, "B T"]:
    """Return the decoder's input: the start token, then all target tokens except the last."""
    return jnp.pad(target[:, :-1], ((0, 0), (1, 0)), constant_values=start)


class EncoderDecoder(nn.Module):
    """The structure in section 3: an encoder maps the source to a memory, which a decoder reads.

    The subclasses are `Transformer`, the recurrent and convolutional models in `baselines`,
    `EnsembleModel`, and models that are registered under a new `model.architecture`. Training needs
    `encode` and `decode`, and search also needs `init_decoding` and `decode_step`.
    """

    config: ModelConfig
    vocab_size: int
    """The size of the shared vocabulary, or of the target vocabulary if there are two
    vocabularies."""
    source_vocab_size: int | None = None
    """The size of a separate source vocabulary. Differs from the paper's shared vocabulary."""

    def setup(self) -> None:
        c = self.config
        self.embedding = Embedding(c, self.vocab_size)
        # By default, both embeddings and the output layer are one module, so they share one matrix.
        self.source_embedding = self.output_embedding = self.embedding
        if c.tie_embeddings != "all" or self.source_vocab_size is not None:
            self.source_embedding = Embedding(c, self.source_vocab_size or self.vocab_size)
        if c.tie_embeddings == "none":
            self.output_embedding = Embedding(c, self.vocab_size)

    def encode(self, source: Int[Array, "B S"], *, train: bool = False) -> EncoderOutput:
        """Return the memory."""
        raise NotImplementedError

    def decode(
        self,
        decoder_input: Int[Array, "B T"],
        memory: EncoderOutput,
        memory_mask: Bool[Array, "B 1 1 S"],
        *,
        train: bool = False,
    ) -> Float[Array, "B T N"]:
        """Return the logits for the next token at each position."""
        raise NotImplementedError

    def __call__(
        self, source: Int[Array, "B S"], target: Int[Array, "B T"], *, train: bool = False
    ) -> Float[Array, "B T N"]:
        """Return the logits for each target token, given the source and the earlier target tokens.

        Each row contains tokens, the end-of-sentence token, and then padding. This method shifts
        the target to get the decoder's input, so the labels are the unshifted target. For training,
        also pass `rngs={"dropout": key}`.
        """
        memory = self.encode(source, train=train)
        decoder_input = shift_right(target, self.config.decoder_start_id)
        return self.decode(decoder_input, memory, source_mask(source), train=train)

    def init_decoding(
        self, source: Int[Array, "B S"], *, num_hypotheses: int, max_length: int
    ) -> DecodingState:
        """Encode the source, and return the state before the first of `max_length` tokens."""
        raise NotImplementedError

    def decode_step(
        self,
        tokens: Int[Array, "B J"],
        position: Int[Array, ""],
        ancestors: Int[Array, "B J L"],
        state: DecodingState,
    ) -> tuple[Float[Array, "B J N"], DecodingState]:
        """Return the logits that `decode` would return at `position` (from 0), and the new state.

        `tokens` contains the latest token of each hypothesis. For the hypothesis that is now in
        slot j, ancestors[b, j, l] is the slot that read token l. The ancestors already include the
        current position.
        """
        raise NotImplementedError

    @nn.nowrap
    def stack_weights(
        self,
        intermediates: Intermediates,  # noqa: ARG002 - a model without attention has no weights.
    ) -> dict[str, Float[Array, "layers B H _ _"]]:
        """Stack the attention weights that a forward pass recorded, keyed by attention kind.

        The kinds are "encoder", "decoder", and "cross"; a model might have only some of them.
        """
        return {}


def make_rng(seed: int | Int[Array, ""]) -> Array:
    """Return the random key of a run. The type of PRNG does not depend on JAX's configuration."""
    return jax.random.key(seed, impl="threefry2x32")


@functools.partial(jax.jit, static_argnums=0)
def init_params(model: EncoderDecoder, rng: Array) -> Params:
    """Return randomly initialized parameters, drawn in one compiled program."""
    tokens = jnp.ones((1, 1), jnp.int32)
    return dict(model.init(rng, tokens, tokens)["params"])
