"""The shared matrix of embeddings and softmax (section 3.4), and embeddings plus positions."""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array
from oracles import SMALL, apply, drawn_params, floats, initial_params, normal, sinusoid

from transformer_jax.model.embeddings import AddPositions, SharedEmbedding
from transformer_jax.model.transformer import Transformer, abstract_params

VOCABULARY = 13
PIECES = jnp.asarray([[5, 1, 12], [0, 5, 5]])


def shared() -> tuple[SharedEmbedding, dict[str, Any]]:
    model = SharedEmbedding(SMALL, VOCABULARY)
    return model, {"table": normal(0, VOCABULARY, SMALL.d_model)}


def test_embedding_is_a_row_times_the_root_of_d_model() -> None:
    model, params = shared()
    expected = floats(params["table"])[np.asarray(PIECES)] * math.sqrt(SMALL.d_model)
    np.testing.assert_allclose(apply(model, params, PIECES, method="embed"), expected, rtol=1e-6)


def test_logits_compare_with_the_rows_themselves() -> None:
    """Without the factor of the embeddings."""
    model, params = shared()
    x = normal(1, 2, 3, SMALL.d_model)
    expected = floats(x) @ floats(params["table"]).T
    np.testing.assert_allclose(apply(model, params, x, method="logits"), expected, atol=1e-5)


def test_embeddings_have_the_dtype_of_the_computation_and_logits_are_float32() -> None:
    model = SharedEmbedding(replace(SMALL, dtype="bfloat16"), VOCABULARY)
    _, params = shared()
    x = apply(model, params, PIECES, method="embed")
    assert x.dtype == jnp.bfloat16
    assert apply(model, params, x, method="logits").dtype == jnp.float32


def test_rows_are_drawn_with_variance_one_over_d_model() -> None:
    model = SharedEmbedding(replace(SMALL, d_model=64), 2000)
    params = initial_params(model, PIECES, method="embed")
    assert params["table"].shape == (2000, 64)
    assert float(params["table"].mean()) == pytest.approx(0, abs=0.002)
    assert float(params["table"].std()) == pytest.approx(64**-0.5, rel=0.02)


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_there_is_one_matrix_for_source_target_and_softmax(positions: Any) -> None:
    model = Transformer(replace(SMALL, positions=positions), VOCABULARY)
    leaves = jax.tree.leaves(abstract_params(model))
    assert sum(VOCABULARY in leaf.shape for leaf in leaves) == 1


def test_the_matrix_learns_from_source_target_and_softmax() -> None:
    model = Transformer(replace(SMALL, num_layers=1), VOCABULARY)
    source, target = jnp.asarray([[3, 4, 2]]), jnp.asarray([[5, 6, 2]])
    params = drawn_params(model, source, target)

    def gradient_of_logit(piece: int) -> Array:
        def logit(params: dict[str, Any]) -> Array:
            return apply(model, params, source, target)[0, -1, piece]

        return jax.grad(logit)(params)["embedding"]["table"]

    learns = np.any(gradient_of_logit(9), axis=1)
    # The decoder reads the beginning of the sentence (1) and the target but for its last piece.
    by_source, by_target, by_softmax = {3, 4, 2}, {1, 5, 6}, {9}
    assert set(np.flatnonzero(learns)) == by_source | by_target | by_softmax


@pytest.mark.parametrize(
    ("tie_embeddings", "source_vocabulary", "matrices"),
    [
        ("all", None, {"embedding": ("source", "target", "softmax")}),
        ("target", None, {"embedding": ("target", "softmax"), "source_embedding": ("source",)}),
        (
            "none",
            None,
            {
                "embedding": ("target",),
                "source_embedding": ("source",),
                "output_embedding": ("softmax",),
            },
        ),
        # What has vocabularies of its own cannot be one with others.
        ("all", 17, {"embedding": ("target", "softmax"), "source_embedding": ("source",)}),
        ("target", 17, {"embedding": ("target", "softmax"), "source_embedding": ("source",)}),
    ],
)
def test_each_matrix_learns_from_what_is_tied_to_it_alone(
    tie_embeddings: Any, source_vocabulary: int | None, matrices: dict[str, tuple[str, ...]]
) -> None:
    config = replace(SMALL, num_layers=1, tie_embeddings=tie_embeddings)
    model = Transformer(config, VOCABULARY, source_vocabulary)
    source, target = jnp.asarray([[3, 4, 2]]), jnp.asarray([[5, 6, 2]])
    params = drawn_params(model, source, target)
    assert {name for name in params if name.endswith("embedding")} == set(matrices)
    sizes = {name: len(params[name]["table"]) for name in matrices}
    own = source_vocabulary or VOCABULARY
    assert sizes == {n: own if n == "source_embedding" else VOCABULARY for n in matrices}

    def logit(params: dict[str, Any]) -> Array:
        return apply(model, params, source, target)[0, -1, 9]

    # As above: of which pieces each role learns.
    by_role = {"source": {3, 4, 2}, "target": {1, 5, 6}, "softmax": {9}}
    gradient = jax.grad(logit)(params)
    for name, roles in matrices.items():
        learns = set(np.flatnonzero(np.any(gradient[name]["table"], axis=1)))
        assert learns == set().union(*(by_role[role] for role in roles))


def test_positions_are_added_to_embeddings() -> None:
    x = normal(0, 2, 4, SMALL.d_model)
    output = apply(AddPositions(SMALL, 9), {}, x, jnp.arange(4))
    np.testing.assert_allclose(output, floats(x) + sinusoid(4, SMALL.d_model), atol=1e-5)


def test_the_sum_of_embeddings_and_positions_is_dropped_out() -> None:
    x = normal(0, 4, 8, SMALL.d_model)
    model, rng = AddPositions(SMALL, 9), jax.random.key(1)
    kept = floats(apply(model, {}, x, jnp.arange(8)))
    dropped = floats(apply(model, {}, x, jnp.arange(8), train=True, rng=rng))
    is_zero = dropped == 0
    assert 0.4 < is_zero.mean() < 0.6
    np.testing.assert_allclose(dropped[~is_zero], 2 * kept[~is_zero], rtol=1e-5)
