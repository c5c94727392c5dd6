"""Test the matrix that the embeddings share with the pre-softmax projection (section 3.4)."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from example_configs import with_architecture
from jaxtyping import Array
from models import VOCABULARY
from oracles import SMALL_MODEL, apply, drawn_params, floats, initial_params, normal

from transformer_jax.baselines.build import build_model
from transformer_jax.model.build import build_transformer
from transformer_jax.model.embeddings import Embedding
from transformer_jax.model.inspect import abstract_params

TOKENS = jnp.asarray([[5, 1, 12], [0, 5, 5]])


# The square root of this width is not an integer.
NARROW = replace(SMALL_MODEL, d_model=24)


def make_embedding() -> tuple[Embedding, dict[str, Any]]:
    model = Embedding(NARROW, VOCABULARY)
    return model, {"table": normal(0, VOCABULARY, NARROW.d_model)}


def test_an_embedding_is_a_row_times_the_square_root_of_d_model() -> None:
    model, params = make_embedding()
    expected = floats(params["table"])[np.asarray(TOKENS)] * math.sqrt(NARROW.d_model)
    np.testing.assert_allclose(apply(model, params, TOKENS, method="embed"), expected, rtol=1e-6)


def test_logits_are_products_with_the_unscaled_rows() -> None:
    model, params = make_embedding()
    x = normal(1, 2, 3, NARROW.d_model)
    expected = floats(x) @ floats(params["table"]).T
    np.testing.assert_allclose(apply(model, params, x, method="logits"), expected, atol=1e-5)


def test_embeddings_have_the_config_dtype_and_logits_are_float32() -> None:
    model = Embedding(replace(NARROW, dtype="bfloat16"), VOCABULARY)
    _, params = make_embedding()
    x = apply(model, params, TOKENS, method="embed")
    assert x.dtype == jnp.bfloat16
    assert apply(model, params, x, method="logits").dtype == jnp.float32


def test_only_training_rounds_logits_to_bfloat16() -> None:
    exact, params = make_embedding()
    rounding = Embedding(replace(NARROW, logits_dtype="bfloat16"), VOCABULARY)
    x = normal(1, 2, 3, NARROW.d_model)
    expected = apply(exact, params, x, method="logits", train=True)
    rounded = apply(rounding, params, x, method="logits", train=True)
    assert rounded.dtype == jnp.bfloat16
    np.testing.assert_array_equal(rounded, expected.astype(jnp.bfloat16))
    np.testing.assert_array_equal(apply(rounding, params, x, method="logits"), expected)


@pytest.mark.parametrize("architecture", ["transformer", "rnn", "conv"])
def test_every_architecture_can_round_the_logits_of_training(architecture: str) -> None:
    config = with_architecture(architecture, logits_dtype="bfloat16").model
    model = build_model(config, VOCABULARY)
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}

    def logits(*, train: bool) -> Any:
        return model.init_with_output(rngs, TOKENS, TOKENS, train=train)[0]

    dtypes = [jax.eval_shape(partial(logits, train=train)).dtype for train in (True, False)]
    assert dtypes == [jnp.bfloat16, jnp.float32]


def test_embedding_rows_start_with_variance_one_over_d_model() -> None:
    model = Embedding(replace(SMALL_MODEL, d_model=64), 2000)
    params = initial_params(model, TOKENS, method="embed")
    assert params["table"].shape == (2000, 64)
    assert float(params["table"].mean()) == pytest.approx(0, abs=0.002)
    assert float(params["table"].std()) == pytest.approx(64**-0.5, rel=0.02)


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_source_target_and_softmax_share_one_matrix(positions: Any) -> None:
    model = build_transformer(replace(SMALL_MODEL, positions=positions), VOCABULARY)
    leaves = jax.tree.leaves(abstract_params(model))
    assert sum(VOCABULARY in leaf.shape for leaf in leaves) == 1


@pytest.mark.parametrize(
    ("tie_embeddings", "source_vocabulary", "matrices"),
    [
        ("all", None, {"embedding": ("source", "target", "softmax")}),
        pytest.param(
            "target",
            None,
            {"embedding": ("target", "softmax"), "source_embedding": ("source",)},
            marks=pytest.mark.slow,
        ),
        (
            "none",
            None,
            {
                "embedding": ("target",),
                "source_embedding": ("source",),
                "output_embedding": ("softmax",),
            },
        ),
        # If the vocabularies are separate, source and target cannot share a matrix.
        ("all", 17, {"embedding": ("target", "softmax"), "source_embedding": ("source",)}),
        pytest.param(
            "target",
            17,
            {"embedding": ("target", "softmax"), "source_embedding": ("source",)},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_each_matrix_learns_only_from_the_roles_tied_to_it(
    tie_embeddings: Any, source_vocabulary: int | None, matrices: dict[str, tuple[str, ...]]
) -> None:
    config = replace(SMALL_MODEL, num_layers=1, tie_embeddings=tie_embeddings)
    model = build_transformer(config, VOCABULARY, source_vocabulary)
    source, target = jnp.asarray([[3, 4, 2]]), jnp.asarray([[5, 6, 2]])
    params = drawn_params(model, source, target)
    assert {name for name in params if name.endswith("embedding")} == set(matrices)
    sizes = {name: len(params[name]["table"]) for name in matrices}
    source_size = source_vocabulary or VOCABULARY
    assert sizes == {n: source_size if n == "source_embedding" else VOCABULARY for n in matrices}

    def logit(params: dict[str, Any]) -> Array:
        return apply(model, params, source, target)[0, -1, 9]

    # For each use of the embedding matrix (source, target, or softmax), these rows receive a
    # gradient. The decoder reads BOS (1), then all target tokens except the last.
    by_role = {"source": {3, 4, 2}, "target": {1, 5, 6}, "softmax": {9}}
    gradient = jax.grad(logit)(params)
    for name, roles in matrices.items():
        learns = set(np.flatnonzero(np.any(gradient[name]["table"], axis=1)))
        assert learns == set().union(*(by_role[role] for role in roles))
