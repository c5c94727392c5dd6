"""Recurrent encoder-decoders, with and without attention.

The decoder follows Luong et al. (2015): the cells read a token, and their output is the query for
attention to the source. The context and the output then form the attentional vector, tanh(W
[context; output]). In contrast, the model in Bahdanau et al. (2015) attends before its cells read
the token, and it has no attentional vector. Without attention, the encoder's last states are the
decoder's only information about the source (Sutskever et al. 2014).

Shapes: B batch, S source positions, T target positions, J hypotheses per sentence, D d_model, N
vocab_size.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from transformer_jax.baselines.incremental import IncrementalModel, PreparedSource
from transformer_jax.baselines.source_attention import Source, SourceAttention
from transformer_jax.config import ModelConfig
from transformer_jax.model.dropout import Dropout
from transformer_jax.model.encoder_decoder import Intermediates
from transformer_jax.model.linear import Dense
from transformer_jax.special_tokens import PAD

CellState = Array | tuple[Array, Array]
"""The state of one layer: an array [..., D] for a GRU, or a pair of such arrays for an LSTM."""

CELLS: dict[str, Callable[..., nn.RNNCellBase]] = {"lstm": nn.OptimizedLSTMCell, "gru": nn.GRUCell}


class Memory(NamedTuple):
    """The encoder's output."""

    vectors: Float[Array, "B S D"]
    """The last layer's forward and backward outputs, concatenated to width D."""
    states: tuple[CellState, ...]
    """Each layer's final forward and backward states, concatenated to width D."""


class DecoderState(NamedTuple):
    """The decoder's state for each hypothesis: arrays of shape [B, J, ...]."""

    cells: tuple[CellState, ...]
    output: Float[Array, "B J D"]
    """The decoder's previous output, for input feeding."""


def make_cell(config: ModelConfig, width: int) -> nn.RNNCellBase:
    """Return a cell of the given width, whose states have float32 or higher precision."""
    param_dtype = jnp.promote_types(config.dtype, jnp.float32)
    return CELLS[config.rnn_cell](width, dtype=config.dtype, param_dtype=param_dtype)


class DecoderCell(nn.Module):
    """A decoder without attention, which applies all layers to one token per hypothesis."""

    config: ModelConfig

    def setup(self) -> None:
        c = self.config
        self.cells = [make_cell(c, c.d_model) for _ in range(c.num_layers)]
        self.dropout = Dropout(c.dropout)

    def prepare(self, _memory: Memory, _mask: Bool[Array, "B 1 1 S"], /) -> PreparedSource:
        """Return (), because this decoder reads the source only through its initial states."""
        return ()

    def read(
        self, states: tuple[CellState, ...], x: Float[Array, "B J _"], *, train: bool
    ) -> tuple[tuple[CellState, ...], Float[Array, "B J D"]]:
        """Apply all layers to a token's vector, with dropout on each layer's input."""
        new_states: list[CellState] = []
        for cell, state in zip(self.cells, states, strict=True):
            new_state, x = cell(state, self.dropout(x, train=train))
            new_states.append(new_state)
        return tuple(new_states), x

    def __call__(
        self,
        state: DecoderState,
        x: Float[Array, "B J D"],
        _source: PreparedSource,
        /,
        *,
        train: bool,
    ) -> tuple[DecoderState, Float[Array, "B J D"]]:
        cells, output = self.read(state.cells, x, train=train)
        return DecoderState(cells, state.output), output


class AttentionCell(DecoderCell):
    """A decoder with attention to the source, applied to one token per hypothesis."""

    def setup(self) -> None:
        super().setup()
        c = self.config
        self.attention = SourceAttention(c)
        self.combine = Dense((c.d_model,), c.dtype, use_bias=False)

    def prepare(self, memory: Memory, mask: Bool[Array, "B 1 1 S"], /) -> Source:
        return self.attention.prepare(memory.vectors, memory.vectors, mask)

    def __call__(
        self, state: DecoderState, x: Float[Array, "B J D"], source: Source, /, *, train: bool
    ) -> tuple[DecoderState, Float[Array, "B J D"]]:
        """Return the new state and the attentional vector, tanh(W [context; output])."""
        if self.config.rnn_input_feeding:
            x = jnp.concatenate([x, state.output.astype(x.dtype)], axis=-1)
        cells, query = self.read(state.cells, x, train=train)
        context = self.attention(query, source, train=train).astype(query.dtype)
        output = jnp.tanh(self.combine(jnp.concatenate([context, query], axis=-1)))
        return DecoderState(cells, output.astype(state.output.dtype)), output


class RecurrentModel(IncrementalModel):
    """A bidirectional encoder and a decoder with `num_layers` recurrent layers each."""

    def setup(self) -> None:
        super().setup()
        c, width = self.config, self.config.d_model // 2
        self.encoder = [
            nn.Bidirectional(nn.RNN(make_cell(c, width)), nn.RNN(make_cell(c, width)))
            for _ in range(c.num_layers)
        ]
        self.decoder = (DecoderCell if c.attention_score == "none" else AttentionCell)(c)
        self.dropout = Dropout(c.dropout)

    def encode(self, source: Int[Array, "B S"], *, train: bool = False) -> Memory:
        x, lengths = self.source_embedding.embed(source), jnp.sum(source != PAD, axis=1)
        states: list[CellState] = []
        for layer in self.encoder:
            x = self.dropout(x, train=train)
            (forward, backward), x = layer(x, seq_lengths=lengths, return_carry=True)
            states.append(
                jax.tree.map(lambda *ends: jnp.concatenate(ends, axis=-1), forward, backward)
            )
        return Memory(x, tuple(states))

    def decode(
        self,
        decoder_input: Int[Array, "B T"],
        memory: Memory,
        memory_mask: Bool[Array, "B 1 1 S"],
        *,
        train: bool = False,
    ) -> Float[Array, "B T N"]:
        x = self.embedding.embed(decoder_input)[:, :, None]
        source = self.prepare(memory, memory_mask)

        def read(
            cell: DecoderCell, state: DecoderState, x: Float[Array, "B 1 D"]
        ) -> tuple[DecoderState, Float[Array, "B 1 D"]]:
            return cell(state, x, source, train=train)

        scan = nn.scan(
            read,
            variable_broadcast="params",
            variable_axes={"intermediates": 0},
            split_rngs={"params": False, "dropout": True},
            in_axes=1,
            out_axes=1,
        )
        _, output = scan(self.decoder, self.initial_carry(memory, 1), x)
        return self.to_logits(jnp.squeeze(output, axis=2), train=train)

    def to_logits(self, output: Float[Array, "B T D"], *, train: bool) -> Float[Array, "B T N"]:
        """Return the logits for the next token, given the decoder's outputs."""
        return self.output_embedding.logits(self.dropout(output, train=train), train=train)

    def prepare(self, memory: Memory, memory_mask: Bool[Array, "B 1 1 S"]) -> PreparedSource:
        return self.decoder.prepare(memory, memory_mask)

    def initial_carry(self, memory: Memory, num_hypotheses: int) -> DecoderState:
        """Return the initial decoder state: the encoder's last states and an output of zeros."""
        cells = jax.tree.map(
            lambda x: jnp.repeat(x[:, None], num_hypotheses, axis=1), memory.states
        )
        last: Array = jax.tree.leaves(cells)[-1]
        return DecoderState(cells, jnp.zeros_like(last))

    def decode_position(
        self,
        tokens: Int[Array, "B J"],
        position: Int[Array, ""],  # noqa: ARG002 - the state implies the position.
        carry: DecoderState,
        source: PreparedSource,
    ) -> tuple[Float[Array, "B J N"], DecoderState]:
        carry, output = self.decoder(carry, self.embedding.embed(tokens), source, train=False)
        return self.to_logits(output, train=False), carry

    @nn.nowrap
    def stack_weights(self, intermediates: Intermediates) -> dict[str, Float[Array, "1 B 1 T S"]]:
        if self.config.attention_score == "none":
            return {}
        # The scan stacks one array of shape [B, 1, 1, S] for each target position.
        weights = intermediates["decoder"]["attention"]["weights"][0]
        return {"cross": jnp.moveaxis(weights[:, :, 0, 0], 0, 1)[None, :, None]}
