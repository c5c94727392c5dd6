"""Test runs of all architectures except the Transformer, including one from outside the package."""

# ruff: noqa: ARG002 - a model's methods have arguments that a simple model does not need.

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from example_configs import SMALL, with_architecture
from jaxtyping import Array
from training_runs import assert_same, resume, state_of, train

import transformer_jax
from transformer_jax import registry
from transformer_jax.compilation.shapes import largest_bucket
from transformer_jax.config import Config
from transformer_jax.data.batches import Bucket
from transformer_jax.errors import UsageError
from transformer_jax.model.encoder_decoder import EncoderDecoder
from transformer_jax.sharing.packaging import package_run
from transformer_jax.special_tokens import PAD
from transformer_jax.training.flops import flops_of_lengths


class MeanModel(EncoderDecoder):
    """A model that predicts each token from the previous token and the mean of the source."""

    def encode(self, source: Array, *, train: bool = False) -> Array:
        weights = (source != PAD)[..., None]
        x = self.source_embedding.embed(source) * weights
        return jnp.sum(x, axis=1, keepdims=True) / jnp.sum(weights, axis=1, keepdims=True)

    def decode(
        self, decoder_input: Array, memory: Array, memory_mask: Array, *, train: bool = False
    ) -> Array:
        return self.output_embedding.logits(self.embedding.embed(decoder_input) + memory)

    def init_decoding(self, source: Array, *, num_hypotheses: int, max_length: int) -> Array:
        return self.encode(source)

    def decode_step(
        self, tokens: Array, position: Array, ancestors: Array, state: Array
    ) -> tuple[Array, Array]:
        return self.output_embedding.logits(self.embedding.embed(tokens) + state), state


def test_a_registered_class_trains_translates_and_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = registry.Part(MeanModel, is_foreign=True, file=None)
    monkeypatch.setitem(registry._parts["model.architecture"], "mean", part)
    config = SMALL.change(model={"architecture": "mean"})
    run = transformer_jax.load(train(config, tmp_path / "run"), average_checkpoints=1)
    vocab_size = run.model.vocab_size
    assert run.num_parameters == vocab_size * config.model.d_model

    together = run.translate(LINES, beam_size=3)
    assert together == [run.translate([line], beam_size=3)[0] for line in LINES]
    lengths = np.array([3, 5]), np.array([4, 6])
    # The mean of the source is a weighted sum, which is a dot product for each component.
    products = (4 + 6) * config.model.d_model * vocab_size + (3 + 5) * config.model.d_model
    assert flops_of_lengths(config.model, vocab_size, *lengths) == 3 * 2 * products
    few, many = Bucket(8, 16, 16, 1), Bucket(16, 16, 16, 1)
    assert largest_bucket(config, [few, many]) == many
    with pytest.raises(UsageError, match="does not attend to the source"):
        run.attention(LINES[0], "fünf")
    package_run(run, tmp_path / "package")
    assert "A model of architecture mean" in (tmp_path / "package/README.md").read_text("utf-8")


CASES = {
    "rnn": with_architecture("rnn", attention_score="additive", rnn_input_feeding=True),
    "conv": with_architecture("conv", num_layers=2),
}
LINES = ["five", "one hundred and twelve", "forty-two thousand"]


@pytest.mark.slow
@pytest.mark.parametrize("config", CASES.values(), ids=CASES)
def test_a_run_resumes_bit_for_bit_translates_and_shows_its_attention(
    config: Config, tmp_path: Path
) -> None:
    whole = train(config, tmp_path / "whole")
    parts = train(config.change(train={"steps": 5}), tmp_path / "parts")
    resume(parts, train={"steps": 8})
    assert_same(state_of(parts), state_of(whole))

    run = transformer_jax.load(whole, average_checkpoints=1)
    together = run.translate(LINES, beam_size=3)
    assert together == [run.translate([line], beam_size=3)[0] for line in LINES]
    [best] = run.translate_best(LINES[:1], 1, beam_size=1)
    assert np.isfinite(best[0].score)

    attention = run.attention(LINES[1], "hundertzwölf")
    assert set(attention.maps) == {"cross"}
    num_layers = {"rnn": 1, "conv": 2}[config.model.architecture]
    assert attention.cross.shape[:2] == (num_layers, 1)
    np.testing.assert_allclose(attention.cross.sum(axis=-1), 1, atol=1e-5)
    for name in ("page.html", "figure.svg"):
        attention.save(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 1000
    with pytest.raises(UsageError, match="kind must be one of cross, got 'encoder'"):
        attention.save(tmp_path / "figure.svg", kind="encoder")
    with pytest.raises(UsageError, match="no attention heads"):
        transformer_jax.head_importance(run)
