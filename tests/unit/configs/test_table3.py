"""Test the configs of the paper's experiments against Table 3 and other parts of the paper."""

import dataclasses
import functools
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from transformer_jax.config import Config, ModelConfig
from transformer_jax.config.loading import load_config, load_rows
from transformer_jax.model.build import build_transformer
from transformer_jax.model.inspect import parameter_counts

CONFIGS = Path(__file__).parents[3] / "configs"
TABLE_3 = load_rows(str(CONFIGS / "table3.py"))
VOCABULARY = 37_000

Changes = dict[str, Any]


class Expected(NamedTuple):
    """A row of Table 3, with our parameter count for a vocabulary of 37,000 tokens."""

    model: Changes
    train: Changes
    perplexity: float
    bleu: float
    millions: int | None
    counted_millions: float


EXPECTED = {
    "base": Expected({}, {}, 4.92, 25.8, 65, 63.05),
    "A1": Expected({"num_heads": 1, "d_k": 512, "d_v": 512}, {}, 5.29, 24.9, None, 63.05),
    "A2": Expected({"num_heads": 4, "d_k": 128, "d_v": 128}, {}, 5.00, 25.5, None, 63.05),
    "A3": Expected({"num_heads": 16, "d_k": 32, "d_v": 32}, {}, 4.91, 25.8, None, 63.05),
    "A4": Expected({"num_heads": 32, "d_k": 16, "d_v": 16}, {}, 5.01, 25.4, None, 63.05),
    "B1": Expected({"d_k": 16}, {}, 5.16, 25.1, 58, 55.97),
    "B2": Expected({"d_k": 32}, {}, 5.01, 25.4, 60, 58.33),
    "C1": Expected({"num_layers": 2}, {}, 6.11, 23.7, 36, 33.65),
    "C2": Expected({"num_layers": 4}, {}, 5.19, 25.3, 50, 48.35),
    "C3": Expected({"num_layers": 8}, {}, 4.88, 25.5, 80, 77.75),
    "C4": Expected({"d_model": 256, "d_k": 32, "d_v": 32}, {}, 5.75, 24.5, 28, 26.82),
    "C5": Expected({"d_model": 1024, "d_k": 128, "d_v": 128}, {}, 4.66, 26.0, 168, 163.82),
    "C6": Expected({"d_ff": 1024}, {}, 5.12, 25.4, 53, 50.45),
    "C7": Expected({"d_ff": 4096}, {}, 4.75, 26.2, 90, 88.24),
    "D1": Expected({"dropout": 0.0}, {}, 5.77, 24.6, None, 63.05),
    "D2": Expected({"dropout": 0.2}, {}, 4.95, 25.5, None, 63.05),
    "D3": Expected({}, {"label_smoothing": 0.0}, 4.67, 25.3, None, 63.05),
    "D4": Expected({}, {"label_smoothing": 0.2}, 5.47, 25.7, None, 63.05),
    # Row E has the parameters of the base model, plus 256 position vectors in the encoder and 306
    # in the decoder. Each vector has 512 components.
    "E": Expected({"positions": "learned"}, {}, 4.92, 25.7, None, 63.33),
    "big": Expected(
        {"d_model": 1024, "d_ff": 4096, "num_heads": 16, "dropout": 0.3},
        {"steps": 300_000},
        4.33, 26.4, 213, 214.17,
    ),
}  # fmt: skip


@functools.cache
def total(config: ModelConfig) -> int:
    """Return the number of parameters in the model built from this config."""
    return parameter_counts(build_transformer(config, VOCABULARY))["total"]


def check_equations(config: ModelConfig) -> None:
    """Check the closed-form parameter count against a one-layer model, which is fast to trace."""
    one_layer = dataclasses.replace(config, num_layers=1)
    assert total(one_layer) == closed_form(one_layer)


def closed_form(config: ModelConfig) -> int:
    """Compute the number of parameters from the equations of the paper or of a variant."""
    d, ff, heads, d_k, d_v = (
        getattr(config, key) for key in ("d_model", "d_ff", "num_heads", "d_k", "d_v")
    )
    score = {"general": d_k * d_k, "additive": d_k}.get(config.attention_score, 0)
    attention = heads * (2 * d * d_k + 2 * d * d_v + score)
    relative_positions = (
        2 * config.max_relative_position + 1 if config.positions == "relative" else 0
    )
    buckets = config.position_buckets if config.positions == "t5" else 0
    self_attention = attention + relative_positions * (d_k + d_v) + buckets * heads
    feed_forward = d * ff + ff + ff * d + d
    norm = 2 * d
    encoder = self_attention + feed_forward + 2 * norm
    decoder = self_attention + attention + feed_forward + 3 * norm
    tables = (256 + 306) * d if config.positions == "learned" else 0
    last_norms = 2 * norm if config.layer_norm == "pre" else 0
    embeddings = {"all": 1, "target": 2, "none": 3}[config.tie_embeddings] * VOCABULARY * d
    return embeddings + config.num_layers * (encoder + decoder) + tables + last_norms


def test_the_rows_are_in_the_papers_order() -> None:
    assert list(TABLE_3) == list(EXPECTED)


def test_base_is_the_first_row_of_table_3() -> None:
    base = TABLE_3["base"].config
    m, t = base.model, base.train
    assert (m.num_layers, m.d_model, m.d_ff, m.num_heads, m.d_k, m.d_v) == (6, 512, 2048, 8, 64, 64)
    assert (m.dropout, t.label_smoothing, t.steps) == (0.1, 0.1, 100_000)
    assert (t.adam_beta1, t.adam_beta2, t.adam_epsilon, t.warmup_steps) == (0.9, 0.98, 1e-9, 4000)
    # These options do not exist in the paper.
    assert (m.attention_dropout, m.activation_dropout, m.attention_bias) == (0.0, 0.0, False)
    assert (t.learning_rate_scale, t.clip_norm) == (1.0, None)
    assert (m.positions, m.attention_score) == ("sinusoidal", "scaled_dot_product")


@pytest.mark.parametrize(
    "name", ["base", "big", "table3", "heads", "d_k", "positions", "wmt14", "wmt14_big"]
)
def test_the_papers_experiments_train_on_english_german_of_wmt_14(name: str) -> None:
    for row in load_rows(name).values():
        data = row.config.data
        assert (data.corpus, data.dataset) == ("tfds", "wmt14_translate/de-en")
        assert (data.languages, data.vocab_size, data.batch_tokens) == (
            ("en", "de"),
            37_000,
            25_000,
        )


def test_table_2_averages_5_checkpoints_of_base_and_20_of_big() -> None:
    french = load_rows("wmt14_fr")
    cases = [
        (load_config("wmt14"), TABLE_3["base"].config, 5),
        (load_config("wmt14_big"), TABLE_3["big"].config, 20),
        (french["base"].config, TABLE_3["base"].config, 5),
        (french["big"].config, TABLE_3["big"].config.change(model={"dropout": 0.1}), 20),
    ]
    for config, row, count in cases:
        assert config.model == row.model
        assert config.train.steps == row.train.steps
        assert config.decode.average_checkpoints == config.train.keep_checkpoints == count
    for row in french.values():
        assert row.config.data.languages == ("en", "fr")
        assert row.config.data.vocab_size == 32_000


def test_a_row_of_table_3_keeps_only_its_latest_and_best_checkpoints() -> None:
    assert {row.config.train.keep_checkpoints for row in TABLE_3.values()} == {1}


def test_the_search_has_the_parameters_of_section_6_1() -> None:
    decode = TABLE_3["base"].config.decode
    assert (decode.beam_size, decode.length_penalty_alpha, decode.max_extra_length) == (4, 0.6, 50)
    # According to section 6.2, the results in Table 3 do not use checkpoint averaging.
    assert {row.config.decode.average_checkpoints for row in TABLE_3.values()} == {1}


def test_every_row_differs_from_base_exactly_as_in_the_paper() -> None:
    base = TABLE_3["base"].config
    for name, expected in EXPECTED.items():
        changes: dict[str, Changes] = {"model": {}, "train": {}}
        for (section, key), (_, value) in base.differences(TABLE_3[name].config).items():
            changes[section][key] = value
        assert changes == {"model": expected.model, "train": expected.train}, name


def test_every_row_has_the_papers_results() -> None:
    for name, expected in EXPECTED.items():
        paper = TABLE_3[name].paper
        results = paper.perplexity, paper.bleu, paper.parameters
        assert results == (expected.perplexity, expected.bleu, expected.millions), name


@pytest.mark.slow
def test_every_row_has_as_many_parameters_as_its_equations() -> None:
    for name, expected in EXPECTED.items():
        config = TABLE_3[name].config.model
        check_equations(config)
        millions = closed_form(config) / 1e6
        assert millions == pytest.approx(expected.counted_millions, abs=0.006), name
    base = Config().model
    assert total(base) == closed_form(base)


def test_every_variant_has_as_many_parameters_as_its_equations() -> None:
    variants: list[tuple[Changes, float]] = [
        # The number of extra parameters is 12 self-attention sub-layers x 33 relative positions x
        # width 128.
        ({"positions": "relative"}, 0.05),
        ({"positions": "relative", "max_relative_position": 4}, 0.01),
        # The number of extra parameters is 12 self-attention sub-layers x 32 buckets x 8 heads.
        ({"positions": "t5"}, 0.003),
        ({"positions": "rotary"}, 0),
        ({"positions": "alibi"}, 0),
        ({"positions": "concatenated_sinusoidal"}, 0),
        # The number of extra parameters is 18 attention sub-layers x 8 heads x 64 x 64 for general
        # scores, and 18 x 8 x 64 for additive scores.
        ({"attention_score": "general"}, 0.59),
        ({"attention_score": "additive"}, 0.01),
        ({"layer_norm": "pre"}, 0),
        ({"tie_embeddings": "target"}, 18.94),
        ({"tie_embeddings": "none"}, 37.89),
    ]
    for changes, extra_millions in variants:
        config = ModelConfig(**changes)
        check_equations(config)
        assert closed_form(config) / 1e6 == pytest.approx(63.05 + extra_millions, abs=0.011), (
            changes
        )


def test_rows_differ_from_base_by_as_many_parameters_as_in_the_paper() -> None:
    """No vocabulary size gives the paper's parameter counts, so compare each row with the base row.

    The vocabulary size cancels out if d_model is the same.
    """
    base, base_millions = closed_form(Config().model), EXPECTED["base"].millions
    assert base_millions is not None
    for name, expected in EXPECTED.items():
        if expected.millions is not None and "d_model" not in expected.model:
            difference = (closed_form(TABLE_3[name].config.model) - base) / 1e6
            # The paper rounds both parameter counts to millions.
            assert abs(difference - (expected.millions - base_millions)) < 1, name


def test_rows_a_have_as_many_parameters_as_base() -> None:
    """Rows (A) keep the amount of computation constant, because h x d_k is always 512."""
    rows = ("base", "A1", "A2", "A3", "A4")
    assert len({closed_form(TABLE_3[name].config.model) for name in rows}) == 1
