"""What holds of every variant: decoding with and without the cache, training, and masks."""

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array
from oracles import SMALL, Wandering, apply, drawn_params, floats

from transformer_jax.inference.search import Translations, beam_search
from transformer_jax.model.losses import cross_entropy
from transformer_jax.model.transformer import Transformer, shift_right, source_mask
from transformer_jax.special_tokens import BOS, EOS, PAD

VOCABULARY = 13
HYPOTHESES, LENGTH = 3, 8
SOURCE = jnp.asarray([[5, 9, 3, 12, 7, EOS], [4, 11, 6, EOS, PAD, PAD]])
TARGET = jnp.asarray([[8, 3, 10, 5, EOS], [12, 4, EOS, PAD, PAD]])
ODD_HEADS = {"num_heads": 3, "d_k": 4, "d_v": 5}

VARIANTS = [
    {"positions": "concatenated_sinusoidal"},
    {"positions": "alibi", **ODD_HEADS},
    {"positions": "rotary", **ODD_HEADS},
    {"positions": "relative", "max_relative_position": 2, **ODD_HEADS},
    {"attention_score": "general", **ODD_HEADS},
    {"attention_score": "additive", "positions": "alibi", "attention_bias": True},
    {"layer_norm": "pre", "positions": "relative", "attention_score": "dot_product"},
    {"layer_norm": "pre", "tie_embeddings": "target", "remat": True},
    {"tie_embeddings": "none", "positions": "learned"},
    {"positions": "learned", "max_positions": 4, "out_of_range_positions": "clamp"},
]


def make(changes: dict[str, Any]) -> tuple[Transformer, dict[str, Any]]:
    model = Transformer(replace(SMALL, num_layers=1, **changes), VOCABULARY)
    return model, drawn_params(model, SOURCE, TARGET)


class PiecesSoFar(NamedTuple):
    """The state of a search without a cache: what each row has read, [B, J, L]."""

    cache: Array


@functools.partial(jax.jit, static_argnums=(0, 1))
def search(model: Transformer, has_cache: bool, params: dict[str, Any]) -> Translations:
    """Search translations, by `step` or by the whole forward pass for each piece."""
    source = jnp.repeat(SOURCE, HYPOTHESES, axis=0)

    def call(method: str, *arguments: Any, **options: Any) -> Any:
        return model.apply({"params": params}, *arguments, method=method, **options)

    state: Any = PiecesSoFar(jnp.zeros((len(SOURCE), HYPOTHESES, LENGTH), jnp.int32))
    if has_cache:
        state = call("start", SOURCE, hypotheses=HYPOTHESES, max_length=LENGTH)

    def step(newest: Array, position: Array, ancestors: Array, state: Any) -> tuple[Array, Any]:
        if has_cache:
            logits, state = call("step", newest, position, ancestors, state)
        else:
            state = PiecesSoFar(state.cache.at[:, :, position].set(newest))
            read = jnp.take_along_axis(state.cache, ancestors, axis=1).reshape(-1, LENGTH)
            logits = call("decode", read, call("encode", source), source_mask(source))
            logits = logits[:, position].reshape(*newest.shape, -1)
        # Calm, and at first without an end, so that hypotheses take one another's places.
        end = jnp.where(position < LENGTH - 4, -50.0, 0.0)
        return (logits / 4).at[..., EOS].add(end), state

    limit = jnp.asarray([LENGTH, LENGTH - 2])
    return beam_search(
        step, state, limit, beam_size=HYPOTHESES, max_length=LENGTH, bos=BOS, eos=EOS, num_best=3
    )


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_translations_are_the_same_with_and_without_the_cache(changes: dict[str, Any]) -> None:
    model, params = make(changes)
    cached, whole = search(model, True, params), search(model, False, params)
    np.testing.assert_array_equal(cached.pieces, whole.pieces)
    np.testing.assert_allclose(cached.scores, whole.scores, atol=1e-5)
    for sentence in np.asarray(cached.pieces):
        assert len(np.unique(sentence, axis=0)) == HYPOTHESES


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_decoding_step_by_step_gives_the_logits_of_the_whole(changes: dict[str, Any]) -> None:
    model, params = make(changes)
    targets = np.random.default_rng(0).integers(3, VOCABULARY, (len(SOURCE), HYPOTHESES, LENGTH))
    flat = jnp.asarray(targets.reshape(-1, LENGTH))
    whole = apply(model, params, jnp.repeat(SOURCE, HYPOTHESES, axis=0), flat)
    whole = floats(whole).reshape(*targets.shape, VOCABULARY)
    state = apply(
        model, params, SOURCE, hypotheses=HYPOTHESES, max_length=LENGTH + 2, method="start"
    )
    read = shift_right(flat).reshape(targets.shape)
    beam = Wandering(len(SOURCE), HYPOTHESES, LENGTH + 2)
    for t in range(LENGTH):
        arguments = beam.to_rows(t, read[..., t]), jnp.asarray(t), beam.ancestors(t), state
        logits, state = apply(model, params, *arguments, method="step")
        np.testing.assert_allclose(beam.from_rows(t, logits), whole[:, :, t], atol=1e-5)
    assert np.abs(whole[:, 0] - whole[:, 1]).max() > 0.1


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_training_reaches_every_parameter_and_lowers_the_loss(changes: dict[str, Any]) -> None:
    model, params = make({"dropout": 0.0, **changes})

    def loss(params: dict[str, Any]) -> Array:
        total = cross_entropy(apply(model, params, SOURCE, TARGET, train=True), TARGET, 0.0)
        return total.nll / total.count

    descend = jax.jit(jax.value_and_grad(loss))
    first, gradients = descend(params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
        assert np.any(leaf), jax.tree_util.keystr(path)
        assert np.all(np.isfinite(leaf)), jax.tree_util.keystr(path)
    for _ in range(20):
        _, gradients = descend(params)
        params = jax.tree.map(lambda x, g: x - 0.02 * g, params, gradients)
    assert float(loss(params)) < 0.9 * float(first)


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_neither_padding_nor_the_future_has_an_influence(changes: dict[str, Any]) -> None:
    model, params = make(changes)
    before = apply(model, params, SOURCE, TARGET)
    padded = jnp.pad(SOURCE, ((0, 0), (0, 3)))
    after = apply(model, params, padded, TARGET.at[:, 3:].set(6))
    np.testing.assert_allclose(after[:, :4], before[:, :4], atol=1e-5)
    assert not np.allclose(after[:, 4], before[:, 4], atol=0.01)
