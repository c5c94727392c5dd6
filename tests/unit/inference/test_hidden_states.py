"""Test `Run.hidden_states` on untrained runs."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from example_configs import SMALL, with_architecture
from models import SOURCE, TARGET, VOCABULARY, make_model
from oracles import apply, decoder_layer, encoder_layer, floats, layer_norm, sinusoid
from run_files import write_untrained_run

from transformer_jax.errors import UsageError
from transformer_jax.inference.trained_run import load
from transformer_jax.model.inspect import hidden_states


def test_the_states_are_those_between_the_layers_of_the_formulas(tmp_path: Path) -> None:
    config = SMALL.change(model={"num_layers": 2, "num_decoder_layers": 1})
    run = load(write_untrained_run(tmp_path / "run", config, steps=(8,), scale=2.0).path)
    states = run.hidden_states("twenty-one", "einundzwanzig")
    [source] = run.vocabulary.source.encode(["twenty-one"])
    [target] = run.vocabulary.target.encode(["einundzwanzig"])
    assert states.encoder.shape == (3, len(source), 16)
    assert states.decoder.shape == (2, len(target), 16)
    assert states.source_tokens == tuple(run.vocabulary.source.to_texts(source))
    assert states.target_tokens == tuple(run.vocabulary.target.to_texts(target))
    matrix = floats(run.params["embedding"]["table"])
    read = np.array([1, *target[:-1]])
    for found, tokens in ((states.encoder, np.array(source)), (states.decoder, read)):
        expected = matrix[tokens] * math.sqrt(16) + sinusoid(len(tokens), 16)
        np.testing.assert_allclose(found[0], expected, atol=1e-5)
    every, causal = np.ones((1, 1, 1, len(source)), bool), np.tril(np.ones((len(target),) * 2))
    for i in range(2):
        expected = encoder_layer(run.params[f"encoder_{i}"], states.encoder[i][None], every)[0]
        np.testing.assert_allclose(states.encoder[i + 1], expected, atol=1e-4)
    inputs = states.decoder[0][None], states.encoder[-1][None]
    expected = decoder_layer(run.params["decoder_0"], *inputs, causal[None, None] > 0, every)[0]
    np.testing.assert_allclose(states.decoder[1], expected, atol=1e-4)


@pytest.mark.parametrize("changes", [{"layer_norm": "pre"}, {"remat": True}], ids=str)
def test_the_last_state_of_the_decoder_gives_the_logits(changes: dict[str, Any]) -> None:
    model, params = make_model(num_layers=2, **changes)
    states = apply_states(model, params)
    logits = apply(model, params, states["decoder"][-1], method="to_logits")
    expected = apply(model, params, SOURCE, TARGET)
    np.testing.assert_allclose(floats(logits), floats(expected), atol=1e-5)


@pytest.mark.parametrize("order", ["post", "pre"])
def test_the_logit_lens_multiplies_each_state_by_the_embedding_matrix(order: str) -> None:
    model, params = make_model(num_layers=2, layer_norm=order)
    states = apply_states(model, params)["decoder"][:, 0]
    logits = apply(model, params, states, method="to_logits")
    normalized = floats(states) if order == "post" else layer_norm(params["decoder_norm"], states)
    expected = normalized @ floats(params["embedding"]["table"]).T
    assert expected.shape == (3, TARGET.shape[1], VOCABULARY)
    np.testing.assert_allclose(floats(logits), expected, atol=1e-4)


def apply_states(model: Any, params: Any) -> dict[str, Any]:
    return hidden_states(model, params, SOURCE, TARGET)


def test_convolutions_have_states_and_recurrent_models_say_that_they_have_none(
    tmp_path: Path,
) -> None:
    run = load(write_untrained_run(tmp_path / "conv", with_architecture("conv"), steps=(8,)).path)
    states = run.hidden_states("one two", "eins zwei")
    assert states.encoder.shape[0] == states.decoder.shape[0] == 1 + run.config.model.num_layers
    run = load(write_untrained_run(tmp_path / "rnn", with_architecture("rnn"), steps=(8,)).path)
    with pytest.raises(
        UsageError, match=r"^the architecture rnn does not record its hidden states"
    ):
        run.hidden_states("one two", "eins zwei")
