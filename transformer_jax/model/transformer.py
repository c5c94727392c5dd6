"""The Transformer: encoder, decoder, and both as one model (section 3.1).

Shapes: B batch, S source positions, T target positions, D d_model, N vocab_size,
J hypotheses of a sentence, L longest translation.
Pieces are integers; 0 is padding, which stands at the end of a row only.
"""

import math
from collections import Counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from transformer_jax.config import ModelConfig
from transformer_jax.model.embeddings import AddPositions, SharedEmbedding
from transformer_jax.model.layers import KeysAndValues, Past
from transformer_jax.model.variants.pre_norm import STACKS
from transformer_jax.special_tokens import BOS, PAD

Params = dict[str, Any]
"""Parameters by module, as Flax nests them."""


class DecodingState(NamedTuple):
    """What a translation carries from step to step."""

    cache: list[KeysAndValues]
    """For each layer, self-attention's keys and values, [B, H, K, L J] and [B, H, L J, V]."""
    memory: list[KeysAndValues]
    """For each layer, the encoder's output, projected once: [B, H, K, S] and [B, H, S, V]."""
    memory_mask: Bool[Array, "B 1 1 S"]


def source_mask(source: Int[Array, "B S"]) -> Bool[Array, "B 1 1 S"]:
    """Allow attention to tokens, not to padding."""
    return (source != PAD)[:, None, None, :]


def causal_mask(length: int) -> Bool[Array, "1 1 T T"]:
    """Allow attention to a position itself and to earlier ones (section 3.2.3).

    Padding needs no mask of its own here: it stands at the end, where nobody looks.
    """
    return jnp.tril(jnp.ones((1, 1, length, length), bool))


def shift_right(target: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Return the decoder's input: the beginning of the sentence, then all but the last piece."""
    return jnp.pad(target[:, :-1], ((0, 0), (1, 0)), constant_values=BOS)


class Transformer(nn.Module):
    """The whole model; `apply` is a pure function of parameters, pieces and random key."""

    config: ModelConfig
    vocab_size: int
    """Pieces that source and target share; of the target alone, where the source has its own."""
    source_vocab_size: int | None = None
    """Pieces of the source's own. Differs from the paper when set."""

    def setup(self) -> None:
        c = self.config
        encoder, decoder, last = STACKS[c.layer_norm]
        if c.remat:
            # Argument 0 is the module itself; `train` is a Python bool, not traced.
            encoder = nn.remat(encoder, static_argnums=(3,))
            decoder = nn.remat(decoder, static_argnums=(5,))
        self.embedding = SharedEmbedding(c, self.vocab_size)
        self.source_embedding = self.output_embedding = self.embedding
        if c.tie_embeddings != "all" or self.source_vocab_size is not None:
            source_vocab_size = self.source_vocab_size or self.vocab_size
            self.source_embedding = SharedEmbedding(c, source_vocab_size)
        if c.tie_embeddings == "none":
            self.output_embedding = SharedEmbedding(c, self.vocab_size)
        self.source_positions, self.target_positions = (
            AddPositions(c, n) for n in c.max_positions_per_stack
        )
        self.encoder = [encoder(c) for _ in range(c.num_layers)]
        self.decoder = [decoder(c) for _ in range(c.num_layers)]
        self.encoder_norm, self.decoder_norm = last(c), last(c)

    def encode(self, source: Int[Array, "B S"], *, train: bool = False) -> Float[Array, "B S D"]:
        """Return the memory: one vector for each source position."""
        mask = source_mask(source)
        x = self.source_embedding.embed(source)
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
        """Return, for each position, the logits of the piece that comes after it."""
        mask = causal_mask(decoder_input.shape[1])
        x = self.embedding.embed(decoder_input)
        x = self.target_positions(x, jnp.arange(decoder_input.shape[1]), train=train)
        for layer in self.decoder:
            x = layer(x, memory, mask, memory_mask, train)
        return self.output_embedding.logits(self.decoder_norm(x))

    def __call__(
        self, source: Int[Array, "B S"], target: Int[Array, "B T"], *, train: bool = False
    ) -> Float[Array, "B T N"]:
        """Return the logits of each target piece, given the source and the pieces before it.

        Args:
            source: pieces, their end, padding.
            target: likewise; it is shifted here, so labels are the target itself.
            train: drop out; needs `rngs={"dropout": key}`.
        """
        memory = self.encode(source, train=train)
        return self.decode(shift_right(target), memory, source_mask(source), train=train)

    def start(
        self, source: Int[Array, "B S"], *, hypotheses: int, max_length: int
    ) -> DecodingState:
        """Read the source, and make room for `max_length` pieces of each hypothesis."""
        c = self.config
        memory = self.encode(source)
        rows, slots = (len(source), c.num_heads), max_length * hypotheses
        return DecodingState(
            cache=[
                (
                    jnp.zeros((*rows, c.d_k, slots), c.dtype),
                    jnp.zeros((*rows, slots, c.d_v), c.dtype),
                )
                for _ in self.decoder
            ],
            memory=[layer.memory_keys_and_values(memory) for layer in self.decoder],
            memory_mask=source_mask(source),
        )

    def step(
        self,
        pieces: Int[Array, "B J"],
        position: Int[Array, ""],
        ancestors: Int[Array, "B J L"],
        state: DecodingState,
    ) -> tuple[Float[Array, "B J N"], DecodingState]:
        """Read one more piece of each hypothesis; return the logits of the next.

        The same as `decode`, one position at a time; ancestors[b, j, l] is the row that read
        piece l of hypothesis j.
        """
        # As T = 1, so that every hypothesis gets the vector of this position.
        x = self.embedding.embed(pieces.reshape(-1, 1))
        x = self.target_positions(x, position[None]).reshape(*pieces.shape, -1)
        past = Past.of(position, ancestors)
        cache = []
        for layer, old, memory in zip(self.decoder, state.cache, state.memory, strict=True):
            x, new = layer.step(x, past, old, memory, state.memory_mask)
            cache.append(new)
        logits = self.output_embedding.logits(self.decoder_norm(x))
        return logits, state._replace(cache=cache)


def init_params(model: Transformer, rng: Array) -> Params:
    """Return fresh parameters."""
    pieces = jnp.ones((1, 1), jnp.int32)
    return dict(model.init(rng, pieces, pieces)["params"])


def abstract_params(model: Transformer) -> Params:
    """Return shapes and dtypes of the parameters, without allocating any."""
    return jax.eval_shape(lambda: init_params(model, jax.random.key(0)))


def parameter_counts(model: Transformer) -> dict[str, int]:
    """Return how many parameters each kind of module has, over all layers, and the "total"."""
    counts: Counter[str] = Counter()
    for path, leaf in jax.tree_util.tree_leaves_with_path(abstract_params(model)):
        stack, *inner = (entry.key for entry in path)
        name, _, is_layer = stack.partition("_")
        is_norm = any("norm" in part for part in inner)
        kind = f"{name}.{'norms' if is_norm else inner[0]}" if is_layer.isdigit() else stack
        counts[kind] += math.prod(leaf.shape)
    return {**dict(sorted(counts.items())), "total": counts.total()}


def attention_weights(
    model: Transformer, params: Params, source: Int[Array, "B S"], target: Int[Array, "B T"]
) -> dict[str, Float[Array, "layers B H ..."]]:
    """Return all attention weights of a forward pass, by kind, stacked over layers.

    The kinds are "encoder" [layers, B, H, S, S], "decoder" [layers, B, H, T, T] and
    "cross" [layers, B, H, T, S]: figures 3 to 5 of the paper draw them.
    """
    _, sown = model.apply({"params": params}, source, target, mutable=["intermediates"])
    layers: Any = sown["intermediates"]

    def stacked(stack: str, kind: str) -> Float[Array, "layers B H ..."]:
        count = model.config.num_layers
        return jnp.stack([layers[f"{stack}_{i}"][kind]["weights"][0] for i in range(count)])

    return {
        "encoder": stacked("encoder", "self_attention"),
        "decoder": stacked("decoder", "self_attention"),
        "cross": stacked("decoder", "cross_attention"),
    }
