"""Test cached decoding against the forward pass, for every architecture and variant."""

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jaxtyping import Array
from model_variants import FAST, VARIANTS, cases
from models import (
    SOURCE,
    VOCABULARY,
    causal,
    is_source_token,
    make_decoder_layer,
    make_model,
    make_self_attention,
)
from oracles import SMALL_MODEL, BeamSlots, apply, drawn_params, floats, normal

from transformer_jax.inference.search import Translations, beam_search
from transformer_jax.model.decoding import (
    CacheView,
    KeyValueCache,
    decode_layer,
    from_cache_layout,
    to_cache_layout,
)
from transformer_jax.model.encoder_decoder import EncoderDecoder, shift_right
from transformer_jax.model.masks import source_mask
from transformer_jax.special_tokens import BOS, EOS

HYPOTHESES, LENGTH, ROOM = 3, 6, 8
ROTARY = next(changes for changes in VARIANTS if changes.get("positions") == "rotary")
ALL_VARIANTS = [
    {"num_layers": 2},
    {"positions": "learned"},
    {"positions": "none", "attention_score": "dot_product", "attention_bias": True},
    {"dtype": "bfloat16"},
    *VARIANTS,
]


def init_decoding(model: EncoderDecoder, params: Any, source: Array) -> Any:
    sizes = {"num_hypotheses": HYPOTHESES, "max_length": ROOM}
    return model.apply({"params": params}, source, **sizes, method="init_decoding")


def decode_step(model: EncoderDecoder, params: Any, *arguments: Any) -> Any:
    return model.apply({"params": params}, *arguments, method="decode_step")


start = jax.jit(init_decoding, static_argnums=0)
step = jax.jit(decode_step, static_argnums=0)


@pytest.mark.parametrize("changes", cases(ALL_VARIANTS, [*FAST, {"num_layers": 2}, ROTARY]))
def test_decode_steps_give_the_logits_of_the_whole_forward_pass(changes: dict[str, Any]) -> None:
    model, params = make_model(**changes)
    targets = np.random.default_rng(0).integers(3, VOCABULARY, (len(SOURCE), HYPOTHESES, LENGTH))
    flat = jnp.asarray(targets.reshape(-1, LENGTH))
    expected = apply(model, params, jnp.repeat(SOURCE, HYPOTHESES, axis=0), flat)
    expected = floats(expected).reshape(*targets.shape, VOCABULARY)

    state = start(model, params, SOURCE)
    decoder_input = shift_right(flat, model.config.decoder_start_id).reshape(targets.shape)
    slots = BeamSlots(len(SOURCE), HYPOTHESES, ROOM)
    tolerance = 0.3 if model.config.dtype == "bfloat16" else 1e-4
    for t in range(LENGTH):
        tokens = slots.scatter(t, decoder_input[..., t])
        logits, state = step(model, params, tokens, jnp.asarray(t), slots.ancestors(t), state)
        assert logits.dtype == jnp.float32
        np.testing.assert_allclose(slots.gather(t, logits), expected[:, :, t], atol=tolerance)
    # Different hypotheses must have different logits; otherwise, the test could not detect swapped
    # caches.
    assert np.abs(expected[:, 0] - expected[:, 1]).max() > min(0.1, 4 * tolerance)


class TokensSoFar(NamedTuple):
    """The state of a search without a cache: the tokens that each beam slot has read, [B, J, L]."""

    tokens: Array


@functools.partial(jax.jit, static_argnums=(0, 1))
def search(model: EncoderDecoder, has_cache: bool, params: dict[str, Any]) -> Translations:
    """Translate using either cached decoding steps or a full forward pass for each token."""
    source = jnp.repeat(SOURCE, HYPOTHESES, axis=0)
    state: Any = TokensSoFar(jnp.zeros((len(SOURCE), HYPOTHESES, ROOM), jnp.int32))
    if has_cache:
        state = init_decoding(model, params, SOURCE)

    def next_logits(
        newest: Array, position: Array, ancestors: Array, state: Any
    ) -> tuple[Array, Any]:
        if has_cache:
            logits, state = decode_step(model, params, newest, position, ancestors, state)
        else:
            state = TokensSoFar(state.tokens.at[:, :, position].set(newest))
            read = jnp.take_along_axis(state.tokens, ancestors, axis=1).reshape(-1, ROOM)
            memory = model.apply({"params": params}, source, method="encode")
            mask = source_mask(source)
            output: Any = model.apply({"params": params}, read, memory, mask, method="decode")
            logits = output[:, position].reshape(*newest.shape, -1)
        # Flatten the distribution and delay the end-of-sentence token, so that hypotheses move
        # between beam slots.
        end = jnp.where(position < ROOM - 4, -50.0, 0.0)
        return (logits / 4).at[..., EOS].add(end), state

    return beam_search(
        next_logits,
        state,
        jnp.asarray([ROOM, ROOM - 2]),
        beam_size=HYPOTHESES,
        max_length=ROOM,
        start=BOS,
        eos=EOS,
        beam_end="any",
        num_best=3,
    )


@pytest.mark.parametrize(
    "changes",
    cases(VARIANTS, [changes for changes in VARIANTS if changes.get("layer_norm") == "pre"]),
)
def test_beam_search_finds_the_same_translations_without_the_cache(changes: dict[str, Any]) -> None:
    model, params = make_model(**changes)
    cached, expected = search(model, True, params), search(model, False, params)
    np.testing.assert_array_equal(cached.tokens, expected.tokens)
    np.testing.assert_allclose(cached.scores, expected.scores, atol=1e-5)
    for hypotheses in np.asarray(cached.tokens):
        assert len(np.unique(hypotheses, axis=0)) == HYPOTHESES


@pytest.mark.parametrize("layer_norm", ["post", "pre"])
def test_a_decoded_layer_ignores_and_keeps_cache_entries_of_later_positions(
    layer_norm: Any,
) -> None:
    config = replace(SMALL_MODEL, num_heads=3, d_k=4, d_v=5, layer_norm=layer_norm)
    batch, length, width = 2, 5, config.d_model
    x = normal(0, batch, HYPOTHESES, length, width)
    memory, memory_mask = normal(1, batch, 6, width), is_source_token()
    layer = make_decoder_layer(config)

    def repeat(y: Array) -> Array:
        return jnp.repeat(y, HYPOTHESES, axis=0)

    arrays = x.reshape(-1, length, width), repeat(memory), causal(), repeat(memory_mask)
    params = drawn_params(layer, *arrays)
    expected = apply(layer, params, *arrays).reshape(x.shape)

    def compiled(function: Any) -> Any:
        bound: Any = nn.apply(function, layer)
        return functools.partial(jax.jit(bound), {"params": params})

    decode = compiled(decode_layer)
    projected = compiled(lambda layer, memory: to_cache_layout(layer.cross_attention, memory))(
        memory
    )
    shape, entries = (batch, config.num_heads), ROOM * HYPOTHESES
    cache = KeyValueCache(
        1000 * normal(2, *shape, config.d_k, entries), 1000 * normal(3, *shape, entries, config.d_v)
    )
    slots = BeamSlots(batch, HYPOTHESES, ROOM)
    for t in range(length):
        view = CacheView.at(jnp.asarray(t), slots.ancestors(t))
        arguments = slots.scatter(t, x[:, :, t]), view, cache, projected, memory_mask
        output, cache = decode(*arguments)
        np.testing.assert_allclose(slots.gather(t, output), expected[:, :, t], atol=1e-5)
    assert np.abs(floats(cache.values)[:, :, length * HYPOTHESES :]).max() > 100


def test_the_cache_layout_makes_columns_of_keys_and_rows_of_values() -> None:
    attention = make_self_attention(replace(SMALL_MODEL, num_heads=3, d_k=4, d_v=5))
    x = normal(0, 2, 6, SMALL_MODEL.d_model)
    params = drawn_params(attention, x, x, jnp.ones((1, 1, 1, 6), bool))
    projected = apply(attention, params, x, method="project_keys_and_values")
    bound: Any = nn.apply(to_cache_layout, attention)
    cache = bound({"params": params}, x)
    assert cache.keys.shape == (2, 3, 4, 6)
    assert cache.values.shape == (2, 3, 6, 5)
    for actual, expected in zip(from_cache_layout(cache), projected, strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-6)
