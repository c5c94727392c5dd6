"""Test pre-norm layers against their formula and against PyTorch's layers."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array
from models import (
    as_array,
    attention_params,
    causal,
    disallowed,
    feed_forward_params,
    is_source_token,
    make_decoder_layer,
    make_encoder_layer,
    norm_params,
    torch_layer,
)
from oracles import (
    SMALL_MODEL,
    Floats,
    apply,
    drawn_params,
    feed_forward,
    floats,
    layer_norm,
    multi_head_attention,
    normal,
    sinusoid,
)

from transformer_jax.model.build import build_transformer
from transformer_jax.model.encoder_decoder import shift_right
from transformer_jax.model.inspect import abstract_params

BATCH, TARGETS, SOURCES, WIDTH = 2, 5, 6, SMALL_MODEL.d_model
PRE = replace(SMALL_MODEL, num_layers=1, layer_norm="pre")
SOURCE, TARGET = jnp.asarray([[5, 9, 3, 2], [4, 11, 2, 0]]), jnp.asarray([[8, 3, 2], [12, 2, 0]])


def test_the_encoder_layer_adds_each_sub_layer_of_the_normalized_x_to_x() -> None:
    x, mask = normal(0, BATCH, SOURCES, WIDTH), is_source_token()
    layer = make_encoder_layer(PRE)
    params = drawn_params(layer, x, mask)
    y = layer_norm(params["after_self_attention"]["norm"], x)
    expected = floats(x) + multi_head_attention(params["self_attention"], y, y, mask)
    y = layer_norm(params["after_feed_forward"]["norm"], expected)
    expected = expected + feed_forward(params["feed_forward"], y)
    np.testing.assert_allclose(apply(layer, params, x, mask), expected, atol=1e-5)


def test_the_decoder_layer_adds_each_sub_layer_of_the_normalized_x_to_x() -> None:
    x, memory = normal(0, BATCH, TARGETS, WIDTH), normal(1, BATCH, SOURCES, WIDTH)
    arrays = x, memory, causal(), is_source_token()
    layer = make_decoder_layer(PRE)
    params = drawn_params(layer, *arrays)
    y = layer_norm(params["after_self_attention"]["norm"], x)
    expected = floats(x) + multi_head_attention(params["self_attention"], y, y, causal())
    y = layer_norm(params["after_cross_attention"]["norm"], expected)
    # The encoder has already normalized the memory, so the layer must not normalize it again.
    expected += multi_head_attention(params["cross_attention"], y, memory, is_source_token())
    y = layer_norm(params["after_feed_forward"]["norm"], expected)
    expected += feed_forward(params["feed_forward"], y)
    np.testing.assert_allclose(apply(layer, params, *arrays), expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Encoder", "Decoder"])
def test_layers_agree_with_pytorch_layers_that_normalize_first(kind: str) -> None:
    torch = pytest.importorskip("torch")
    theirs = torch_layer(torch, f"Transformer{kind}Layer", PRE)
    theirs.norm_first = True
    x, memory = normal(0, BATCH, TARGETS, WIDTH), normal(1, BATCH, SOURCES, WIDTH)
    padding = disallowed(torch, is_source_token()[:, 0, 0])
    params = {
        "self_attention": attention_params(theirs.self_attn, PRE),
        "after_self_attention": {"norm": norm_params(theirs.norm1)},
        "feed_forward": feed_forward_params(theirs),
    }
    if kind == "Encoder":
        params["after_feed_forward"] = {"norm": norm_params(theirs.norm2)}
        output = apply(make_encoder_layer(PRE), params, memory, is_source_token())
        expected = theirs(torch.from_numpy(np.array(memory)), src_key_padding_mask=padding)
    else:
        params |= {
            "after_cross_attention": {"norm": norm_params(theirs.norm2)},
            "cross_attention": attention_params(theirs.multihead_attn, PRE),
            "after_feed_forward": {"norm": norm_params(theirs.norm3)},
        }
        arrays = x, memory, causal(), is_source_token()
        output = apply(make_decoder_layer(PRE), params, *arrays)
        expected = theirs(
            torch.from_numpy(np.array(x)),
            torch.from_numpy(np.array(memory)),
            tgt_mask=disallowed(torch, causal()[0, 0]),
            memory_key_padding_mask=padding,
        )
    np.testing.assert_allclose(output, as_array(expected), atol=1e-5)


def test_only_stacks_that_normalize_first_end_with_a_layer_norm() -> None:
    names = set(abstract_params(build_transformer(PRE, 13)))
    assert names >= {"encoder_norm", "decoder_norm"}
    post_norm_names = set(abstract_params(build_transformer(replace(PRE, layer_norm="post"), 13)))
    assert post_norm_names == names - {"encoder_norm", "decoder_norm"}


def test_memory_and_logits_come_from_normalized_vectors() -> None:
    model = build_transformer(PRE, 13)
    params = drawn_params(model, SOURCE, TARGET)
    # Layers whose parameters are all zero pass the sum of embeddings and positions through
    # unchanged.
    silent = params | {
        stack: jax.tree.map(jnp.zeros_like, params[stack]) for stack in ("encoder_0", "decoder_0")
    }
    table = floats(params["embedding"]["table"])

    def embed(tokens: Array) -> Floats:
        return table[np.asarray(tokens)] * 4 + sinusoid(tokens.shape[1], WIDTH)

    memory = layer_norm(params["encoder_norm"], embed(SOURCE))
    np.testing.assert_allclose(apply(model, silent, SOURCE, method="encode"), memory, atol=1e-4)
    logits = layer_norm(params["decoder_norm"], embed(shift_right(TARGET))) @ table.T
    np.testing.assert_allclose(apply(model, silent, SOURCE, TARGET), logits, atol=1e-4)


def test_each_sub_layer_has_its_own_dropout_mask() -> None:
    x, mask = normal(0, BATCH, SOURCES, WIDTH), is_source_token()
    layer = make_encoder_layer(PRE)
    params = drawn_params(layer, x, mask)
    outer = params["feed_forward"]["outer"] | {"bias": jnp.full(WIDTH, 1000.0)}
    output = params["self_attention"]["output"]
    assert set(output) == {"kernel"}
    # With a large bias in the feed-forward network, the output reveals that network's dropout mask.
    # If the feed-forward network returns zeros, the output reveals the dropout mask of the
    # self-attention sub-layer.
    fed = dict(params) | {"feed_forward": params["feed_forward"] | {"outer": outer}}
    both = apply(layer, fed, x, mask, train=True, rng=jax.random.key(1))
    dropped_by_second = np.abs(floats(both)) < 500
    assert 0.3 < dropped_by_second.mean() < 0.7
    silent = jax.tree.map(jnp.zeros_like, params["feed_forward"])
    first = apply(
        layer,
        dict(params) | {"feed_forward": silent},
        x,
        mask,
        train=True,
        rng=jax.random.key(1),
    )
    dropped_by_first = np.isclose(first, x, atol=1e-7)
    assert 0.3 < dropped_by_first.mean() < 0.7
    assert 0.2 < np.mean(dropped_by_first != dropped_by_second) < 0.8
