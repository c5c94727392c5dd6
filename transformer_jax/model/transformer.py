"""The Transformer: a stack of encoder layers and a stack of decoder layers (section 3.1).

Shapes: B batch, S source positions, T target positions, D d_model, H heads, N vocab_size, J
hypotheses per sentence, L maximum translation length.
"""

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from transformer_jax.model.decoding import (
    CacheView,
    DecodingState,
    decode_layer,
    empty_cache,
    to_cache_layout,
)
from transformer_jax.model.encoder_decoder import EncoderDecoder, Intermediates
from transformer_jax.model.layers import Components
from transformer_jax.model.masks import causal_mask, source_mask


class Transformer(EncoderDecoder, kw_only=True):
    """The complete model (figure 1). `build_transformer` creates the model from a config."""

    components: Components

    def setup(self) -> None:
        super().setup()
        c, components = self.config, self.components
        source_rows, target_rows = c.max_positions_per_stack
        self.source_positions = components.add_positions(c, source_rows)
        self.target_positions = components.add_positions(c, target_rows)
        # Flax names these layers encoder_0, encoder_1, and so on.
        encoder_depth, decoder_depth = c.layers_per_stack
        self.encoder = [components.encoder_layer(c, components) for _ in range(encoder_depth)]
        self.decoder = [components.decoder_layer(c, components) for _ in range(decoder_depth)]
        # The paper does not normalize after a stack, so these modules are the identity by default.
        self.encoder_norm = components.residual.make_final_norm(c, components.norm)
        self.decoder_norm = components.residual.make_final_norm(c, components.norm)

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
        length = decoder_input.shape[1]
        x, mask = self.embedding.embed(decoder_input), causal_mask(length)
        x = self.target_positions(x, jnp.arange(length), train=train)
        for layer in self.decoder:
            x = layer(x, memory, mask, memory_mask, train)
        return self.to_logits(x, train=train)

    def to_logits(self, x: Float[Array, "B T D"], *, train: bool = False) -> Float[Array, "B T N"]:
        """Return the logits of the next token, given the output of the last decoder layer."""
        return self.output_embedding.logits(self.decoder_norm(x), train=train)

    def init_decoding(
        self, source: Int[Array, "B S"], *, num_hypotheses: int, max_length: int
    ) -> DecodingState:
        """Encode the source, and allocate a cache for `max_length` tokens per hypothesis."""
        memory = self.encode(source)
        entries = max_length * num_hypotheses
        caches = [empty_cache(x.self_attention, memory[:, 0], entries) for x in self.decoder]
        memories = [to_cache_layout(layer.cross_attention, memory) for layer in self.decoder]
        return DecodingState(caches, memories, source_mask(source))

    def decode_step(
        self,
        tokens: Int[Array, "B J"],
        position: Int[Array, ""],
        ancestors: Int[Array, "B J L"],
        state: DecodingState,
    ) -> tuple[Float[Array, "B J N"], DecodingState]:
        # `AddPositions` expects one position per column, so make each hypothesis a row with T = 1.
        x = self.embedding.embed(tokens.reshape(-1, 1))
        x = self.target_positions(x, position[None]).reshape(*tokens.shape, -1)
        view = CacheView.at(position, ancestors)
        caches = []
        for layer, cache, memory in zip(self.decoder, state.caches, state.memories, strict=True):
            x, cache = decode_layer(layer, x, view, cache, memory, state.memory_mask)
            caches.append(cache)
        return self.to_logits(x), state._replace(caches=caches)

    @nn.nowrap
    def stack_weights(
        self, intermediates: Intermediates
    ) -> dict[str, Float[Array, "layers B H _ _"]]:
        encoder_depth, decoder_depth = self.config.layers_per_stack

        def stack(name: str, depth: int, module: str) -> Float[Array, "layers B H _ _"]:
            layers = (intermediates[f"{name}_{i}"] for i in range(depth))
            return jnp.stack([layer[module]["weights"][0] for layer in layers])

        return {
            "encoder": stack("encoder", encoder_depth, "self_attention"),
            "decoder": stack("decoder", decoder_depth, "self_attention"),
            "cross": stack("decoder", decoder_depth, "cross_attention"),
        }
