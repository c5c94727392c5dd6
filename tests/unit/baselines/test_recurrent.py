"""Test recurrent encoder-decoders against NumPy loops and PyTorch."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import SOURCE, TARGET, VOCABULARY
from oracles import SMALL_MODEL, Floats, Params, apply, drawn_params, floats, sigmoid, softmax

from transformer_jax.baselines.build import build_model
from transformer_jax.model.encoder_decoder import EncoderDecoder, shift_right
from transformer_jax.model.inspect import attention_weights
from transformer_jax.special_tokens import PAD

SIZE = SMALL_MODEL.d_model


def make_model(**changes: Any) -> tuple[EncoderDecoder, dict[str, Any]]:
    """Return a two-layer recurrent model and its parameters."""
    model = build_model(replace(SMALL_MODEL, architecture="rnn", **changes), VOCABULARY)
    return model, drawn_params(model, SOURCE, TARGET)


def lstm_cell(params: Params, state: tuple[Floats, Floats], x: Floats) -> tuple[Floats, Floats]:
    """Return the new state (c, h) of an LSTM cell with input, forget, and output gates."""
    c, h = state

    def gate(name: str) -> Floats:
        hidden = params[f"h{name}"]
        return (
            x @ floats(params[f"i{name}"]["kernel"])
            + h @ floats(hidden["kernel"])
            + floats(hidden["bias"])
        )

    c = sigmoid(gate("f")) * c + sigmoid(gate("i")) * np.tanh(gate("g"))
    return c, sigmoid(gate("o")) * np.tanh(c)


def run(params: Params, vectors: Sequence[Floats]) -> tuple[list[Floats], tuple[Floats, Floats]]:
    """Return the outputs and the final state of an LSTM."""
    size = floats(params["hi"]["bias"]).shape
    state, outputs = (np.zeros(size), np.zeros(size)), list[Floats]()
    for x in vectors:
        state = lstm_cell(params, state, x)
        outputs.append(state[1])
    return outputs, state


def cell_params(layer: Params, direction: str) -> Params:
    """Return the parameters of one direction of an encoder layer."""
    [cell] = layer[direction].values()
    return cell


def encode(params: Params, tokens: list[int]) -> tuple[list[Floats], list[Any]]:
    """Return the encoder outputs for an unpadded sentence, and each layer's final states."""
    table, states = floats(params["embedding"]["table"]), list[Any]()
    xs = [table[token] * SIZE**0.5 for token in tokens]
    for i in range(SMALL_MODEL.num_layers):
        layer = params[f"encoder_{i}"]
        ahead, (c, h) = run(cell_params(layer, "forward_rnn"), xs)
        back, (c_back, h_back) = run(cell_params(layer, "backward_rnn"), xs[::-1])
        xs = [np.concatenate(pair) for pair in zip(ahead, back[::-1], strict=True)]
        states.append((np.concatenate([c, c_back]), np.concatenate([h, h_back])))
    return xs, states


def score(params: Mapping[str, Any], name: str, query: Floats, key: Floats) -> float:
    """Return the attention score of a query and a key, as in Luong et al. and Bahdanau et al."""
    if name == "dot_product":
        return float(query @ key)
    if name == "general":
        return float(query @ floats(params["score"]["matrix"])[0] @ key)
    w, u = (floats(params[side]["kernel"]) for side in ("query", "key"))
    return float(floats(params["score"]["vector"])[0] @ np.tanh(query @ w + key @ u))


def decode(
    params: Params, name: str, source: list[int], target: list[int]
) -> tuple[Floats, Floats]:
    """Return the logits and the attention weights for a sentence pair, with input feeding."""
    memory, states = encode(params, source)
    decoder, table = params["decoder"], floats(params["embedding"]["table"])
    output, logits, all_weights = np.zeros(SIZE), list[Floats](), list[Floats]()
    for token in target:
        h = np.concatenate([table[token] * SIZE**0.5, output])
        for i in range(SMALL_MODEL.num_layers):
            states[i] = lstm_cell(decoder[f"cells_{i}"], states[i], h)
            h = states[i][1]
        weights = softmax(
            floats([score(decoder.get("attention", {}), name, h, key) for key in memory])
        )
        context = sum(w * value for w, value in zip(weights, memory, strict=True))
        output = np.tanh(np.concatenate([context, h]) @ floats(decoder["combine"]["kernel"]))
        logits.append(table @ output)
        all_weights.append(weights)
    return floats(logits), floats(all_weights)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("dot_product", marks=pytest.mark.slow),
        pytest.param("general", marks=pytest.mark.slow),
        "additive",
    ],
)
def test_the_model_is_the_papers_equations_as_loops(name: Any) -> None:
    model, params = make_model(attention_score=name, rnn_input_feeding=True)
    logits = apply(model, params, SOURCE, TARGET)
    weights = jax.jit(attention_weights, static_argnums=0)(model, params, SOURCE, TARGET)
    assert set(weights) == {"cross"}
    for row, (source, read) in enumerate(zip(SOURCE, shift_right(TARGET), strict=True)):
        tokens = [int(token) for token in source if token != PAD]
        expected, expected_weights = decode(params, name, tokens, [int(t) for t in read])
        np.testing.assert_allclose(logits[row], expected, atol=1e-4)
        actual = weights["cross"][0, row, 0]
        np.testing.assert_allclose(actual[:, : len(tokens)], expected_weights, atol=1e-5)
        assert not np.any(actual[:, len(tokens) :])


TORCH_GATES = {"lstm": "ifgo", "gru": "rzn"}


@pytest.mark.slow
@pytest.mark.parametrize("cell", TORCH_GATES)
def test_the_encoder_is_the_bidirectional_layer_of_torch(cell: Any) -> None:
    torch = pytest.importorskip("torch")
    model, params = make_model(rnn_cell=cell, attention_score="none")
    gates, half = TORCH_GATES[cell], SIZE // 2
    layer = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}[cell](
        SIZE, half, SMALL_MODEL.num_layers, batch_first=True, bidirectional=True
    )
    weights: dict[str, Any] = {}
    for i in range(SMALL_MODEL.num_layers):
        for direction, suffix in (("forward_rnn", ""), ("backward_rnn", "_reverse")):
            own = cell_params(params[f"encoder_{i}"], direction)
            for side in "ih":
                dense = [own[f"{side}{gate}"] for gate in gates]
                kernels = [np.asarray(d["kernel"]).T for d in dense]
                biases = [np.asarray(d["bias"] if "bias" in d else np.zeros(half)) for d in dense]
                name = f"l{i}{suffix}"
                weights[f"weight_{side}h_{name}"] = torch.tensor(np.concatenate(kernels))
                weights[f"bias_{side}h_{name}"] = torch.tensor(
                    np.concatenate(biases).astype(np.float32)
                )
    layer.load_state_dict(weights)
    lengths = np.asarray((SOURCE != PAD).sum(axis=1))
    embedded = np.asarray(params["embedding"]["table"])[np.asarray(SOURCE)] * SIZE**0.5
    packed = torch.nn.utils.rnn.pack_padded_sequence(
        torch.tensor(embedded.astype(np.float32)), torch.tensor(lengths), batch_first=True
    )
    with torch.no_grad():
        packed_output, last = layer(packed)
    expected, _ = torch.nn.utils.rnn.pad_packed_sequence(packed_output, batch_first=True)

    memory = apply(model, params, SOURCE, method="encode")
    is_real = np.asarray(SOURCE != PAD)
    np.testing.assert_allclose(memory.vectors[is_real], expected.numpy()[is_real], atol=1e-5)
    hidden = last[0] if cell == "lstm" else last
    for i, state in enumerate(memory.states):
        h = state[1] if cell == "lstm" else state
        both = np.concatenate([hidden[2 * i].numpy(), hidden[2 * i + 1].numpy()], axis=-1)
        np.testing.assert_allclose(h, both, atol=1e-5)


def test_without_attention_only_the_last_states_reach_the_decoder() -> None:
    model, params = make_model(attention_score="none")
    assert attention_weights(model, params, SOURCE, TARGET) == {}
    memory = apply(model, params, SOURCE, method="encode")
    mask = (SOURCE != PAD)[:, None, None]
    read = shift_right(TARGET)
    before = apply(model, params, read, memory, mask, method="decode")
    other = memory._replace(vectors=memory.vectors + 1)
    np.testing.assert_array_equal(apply(model, params, read, other, mask, method="decode"), before)
    other = memory._replace(states=jax.tree.map(lambda x: x + 1, memory.states))
    after = apply(model, params, read, other, mask, method="decode")
    assert not jnp.allclose(after, before, atol=0.01)
