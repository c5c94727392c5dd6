"""Gated convolutions with attention in every decoder layer (ConvS2S, Gehring et al. 2017).

Each convolution has a gated linear unit and a residual connection, and each sum is scaled by
sqrt(1/2) to preserve the variance (sections 3.2 and 3.4 of that paper). Unlike ConvS2S, this model
uses Glorot uniform initialization and does not use weight normalization or gradient scaling.
The config determines the attention score and the positional encodings.

Shapes: B batch, S source positions, T positions, J hypotheses per sentence, D d_model, W kernel
width, N vocab_size.
"""

from typing import NamedTuple

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from transformer_jax.baselines.incremental import IncrementalModel
from transformer_jax.baselines.source_attention import Source, SourceAttention
from transformer_jax.config import ModelConfig
from transformer_jax.model.build import choose_components
from transformer_jax.model.dropout import Dropout
from transformer_jax.model.encoder_decoder import Intermediates
from transformer_jax.model.linear import Dense
from transformer_jax.model.masks import source_mask

HALF_VARIANCE = 0.5**0.5
"""The factor that scales a sum of two terms with equal variance back to that variance."""


def windows(x: Float[Array, "B T D"], width: int, *, before: int) -> Float[Array, "B T W D"]:
    """Return the `width` input vectors from which a convolution computes each output.

    The first `before` vectors come from positions before the output's own position. Positions
    outside the sequence are filled with zeros.
    """
    length = x.shape[1]
    x = jnp.pad(x, ((0, 0), (before, width - 1 - before), (0, 0)))
    return jnp.stack([x[:, i : i + length] for i in range(width)], axis=2)


class GatedConvolution(nn.Module):
    """A convolution that computes A and B, and the gated linear unit A * sigmoid(B)."""

    config: ModelConfig

    @nn.compact
    def __call__(self, windows: Float[Array, "B T W D"]) -> Float[Array, "B T D"]:
        c = self.config
        # A convolution applies the same linear layer to each window.
        y = Dense((2 * c.d_model,), c.dtype, num_input_axes=2, name="convolution")(windows)
        return jnp.asarray(nn.glu(y))


class EncoderLayer(nn.Module):
    """A gated convolution over each position and its neighbors."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "B S D"], mask: Bool[Array, "B 1 1 S"], *, train: bool = False
    ) -> Float[Array, "B S D"]:
        """Return the layer's output. Where `mask` is False, the convolution reads zeros."""
        width = self.config.conv_kernel_width
        real = jnp.where(mask[:, 0, 0, :, None], x, 0)
        real = Dropout(self.config.dropout)(real, train=train)
        neighbors = windows(real, width, before=(width - 1) // 2)
        y = GatedConvolution(self.config, name="gated")(neighbors)
        return (x + y) * HALF_VARIANCE


class DecoderLayer(nn.Module):
    """A gated convolution over the current and earlier positions, and attention to the source."""

    config: ModelConfig

    def setup(self) -> None:
        c = self.config
        self.gated = GatedConvolution(c)
        self.attention = SourceAttention(c)
        self.query = Dense((c.d_model,), c.dtype)
        self.output = Dense((c.d_model,), c.dtype)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        past: Float[Array, "B T W D"],
        embedded: Float[Array, "B T D"],
        source: Source,
        *,
        train: bool = False,
    ) -> Float[Array, "B T D"]:
        """Return the layer's output.

        `past` contains x, after dropout, at the W positions up to and including each position.
        The query includes the embedding of the input token, so that attention can depend on the
        previous word.
        """
        h = self.gated(past)
        query = (self.query(h) + embedded) * HALF_VARIANCE
        context = self.attention(query, source, train=train)
        # Averaging m vectors divides the variance by m, so multiply the context by sqrt(m).
        num_real = jnp.sum(source.mask, axis=-1).astype(context.dtype)
        attended = self.output(context * jnp.sqrt(num_real))
        return (x + (h + attended) * HALF_VARIANCE) * HALF_VARIANCE


class Memory(NamedTuple):
    """The encoder's output."""

    keys: Float[Array, "B S D"]
    """The outputs of the last encoder layer."""
    values: Float[Array, "B S D"]
    """The scaled sum of the last encoder layer's outputs and the input embeddings."""


class ConvolutionalModel(IncrementalModel):
    """An encoder and a decoder with `num_layers` gated convolutions each."""

    def setup(self) -> None:
        super().setup()
        c = self.config
        add_positions = choose_components(c).add_positions
        self.source_positions, self.target_positions = (
            add_positions(c, n) for n in c.max_positions_per_stack
        )
        self.encoder = [EncoderLayer(c) for _ in range(c.num_layers)]
        self.decoder = [DecoderLayer(c) for _ in range(c.num_layers)]
        self.dropout = Dropout(c.dropout)

    def encode(self, source: Int[Array, "B S"], *, train: bool = False) -> Memory:
        """Return the keys and values for attention: one key and one value per source position."""
        embedded, mask = self.source_embedding.embed(source), source_mask(source)
        x = embedded = self.source_positions(embedded, jnp.arange(source.shape[1]), train=train)
        for layer in self.encoder:
            x = layer(x, mask, train=train)
        return Memory(x, (x + embedded) * HALF_VARIANCE)

    def decode(
        self,
        decoder_input: Int[Array, "B T"],
        memory: Memory,
        memory_mask: Bool[Array, "B 1 1 S"],
        *,
        train: bool = False,
    ) -> Float[Array, "B T N"]:
        width = self.config.conv_kernel_width
        positions = jnp.arange(decoder_input.shape[1])
        embedded = self.embedding.embed(decoder_input)
        x = embedded = self.target_positions(embedded, positions, train=train)
        sources = self.prepare(memory, memory_mask)
        for layer, source in zip(self.decoder, sources, strict=True):
            past = windows(self.dropout(x, train=train), width, before=width - 1)
            x = layer(x, past, embedded, source, train=train)
        return self.output_embedding.logits(self.dropout(x, train=train), train=train)

    def prepare(self, memory: Memory, memory_mask: Bool[Array, "B 1 1 S"]) -> tuple[Source, ...]:
        return tuple(layer.attention.prepare(*memory, memory_mask) for layer in self.decoder)

    def initial_carry(
        self, memory: Memory, num_hypotheses: int
    ) -> tuple[Float[Array, "B J _ D"], ...]:
        """Return each layer's initial inputs: zeros at W - 1 positions before the first token."""
        c = self.config
        shape = (len(memory.keys), num_hypotheses, c.conv_kernel_width - 1, c.d_model)
        return (jnp.zeros(shape, c.dtype),) * c.num_layers

    def decode_position(
        self,
        tokens: Int[Array, "B J"],
        position: Int[Array, ""],
        carry: tuple[Float[Array, "B J _ D"], ...],
        source: tuple[Source, ...],
    ) -> tuple[Float[Array, "B J N"], tuple[Float[Array, "B J _ D"], ...]]:
        """Read one token per hypothesis, given each layer's previous W - 1 inputs."""
        # Reshape to T = 1, so that the vector for this position is broadcast to all hypotheses.
        embedded = self.embedding.embed(tokens.reshape(-1, 1))
        embedded = self.target_positions(embedded, position[None]).reshape(*tokens.shape, -1)
        x, inputs = embedded, list[Array]()
        for layer, earlier, layer_source in zip(self.decoder, carry, source, strict=True):
            past = jnp.concatenate([earlier, x[:, :, None].astype(earlier.dtype)], axis=2)
            inputs.append(past[:, :, 1:])
            x = layer(x, past, embedded, layer_source)
        return self.output_embedding.logits(x), tuple(inputs)

    @nn.nowrap
    def stack_weights(
        self, intermediates: Intermediates
    ) -> dict[str, Float[Array, "layers B 1 T S"]]:
        layers = [intermediates[f"decoder_{i}"] for i in range(self.config.num_layers)]
        return {"cross": jnp.stack([layer["attention"]["weights"][0] for layer in layers])}
