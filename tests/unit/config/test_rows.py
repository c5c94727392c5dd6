"""Test that rows keep their defining fields when the corpus, budget, or size changes."""

import pytest

from transformer_jax.config import Config, Paper, Row
from transformer_jax.config.loading import load_rows
from transformer_jax.config.rows import (
    DIVISORS,
    Scale,
    check_distinct,
    grid_rows,
    parse_value,
    scale_rows,
    with_sections,
)
from transformer_jax.errors import ConfigError


def test_rows_keep_their_differences_on_another_corpus_and_budget() -> None:
    other = Config().change(
        data={"vocab_size": 99, "batch_tokens": 77},
        train={"steps": 5, "label_smoothing": 0.3, "warmup_steps": 2},
    )
    rows = with_sections(load_rows("table3"), {"data": other, "train": other})
    assert {row.config.data for row in rows.values()} == {other.data}
    assert {row.config.train.warmup_steps for row in rows.values()} == {2}
    assert rows["A1"].config.train == other.train
    assert rows["D3"].config.train.label_smoothing == 0.0
    assert rows["D4"].config.train.label_smoothing == 0.2
    # Regardless of the budget, row "big" trains three times as long as row "base".
    assert rows["big"].config.train.steps == 15


def test_sections_that_depend_on_each_other_change_together() -> None:
    # Changing only `train` would be invalid: the run would average more checkpoints than it keeps.
    other = Config().change(train={"keep_checkpoints": 1}, decode={"average_checkpoints": 1})
    row = Row(Config().change(decode={"average_checkpoints": 10}))
    config = with_sections({"base": row}, {"train": other, "decode": other})["base"].config
    assert config.decode.average_checkpoints == config.train.keep_checkpoints == 1


@pytest.mark.parametrize("scale", DIVISORS)
def test_smaller_rows_keep_their_ratios_to_the_first_row(scale: Scale) -> None:
    rows = load_rows("table3")
    smaller = scale_rows(rows, scale)
    base, small_base = rows["base"].config.model, smaller["base"].config.model
    for name in rows:
        for key in ("d_model", "d_ff", "d_k", "d_v", "num_heads", "num_layers"):
            ratio = getattr(rows[name].config.model, key) / getattr(base, key)
            small_ratio = getattr(smaller[name].config.model, key) / getattr(small_base, key)
            assert small_ratio == ratio, (name, key)


def test_a_smaller_row_keeps_its_ratio_to_the_base_width() -> None:
    wide = {"d_model": 1024, "d_ff": 4096, "num_heads": 16}
    rows = {"big": Row(Config().change(model=wide, train={"base_width": 512, "base_d_k": 64}))}
    train = scale_rows(rows, "tiny")["big"].config.train
    assert (train.base_width, train.base_d_k) == (64, 8)


def test_a_smaller_decoder_with_its_own_depth_keeps_its_ratio_to_the_encoder() -> None:
    rows = {"base": Row(Config().change(model={"num_layers": 12, "num_decoder_layers": 6}))}
    smaller = {scale: scale_rows(rows, scale)["base"].config.model for scale in DIVISORS}
    depths = {scale: model.layers_per_stack for scale, model in smaller.items()}
    assert depths == {"full": (12, 6), "half": (12, 6), "small": (6, 3), "tiny": (6, 3)}


@pytest.mark.parametrize("scale", DIVISORS)
@pytest.mark.parametrize("name", ["recurrence", "table3"])
def test_the_rows_of_a_sweep_are_valid_at_every_scale(name: str, scale: Scale) -> None:
    rows = load_rows(name)
    for key, row in scale_rows(rows, scale).items():
        model = row.config.model
        if scale == "full":
            assert row == rows[key]
        else:
            assert [model.d_model % 2, model.d_k % 2, model.d_v % 2] == [0, 0, 0]


def test_a_grid_has_a_row_for_each_combination() -> None:
    rows = grid_rows(Row(Config(), Paper(4.92)), ["model.num-heads=1,2", "train.clip_norm=None,1"])
    names = ["num_heads-1+clip_norm-None", "num_heads-1+clip_norm-1.0"]
    assert list(rows)[:2] == names
    assert len(rows) == 4
    values = [(row.config.model.num_heads, row.config.train.clip_norm) for row in rows.values()]
    assert values == [(1, None), (1, 1.0), (2, None), (2, 1.0)]
    # The paper's results are those of a single row, which is not part of the grid.
    assert all(row.paper == Paper() for row in rows.values())


def test_a_change_that_makes_two_different_rows_equal_is_rejected() -> None:
    rows = grid_rows(Row(Config()), ["model.d_k=8,16", "model.d_v=8,16"])
    rows["copy"] = rows["d_k-8+d_v-8"]
    check_distinct(rows, rows)
    changed = {name: Row(row.config.change(model={"d_k": 4})) for name, row in rows.items()}
    message = r"d_k-8\+d_v-8 and d_k-16\+d_v-8 would be equal: they differ only in model\.d_k, and"
    with pytest.raises(ConfigError, match=message):
        check_distinct(rows, changed)
    check_distinct(rows, {name: changed[name] for name in list(rows)[:2]})


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        (["model.d_k"], "a grid is FIELD=VALUE,VALUE"),
        (["model.d_k=8,"], "a grid is FIELD=VALUE,VALUE"),
        (["model.dk=8"], "unknown field 'dk' of the section model; did you mean 'd_k'"),
        (["modl.d_k=8"], "unknown field 'modl' of a config; did you mean 'model'"),
        (["model.d_k=8", "model.d-k=16"], r"the grid has the field model\.d_k twice"),
        (["train.seed=1,2"], r"train\.seed cannot be in a grid: each row has --seeds runs"),
        (["model.d_k=0"], r"model\.d_k must be"),
        (["model.d_k=8.5"], r"model\.d_k must be int"),
        (["model.d_k={[]:1}"], r"model\.d_k must be int, got '\{\[\]:1\}'"),
        (["model.d_k=[8]"], r"model\.d_k must be int, got '\[8\]'"),
        ([f"model.d_k={'-' * 5_000}1"], r"model\.d_k must be int"),
        ([f"model.d_k={'-' * 10_000}1"], r"model\.d_k must be int"),
        ([f"model.dropout=1{'0' * 400}"], r"model\.dropout must be at least 0 and below 1"),
        (
            [f"model.{x}={','.join(map(str, range(1, 201)))}" for x in ("d_ff", "d_k", "d_v")],
            "the grid has 8,000,000 combinations",
        ),
    ],
)
def test_a_mistake_in_a_grid_is_described(grid: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        grid_rows(Row(Config()), grid)


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ("train.learning_rate_scale", "2", 2.0),
        ("train.learning_rate_scale", "1e-3", 1e-3),
        ("model.num_heads", "2", 2),
        ("model.positions", "none", "none"),
        ("model.attention_bias", "true", True),
        ("train.clip_norm", "None", None),
        ("train.schedule", "cosine", "cosine"),
        ("data.folder", "2017", "2017"),
        ("data.folder", "True", "True"),
        ("data.folder", "none", None),
    ],
)
def test_text_becomes_a_value_of_the_fields_type(field: str, text: str, value: object) -> None:
    parsed = parse_value(field, text)
    assert (parsed, type(parsed)) == (value, type(value))
