"""Test that a step's FLOP count includes matrix products but excludes padding."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from example_configs import SMALL
from model_variants import cases

from transformer_jax.baselines.build import build_model
from transformer_jax.config import Config
from transformer_jax.data.batches import Batch
from transformer_jax.data.prepare import prepare
from transformer_jax.model.inspect import abstract_params
from transformer_jax.training.flops import flops_of_lengths, peak_flops, step_flops, train_flops

FAST: list[dict[str, Any]] = [
    {},
    {"attention_score": "additive"},
    {"positions": "relative", "max_relative_position": 3, "num_decoder_layers": 1},
    {"architecture": "rnn", "rnn_input_feeding": True},
    {"architecture": "conv"},
]
VARIANTS = [
    *FAST,
    {"attention_score": "general"},
    {"positions": "relative", "max_relative_position": 3},
    {"positions": "rotary", "layer_norm": "pre", "tie_embeddings": "none"},
    {"architecture": "rnn", "rnn_cell": "gru", "attention_score": "general"},
    {"architecture": "rnn", "attention_score": "none"},
]


@pytest.mark.parametrize(
    "changes",
    cases(VARIANTS, FAST),
)
def test_flops_of_a_step_are_three_times_those_of_the_forward_matrix_products(
    changes: dict[str, Any],
) -> None:
    model = replace(SMALL.model, d_k=4, d_v=6, num_layers=2, **changes)
    transformer = build_model(model, 30)
    source, target = jnp.full((5, 7), 4), jnp.full((5, 3), 4)

    def forward(params: Any) -> Any:
        return transformer.apply({"params": params}, source, target)

    flops = 0
    for product, count in matrix_products(
        jax.make_jaxpr(forward)(abstract_params(transformer)).jaxpr
    ):
        (contracted, _), _ = product.params["dimension_numbers"]
        left, out = product.invars[0].aval.shape, product.outvars[0].aval.shape
        flops += count * 2 * int(np.prod(out)) * int(np.prod([left[axis] for axis in contracted]))
    if model.attention_score == "additive":
        # The additive score's product with v is not a matrix product, so add its FLOPs here. The
        # factors are 2 FLOPs, 2 layers, 2 heads, d_k = 4, 5 rows, and the number of query-key pairs
        # in all three attention sub-layers.
        flops += 2 * 2 * 2 * 4 * 5 * (7 * 7 + 3 * 3 + 3 * 7)
    assert step_flops(model, 30, Batch(np.asarray(source), np.asarray(target))) == 3 * flops


def matrix_products(jaxpr: Any) -> list[tuple[Any, int]]:
    """Return all matrix products in a traced function, and how many times each is computed."""
    products: list[tuple[Any, int]] = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            products.append((equation, 1))
        # A scan over the positions repeats the products in its body.
        repetitions = equation.params.get("length", 1)
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                products += [(x, count * repetitions) for x, count in matrix_products(inner)]
    return products


@pytest.mark.parametrize("length", [1, 3, 9])
def test_a_window_saves_the_flops_of_all_pairs_outside_of_it(length: int) -> None:
    tokens = np.full((2, length), 4)
    window = 2
    far = sum(abs(q - k) > window for q, k in np.ndindex(length, length))
    full, windowed = (
        step_flops(SMALL.change(model={"attention_window": w}).model, 30, Batch(tokens, tokens))
        for w in (None, window)
    )
    model = SMALL.model
    per_pair = 3 * 2 * model.num_layers * model.num_heads * (model.d_k + model.d_v)
    assert full - windowed == 2 * 2 * far * per_pair


def test_padding_adds_no_flops() -> None:
    batch = Batch(np.full((2, 5), 4), np.full((2, 4), 4))
    padded = Batch(*(np.pad(side, ((0, 3), (0, 6))) for side in batch))
    assert step_flops(SMALL.model, 30, batch) == step_flops(SMALL.model, 30, padded)


def test_the_base_model_needs_six_flops_per_parameter_and_token() -> None:
    # For short sentences, attention scores need few FLOPs. The shared embedding has three uses, but
    # only the output projection is a matrix product.
    batch = Batch(np.full((1, 2), 4), np.full((1, 2), 4))
    layers = 63_045_632 - 37_000 * 512
    per_token = step_flops(Config().model, 37_000, batch) / 2
    # Each source token passes through the encoder, and each target token through the decoder.
    assert per_token == pytest.approx(6 * (layers + 37_000 * 512), rel=0.01)


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("TPU v4 lite", 138e12),
        ("TPU v5p", 459e12),
        *(("TPU v5 lite", 197e12), ("TPU v5e", 197e12)),
        *(("TPU v6 lite", 918e12), ("TPU v6e", 918e12)),
    ],
)
def test_the_peak_of_an_accelerator_is_the_vendors_figure(
    kind: str, peak: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SimpleNamespace(device_kind=kind, platform="accelerator")
    monkeypatch.setattr(jax, "local_devices", lambda: [device, device])
    assert peak_flops("bfloat16") == 2 * peak


def test_the_peak_of_a_cpu_is_measured() -> None:
    assert 1e8 < peak_flops("float32") < 1e15


def test_the_estimate_of_a_run_exceeds_its_flops_by_the_padding_and_the_shorter_side() -> None:
    batches = prepare(SMALL.data).batches(SMALL.data, seed=0)
    lengths = [batches.lengths(step) for step in range(SMALL.train.steps)]
    flops = sum(flops_of_lengths(SMALL.model, SMALL.data.vocab_size, *pair) for pair in lengths)
    tokens = sum(int(side.sum()) for pair in lengths for side in pair)
    share = tokens / (2 * SMALL.data.batch_tokens * SMALL.train.steps)
    assert flops < train_flops(SMALL)
    assert flops / train_flops(SMALL) == pytest.approx(share, rel=0.25)
