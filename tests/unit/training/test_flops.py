"""Test that a step's FLOP count includes dot products but excludes padding."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from example_configs import SMALL
from jaxtyping import Array
from model_variants import cases

from transformer_jax import register
from transformer_jax.config import Config, ModelConfig
from transformer_jax.config.loading import load_rows
from transformer_jax.data.batches import Batch
from transformer_jax.data.prepare import prepare_text
from transformer_jax.training.flops import (
    batch_flops,
    count_flops,
    flops_of_lengths,
    peak_flops,
    train_flops,
)

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


def attention_by_hand(m: ModelConfig, queries: int, keys: int) -> int:
    """Return the multiply-adds of multi-head attention from T queries to S keys."""
    projections = 2 * (queries + keys) * m.d_model * m.num_heads * (m.d_k + m.d_v) // 2
    general = queries * m.num_heads * m.d_k**2 if m.attention_score == "general" else 0
    relative = 0
    if m.positions == "relative" and queries == keys:
        vectors = 2 * m.max_relative_position + 1
        relative = m.num_heads * (queries * m.d_k * vectors + queries * keys * m.d_v)
    return projections + m.num_heads * queries * keys * (m.d_k + m.d_v) + general + relative


def transformer_by_hand(m: ModelConfig, s: int, t: int) -> int:
    """Return the multiply-adds of the layers: sections 3.2 and 3.3."""
    feed_forward = 2 * m.d_model * m.d_ff
    encoder = attention_by_hand(m, s, s) + s * feed_forward
    cross = attention_by_hand(replace(m, positions="none"), t, s)
    decoder = attention_by_hand(m, t, t) + cross + t * feed_forward
    encoder_depth, decoder_depth = m.layers_per_stack
    return encoder_depth * encoder + decoder_depth * decoder


def single_head_by_hand(m: ModelConfig, s: int, t: int) -> int:
    """Return the multiply-adds of a baseline's attention to the source."""
    projected = {"additive": s + t, "general": t}.get(m.attention_score, 0)
    return m.d_model**2 * projected + 2 * m.d_model * s * t


def rnn_by_hand(m: ModelConfig, s: int, t: int) -> int:
    gates = {"lstm": 4, "gru": 3}[m.rnn_cell]
    # In each direction, a cell of width D / 2 has an input of width D and its own state.
    encoder = m.num_layers * s * 2 * gates * (m.d_model + m.d_model // 2) * (m.d_model // 2)
    width = 2 * m.num_layers + m.rnn_input_feeding
    decoder = t * gates * width * m.d_model**2
    if m.attention_score == "none":
        return encoder + decoder
    return encoder + decoder + 2 * t * m.d_model**2 + single_head_by_hand(m, s, t)


def conv_by_hand(m: ModelConfig, s: int, t: int) -> int:
    convolutions = (s + t) * m.conv_kernel_width * m.d_model * 2 * m.d_model
    attention = 2 * t * m.d_model**2 + single_head_by_hand(m, s, t)
    return m.num_layers * (convolutions + attention)


BY_HAND = {"transformer": transformer_by_hand, "rnn": rnn_by_hand, "conv": conv_by_hand}


@pytest.mark.parametrize("changes", cases(VARIANTS, FAST))
def test_flops_are_three_times_those_of_the_forward_dot_products(changes: dict[str, Any]) -> None:
    model = replace(SMALL.model, d_k=4, d_v=6, num_layers=2, **changes)
    lengths = np.array([1, 7, 40, 130]), np.array([9, 3, 200, 1])
    pairs = zip(*(side.tolist() for side in lengths), strict=True)
    layers = sum(BY_HAND[model.architecture](model, s, t) for s, t in pairs)
    output = 30 * model.d_model * int(lengths[1].sum())
    assert flops_of_lengths(model, 30, *lengths) == 3 * 2 * (layers + output)


def test_the_base_model_has_the_flops_of_its_equations() -> None:
    model = Config().model
    lengths = np.array([25, 300]), np.array([28, 1])
    layers = sum(transformer_by_hand(model, s, t) for s, t in ((25, 28), (300, 1)))
    assert flops_of_lengths(model, 37_000, *lengths) == 6 * (layers + 29 * 512 * 37_000)


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_implementation": "blockwise"},
        {"attention_implementation": "cudnn", "dtype": "bfloat16"},
        {"remat": True},
        {"dtype": "float64"},
    ],
    ids=str,
)
def test_options_that_save_time_or_memory_do_not_change_the_flops(changes: dict[str, Any]) -> None:
    lengths = np.array([5]), np.array([7])
    expected = flops_of_lengths(SMALL.model, 30, *lengths)
    assert flops_of_lengths(replace(SMALL.model, **changes), 30, *lengths) == expected


@pytest.mark.parametrize("max_length", [1, 2, 5])
def test_the_flops_of_a_model_for_short_sentences_are_counted(max_length: int) -> None:
    model = replace(SMALL.model, positions="learned", max_length=max_length)
    side = np.ones(3, int)
    assert flops_of_lengths(model, 30, side, side) == flops_of_lengths(SMALL.model, 30, side, side)


@pytest.mark.usefixtures("forget_parts")
def test_a_part_from_outside_the_package_is_counted() -> None:
    lengths = np.array([5, 6]), np.array([7, 1])
    expected = flops_of_lengths(SMALL.model, 30, *lengths)
    matrix = jnp.ones((SMALL.model.d_ff, SMALL.model.d_ff))
    register("model.activation", "products")(lambda x: x @ (matrix @ matrix))
    model = replace(SMALL.model, activation="products")
    each = SMALL.model.d_ff**2
    # Each layer multiplies each token by a matrix, which is a product of two other matrices.
    extra = SMALL.model.num_layers * (sum(map(sum, lengths)) * each + 2 * SMALL.model.d_ff * each)
    assert flops_of_lengths(model, 30, *lengths) == expected + 3 * 2 * extra


X, W = jnp.ones((4, 3)), jnp.ones((3, 3))
PRODUCT = 2 * 4 * 3 * 3


def scan_products(x: Array) -> Array:
    return jax.lax.scan(lambda y, _: (y @ W, None), x, length=5)[0]


def branch(x: Array) -> Array:
    return jax.lax.cond(x[0, 0] > 0, lambda y: y @ W @ W, lambda y: y @ W, x)


def loop(x: Array) -> Array:
    return jax.lax.while_loop(lambda y: y[0, 0] < 9, lambda y: y @ W + 1, x)


def convolve(x: Array) -> Array:
    names = ("NWC", "WIO", "NWC")
    kernel = jnp.ones((5, 1, 6))
    return jax.lax.conv_general_dilated(
        x[None], kernel, (1,), "SAME", dimension_numbers=names, feature_group_count=3
    )


@pytest.mark.parametrize(
    ("function", "flops"),
    [
        (lambda x: x @ W, PRODUCT),
        (lambda x: jax.checkpoint(jax.jit(lambda y: jnp.tanh(y) @ W))(x), PRODUCT),
        (scan_products, 5 * PRODUCT),
        (branch, 2 * PRODUCT),
        (loop, PRODUCT),
        (convolve, 2 * 4 * 6 * 5),
        (lambda x: jnp.sum(x * jnp.sin(x), axis=-1), 2 * 4 * 3),
        (lambda x: jnp.sum(x * x), 0),
        (lambda x: jnp.mean(3 * jax.nn.softmax(x)), 0),
    ],
)
def test_all_dot_products_of_a_function_are_counted(function: Any, flops: int) -> None:
    assert count_flops(jax.make_jaxpr(function)(X).jaxpr) == flops


@pytest.mark.parametrize("length", [1, 3, 9])
def test_a_window_saves_the_flops_of_all_pairs_outside_of_it(length: int) -> None:
    tokens = np.full((2, length), 4)
    window = 2
    far = sum(abs(q - k) > window for q, k in np.ndindex(length, length))
    full, windowed = (
        batch_flops(SMALL.change(model={"attention_window": w}).model, 30, Batch(tokens, tokens))
        for w in (None, window)
    )
    model = SMALL.model
    per_pair = 3 * 2 * model.num_layers * model.num_heads * (model.d_k + model.d_v)
    assert full - windowed == 2 * 2 * far * per_pair


def test_padding_adds_no_flops() -> None:
    batch = Batch(np.full((2, 5), 4), np.full((2, 4), 4))
    padded = Batch(*(np.pad(side, ((0, 3), (0, 6))) for side in batch))
    assert batch_flops(SMALL.model, 30, batch) == batch_flops(SMALL.model, 30, padded)


def test_the_base_model_needs_six_flops_per_parameter_and_token() -> None:
    # For short sentences, attention scores need few FLOPs. The shared embedding has three uses, but
    # only the output projection is a matrix product.
    batch = Batch(np.full((1, 2), 4), np.full((1, 2), 4))
    layers = 63_045_632 - 37_000 * 512
    per_token = batch_flops(Config().model, 37_000, batch) / 2
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
    batches = prepare_text(SMALL.data).batches(SMALL)
    lengths = [batches.lengths(step) for step in range(SMALL.train.steps)]
    flops = sum(flops_of_lengths(SMALL.model, SMALL.data.vocab_size, *pair) for pair in lengths)
    tokens = sum(int(side.sum()) for pair in lengths for side in pair)
    share = tokens / (2 * SMALL.data.batch_tokens * SMALL.train.steps)
    assert flops < train_flops(SMALL)
    assert flops / train_flops(SMALL) == pytest.approx(share, rel=0.25)


@pytest.mark.slow
def test_rows_with_different_numbers_of_heads_cost_the_same() -> None:
    """Section 3.2.2: the total cost is similar to that of single-head attention."""
    flops = {name: train_flops(row.config) for name, row in load_rows("heads").items()}
    assert set(flops) == {"base", "A1", "A2", "A3", "A4"}
    assert len(set(flops.values())) == 1
