"""Layers that normalise first, against their formula and PyTorch's."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array
from oracles import (
    SMALL,
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
from test_layers import (
    as_array,
    causal,
    copied_attention,
    copied_feed_forward,
    copied_norm,
    hidden,
    source_tokens,
    torch_layer,
)

from transformer_jax.model.transformer import Transformer, abstract_params, shift_right
from transformer_jax.model.variants.pre_norm import PreNormDecoderLayer, PreNormEncoderLayer

BATCH, TARGETS, SOURCES, WIDTH = 2, 5, 6, SMALL.d_model
PRE = replace(SMALL, num_layers=1, layer_norm="pre")
SOURCE, TARGET = jnp.asarray([[5, 9, 3, 2], [4, 11, 2, 0]]), jnp.asarray([[8, 3, 2], [12, 2, 0]])


def test_encoder_layer_is_x_plus_each_sublayer_of_the_normalised_x() -> None:
    x, mask = normal(0, BATCH, SOURCES, WIDTH), source_tokens()
    layer = PreNormEncoderLayer(PRE)
    params = drawn_params(layer, x, mask)
    y = layer_norm(params["self_attention_norm"], x)
    expected = floats(x) + multi_head_attention(params["self_attention"], y, y, mask)
    y = layer_norm(params["feed_forward_norm"], expected)
    expected = expected + feed_forward(params["feed_forward"], y)
    np.testing.assert_allclose(apply(layer, params, x, mask), expected, atol=1e-5)


def test_decoder_layer_is_x_plus_each_sublayer_of_the_normalised_x() -> None:
    x, memory = normal(0, BATCH, TARGETS, WIDTH), normal(1, BATCH, SOURCES, WIDTH)
    arrays = x, memory, causal(), source_tokens()
    layer = PreNormDecoderLayer(PRE)
    params = drawn_params(layer, *arrays)
    y = layer_norm(params["self_attention_norm"], x)
    expected = floats(x) + multi_head_attention(params["self_attention"], y, y, causal())
    y = layer_norm(params["cross_attention_norm"], expected)
    # The memory comes from the end of the encoder, where it is normalised.
    expected += multi_head_attention(params["cross_attention"], y, memory, source_tokens())
    y = layer_norm(params["feed_forward_norm"], expected)
    expected += feed_forward(params["feed_forward"], y)
    np.testing.assert_allclose(apply(layer, params, *arrays), expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["Encoder", "Decoder"])
def test_layers_agree_with_pytorchs_that_normalise_first(kind: str) -> None:
    torch = pytest.importorskip("torch")
    theirs = torch_layer(torch, f"Transformer{kind}Layer", PRE)
    theirs.norm_first = True
    x, memory = normal(0, BATCH, TARGETS, WIDTH), normal(1, BATCH, SOURCES, WIDTH)
    tokens = hidden(torch, source_tokens()[:, 0, 0])
    params = {
        "self_attention": copied_attention(theirs.self_attn, PRE),
        "self_attention_norm": copied_norm(theirs.norm1),
        "feed_forward": copied_feed_forward(theirs),
    }
    if kind == "Encoder":
        params["feed_forward_norm"] = copied_norm(theirs.norm2)
        output = apply(PreNormEncoderLayer(PRE), params, memory, source_tokens())
        expected = theirs(torch.from_numpy(np.array(memory)), src_key_padding_mask=tokens)
    else:
        params |= {
            "cross_attention_norm": copied_norm(theirs.norm2),
            "cross_attention": copied_attention(theirs.multihead_attn, PRE),
            "feed_forward_norm": copied_norm(theirs.norm3),
        }
        arrays = x, memory, causal(), source_tokens()
        output = apply(PreNormDecoderLayer(PRE), params, *arrays)
        expected = theirs(
            torch.from_numpy(np.array(x)),
            torch.from_numpy(np.array(memory)),
            tgt_mask=hidden(torch, causal()[0, 0]),
            memory_key_padding_mask=tokens,
        )
    np.testing.assert_allclose(output, as_array(expected), atol=1e-5)


def test_a_layer_norm_is_at_the_end_of_each_stack_and_of_none_that_normalises_after() -> None:
    names = set(abstract_params(Transformer(PRE, 13)))
    assert names >= {"encoder_norm", "decoder_norm"}
    after = set(abstract_params(Transformer(replace(PRE, layer_norm="post"), 13)))
    assert after == names - {"encoder_norm", "decoder_norm"}


def test_memory_and_logits_are_of_normalised_vectors() -> None:
    model = Transformer(PRE, 13)
    params = drawn_params(model, SOURCE, TARGET)
    # Layers that add nothing leave the sum of embeddings and positions.
    silent = params | {
        stack: jax.tree.map(jnp.zeros_like, params[stack]) for stack in ("encoder_0", "decoder_0")
    }
    table = floats(params["embedding"]["table"])

    def embedded(pieces: Array) -> Floats:
        return table[np.asarray(pieces)] * 4 + sinusoid(pieces.shape[1], WIDTH)

    memory = layer_norm(params["encoder_norm"], embedded(SOURCE))
    np.testing.assert_allclose(apply(model, silent, SOURCE, method="encode"), memory, atol=1e-4)
    logits = layer_norm(params["decoder_norm"], embedded(shift_right(TARGET))) @ table.T
    np.testing.assert_allclose(apply(model, silent, SOURCE, TARGET), logits, atol=1e-4)


def test_each_sublayer_drops_out_by_a_mask_of_its_own() -> None:
    x, mask = normal(0, BATCH, SOURCES, WIDTH), source_tokens()
    layer = PreNormEncoderLayer(PRE)
    params = drawn_params(layer, x, mask)
    outer = params["feed_forward"]["outer"] | {"bias": jnp.full(WIDTH, 1000.0)}
    output = params["self_attention"]["output"]
    assert set(output) == {"kernel"}
    # The feed-forward network alone, then attention alone.
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
