"""The Transformer: an encoder and a decoder (sections 3 and 3.1).

Shapes: B batch, S source positions, T target positions, D d_model, N vocab_size. Tokens are
integers. Padding is 0 and occurs only after the end of a sentence.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int, PyTree

from transformer_jax.config import ModelConfig
from transformer_jax.model.embeddings import Embedding
from transformer_jax.model.layers import Components, DecoderLayer, EncoderLayer
from transformer_jax.special_tokens import BOS, PAD

Params = dict[str, Any]
"""Parameters, keyed by module and nested as in Flax."""
Intermediates = Mapping[str, Any]
"""Values that modules recorded with `sow`, keyed by module and nested as in Flax."""
EncoderOutput = PyTree
"""The memory: arrays in any structure, which the model's decoder reads."""


def source_mask(source: Int[Array, "B S"]) -> Bool[Array, "B 1 1 S"]:
    """Allow attention to everything except padding."""
    return (source != PAD)[:, None, None, :]


def causal_mask(length: int) -> Bool[Array, "1 1 T T"]:
    """Let each position attend to itself and to earlier positions (section 3.2.3).

    Padding does not need a mask, because it follows all target tokens.
    """
    return jnp.tril(jnp.ones((1, 1, length, length), bool))


def shift_right(target: Int[Array, "B T"], start: int = BOS) -> Int[Array, "B T"]:
    """Return the decoder's input: the start token, then all target tokens except the last."""
    return jnp.pad(target[:, :-1], ((0, 0), (1, 0)), constant_values=start)


class EncoderDecoder(nn.Module):
    """The structure in section 3: an encoder maps the source to a memory, and a decoder reads it.

    `Transformer` defines `encode` and `decode`. So do the recurrent and convolutional models in
    `architectures`, which training and search treat in the same way.
    """

    config: ModelConfig
    vocab_size: int
    """The size of the shared vocabulary, or of the target vocabulary if there are two."""
    source_vocab_size: int | None = None
    """The size of a separate source vocabulary. Differs from the paper, which shares it."""

    def setup(self) -> None:
        c = self.config
        self.embedding = Embedding(c, self.vocab_size)
        # By default, the three names refer to one module, so they share its matrix.
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

        Each row contains tokens, the end token, and then padding. This method shifts the target, so
        the labels are the target itself. Training needs `rngs={"dropout": key}`.
        """
        memory = self.encode(source, train=train)
        decoder_input = shift_right(target, self.config.decoder_start_id)
        return self.decode(decoder_input, memory, source_mask(source), train=train)


class Transformer(EncoderDecoder, kw_only=True):
    """The complete model (figure 1). `build_transformer` creates it from a config."""

    components: Components

    def setup(self) -> None:
        super().setup()
        c, components = self.config, self.components
        encoder_layer, decoder_layer = EncoderLayer, DecoderLayer
        if c.remat:
            # Argument 0 is the module itself; `train` is a Python bool and must be static.
            encoder_layer = nn.remat(EncoderLayer, static_argnums=(3,))
            decoder_layer = nn.remat(DecoderLayer, static_argnums=(5,))
        self.source_positions, self.target_positions = (
            components.add_positions(c, n) for n in c.max_positions_per_stack
        )
        # Flax names these layers encoder_0, encoder_1, and so on.
        encoder_depth, decoder_depth = c.layers_per_stack
        self.encoder = [encoder_layer(c, components) for _ in range(encoder_depth)]
        self.decoder = [decoder_layer(c, components) for _ in range(decoder_depth)]
        self.encoder_norm = components.residual.make_stack_norm(c)
        self.decoder_norm = components.residual.make_stack_norm(c)

    def encode(self, source: Int[Array, "B S"], *, train: bool = False) -> Float[Array, "B S D"]:
        """Return the memory: one vector for each source position."""
        x, mask = self.source_embedding.embed(source), source_mask(source)
        x = self.source_positions(x, jnp.arange(source.shape[1]), train=train)
        for layer in self.encoder:
            x = layer(x, mask, train)
        return self.encoder_norm(x)

    def decode(
        self,
        decoder_input: Int[Array, "B T"],
        memory: Float[Array, "B S D"],
        memory_mask: Bool[Array, "B 1 1 S"],
        *,
        train: bool = False,
    ) -> Float[Array, "B T N"]:
        """Return the logits for the next token at each position."""
        length = decoder_input.shape[1]
        x, mask = self.embedding.embed(decoder_input), causal_mask(length)
        x = self.target_positions(x, jnp.arange(length), train=train)
        for layer in self.decoder:
            x = layer(x, memory, mask, memory_mask, train)
        return self.to_logits(x)

    def to_logits(self, x: Float[Array, "B T D"]) -> Float[Array, "B T N"]:
        """Return the logits for the last decoder layer's output."""
        return self.output_embedding.logits(self.decoder_norm(x))


def make_rng(seed: int | Int[Array, ""]) -> Array:
    """Return a run's random key. The PRNG does not depend on JAX's configuration."""
    return jax.random.key(seed, impl="threefry2x32")


def init_params(model: EncoderDecoder, rng: Array) -> Params:
    """Draw the initial parameters."""
    tokens = jnp.ones((1, 1), jnp.int32)
    return dict(model.init(rng, tokens, tokens)["params"])
