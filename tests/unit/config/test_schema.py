"""Test that errors explain invalid values, and that configs survive a round trip through JSON."""

import dataclasses
import itertools
import json
import random
import string
import types
import typing
from typing import Any, Literal

import pytest
from example_configs import FIELDS, KINDS, RANGES, SECTIONS, alternatives
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_jax.config import (
    Config,
    DataConfig,
    DecodeConfig,
    ModelConfig,
    Paper,
    Row,
    TrainConfig,
)
from transformer_jax.config.architectures import USED_BY
from transformer_jax.config.loading import load_config, load_rows, shipped_configs
from transformer_jax.config.schema import choose_num_shapes
from transformer_jax.config.sections import ADDED_POSITIONS, LASTING_SCHEDULES
from transformer_jax.errors import ConfigError


def values(pair: tuple[type, str]) -> st.SearchStrategy[Any]:
    """Return a Hypothesis strategy for values that satisfy the rules of a single field."""
    kind, key = KINDS[pair], pair[1]
    if typing.get_origin(kind) is Literal:
        return st.sampled_from(typing.get_args(kind))
    if kind is bool:
        return st.booleans()
    optional = st.none() if types.NoneType in alternatives(kind) else st.nothing()
    if str in alternatives(kind):
        return st.text() | optional
    if tuple[str, str] in alternatives(kind):
        return st.tuples(st.text(), st.text()) | optional
    if tuple[str, ...] in alternatives(kind):
        return st.lists(st.text(), max_size=3).map(tuple)
    low, high, _ = RANGES[key]
    if int in alternatives(kind):
        return st.integers(int(low), int(high)) | optional
    return st.floats(low, high) | st.just(1 if high >= 1 else 0) | optional


@st.composite
def configs(draw: st.DrawFn) -> Config:
    """Draw a config that satisfies all rules, including those that relate two fields."""
    drawn: dict[type, dict[str, Any]] = {kind: {} for kind in SECTIONS}
    for kind, key in FIELDS:
        drawn[kind][key] = draw(values((kind, key)))
    model, data, train, decode = (drawn[kind] for kind in SECTIONS)
    for key, architectures in USED_BY.items():
        if model["architecture"] not in architectures:
            model[key] = getattr(ModelConfig(), key)
    if model["architecture"] == "conv" and model["positions"] not in ADDED_POSITIONS:
        model["positions"] = "none"
    if model["attention_score"] == "none":
        model |= {"rnn_input_feeding": False, "attention_dropout": 0.0}
        if model["architecture"] != "rnn":
            model["attention_score"] = "general"
    for key in ("d_model", "d_k", "position_buckets"):
        model[key] += model[key] % 2
    if model["feed_forward"] != "mlp":
        model["activation"] = "relu"
    if model["dtype"] == "float64":
        model["dtype"] = "float32"
    if model["attention_implementation"] != "full":
        model |= {"positions": "sinusoidal", "attention_score": "dot_product"}
    if model["attention_window"] is not None:
        model |= {"positions": "none", "attention_implementation": "full"}
    if model["attention_implementation"] == "cudnn":
        model |= {"dtype": "bfloat16", "attention_dropout": 0.0, "d_k": 8, "d_v": 8}
    if model["positions"] in ("rotary", "relative"):
        model["attention_score"] = "scaled_dot_product"
    if model["positions"] != "learned":
        model |= {
            "max_positions": None,
            "out_of_range_positions": "error",
            "learned_positions_init": "normal",
        }
    table = model["max_positions"] if model["out_of_range_positions"] == "error" else None
    data["max_length"] = min(data["max_length"], model["max_length"], table or 10**6)
    decode["average_checkpoints"] = min(decode["average_checkpoints"], train["keep_checkpoints"])
    if (
        model["positions"] == "learned"
        and table is None
        and model["out_of_range_positions"] == "error"
    ):
        decode["max_extra_length"] %= 51
    digits = data["max_digits"]
    max_pairs = 500_000 // data["max_numbers_per_line"]
    if digits is not None and data["max_numbers_per_line"] > 1:
        max_pairs = min(max_pairs, 10**digits // 4 * data["max_numbers_per_line"] - 1500)
    data["num_pairs"] = min(data["num_pairs"], max_pairs)
    if data["corpus"] != "text":
        data |= dict.fromkeys(("train", "dev", "test"))
    if data["source_vocab_size"] is None:
        data["target_tokens"] = "subwords"
    if data["target_tokens"] == "words":
        data["bpe_dropout"] = 0.0
    if train["peak_learning_rate"] is not None:
        train["learning_rate_scale"] = 1
    if train["optimizer"] in ("adam", "adafactor"):
        train["weight_decay"] = 0.0
    if train["optimizer"] == "schedule_free":
        train |= {"schedule": "constant", "adam_beta1": 0.9, "ema_decay": None}
    is_known = train["optimizer"] in ("adam", "adamw", "lion")
    is_known &= model["positions"] not in ("relative", "t5")
    is_known &= model["attention_score"] == "scaled_dot_product"
    if not is_known or model["architecture"] != "transformer" or train["base_width"] is None:
        train |= {"base_width": None, "base_d_k": None}
    if train["schedule"] in LASTING_SCHEDULES:
        train["decay_steps"] = None
    else:
        train["steps"] += 1
        train["decay_steps"] = max(train["steps"], train["decay_steps"] or 2)
        train["warmup_steps"] = min(train["warmup_steps"], train["decay_steps"] - 1)
    return Config(
        ModelConfig(**model), DataConfig(**data), TrainConfig(**train), DecodeConfig(**decode)
    )


@given(configs())
@settings(deadline=None, derandomize=True, max_examples=30)
def test_a_config_is_unchanged_by_a_round_trip_through_json(config: Config) -> None:
    restored = Config.from_dict(json.loads(json.dumps(config.to_dict())))
    assert restored == config
    # Compare the representations too, because 1 == 1.0 in Python.
    assert repr(restored) == repr(config)


def test_the_json_of_the_default_config_has_every_field() -> None:
    stored = json.loads(json.dumps(Config().to_dict()))
    assert Config.from_dict(stored) == Config()
    assert {(name, key) for name, section in stored.items() for key in section} == {
        (kind.name, key) for kind, key in FIELDS
    }


def test_missing_fields_have_their_defaults() -> None:
    assert Config.from_dict({}) == Config()
    changed = Config.from_dict({"model": {"num_heads": 4}})
    assert changed == dataclasses.replace(Config(), model=ModelConfig(num_heads=4))


@pytest.mark.parametrize("data", [None, 3, [], "model", {"model": []}, {"model": None}])
def test_data_that_is_not_an_object_of_sections_is_rejected(data: Any) -> None:
    with pytest.raises(ConfigError, match="must be an object of sections"):
        Config.from_dict(data)


@pytest.mark.parametrize("name", ["self", "cls", "sections", "name", "__class__"])
def test_a_section_with_the_name_of_a_python_attribute_is_unknown(name: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown field '{name}' of config"):
        Config.from_dict({name: {}})


def test_a_dictionary_instead_of_a_section_is_reported_with_the_method_to_use() -> None:
    with pytest.raises(ConfigError, match=r"^model must be a ModelConfig, got {.*change\(model="):
        Config(model=typing.cast(ModelConfig, {"num_heads": 4}))


CONTRADICTIONS: list[tuple[dict[str, dict[str, Any]], str, str]] = [
    ({"model": {"d_model": 513}}, "model.d_model", "513"),
    ({"model": {"d_k": 0}}, "model.d_k", "0"),
    ({"model": {"positions": "concatenated_sinusoidal", "d_model": 7}}, "model.d_model", "7"),
    ({"model": {"positions": "rotary", "d_k": 15}}, "model.d_k", "15"),
    ({"model": {"positions": "t5", "position_buckets": 31}}, "model.position_buckets", "31"),
    (
        {"model": {"positions": "rotary", "attention_score": "general"}},
        "model.attention_score",
        "'general'",
    ),
    (
        {"model": {"positions": "relative", "attention_score": "additive"}},
        "model.attention_score",
        "'additive'",
    ),
    (
        {"model": {"attention_window": 4, "positions": "alibi"}},
        "model.positions",
        "'alibi'",
    ),
    (
        {"model": {"attention_window": 4, "attention_implementation": "blockwise"}},
        "model.attention_implementation",
        "'blockwise'",
    ),
    ({"model": {"architecture": "rnn", "d_ff": 512}}, "model.d_ff", "512"),
    ({"model": {"architecture": "rnn", "positions": "none"}}, "model.positions", "'none'"),
    ({"model": {"architecture": "rnn", "d_model": 513}}, "model.d_model", "513"),
    ({"model": {"architecture": "conv", "positions": "alibi"}}, "model.positions", "'alibi'"),
    ({"model": {"architecture": "conv", "num_heads": 4}}, "model.num_heads", "4"),
    ({"model": {"rnn_cell": "gru"}}, "model.rnn_cell", "'gru'"),
    ({"model": {"conv_kernel_width": 5}}, "model.conv_kernel_width", "5"),
    ({"model": {"attention_score": "none"}}, "model.attention_score", "'none'"),
    (
        {
            "model": {
                "architecture": "rnn",
                "attention_score": "none",
                "rnn_input_feeding": True,
            }
        },
        "model.rnn_input_feeding",
        "True",
    ),
    (
        {
            "model": {
                "architecture": "rnn",
                "attention_score": "none",
                "attention_dropout": 0.1,
            }
        },
        "model.attention_dropout",
        "0.1",
    ),
    ({"model": {"dropout": 1.0}}, "model.dropout", "1.0"),
    ({"data": {"max_length": 257}}, "data.max_length", "257"),
    ({"model": {"max_length": 255}}, "data.max_length", "256"),
    (
        {"model": {"positions": "learned"}, "decode": {"max_extra_length": 51}},
        "decode.max_extra_length",
        "51",
    ),
    ({"model": {"max_positions": 64}}, "model.max_positions", "64"),
    (
        {"model": {"positions": "none", "out_of_range_positions": "clamp"}},
        "model.out_of_range_positions",
        "'clamp'",
    ),
    (
        {"model": {"learned_positions_init": "sinusoids"}},
        "model.learned_positions_init",
        "'sinusoids'",
    ),
    (
        {
            "model": {
                "positions": "learned",
                "learned_positions_init": "sinusoids",
                "d_model": 513,
            }
        },
        "model.d_model",
        "513",
    ),
    ({"model": {"positions": "learned", "max_positions": 255}}, "data.max_length", "256"),
    ({"data": {"train": ("a", "b")}}, "data.train", r"\('a', 'b'\)"),
    (
        {"data": {"num_pairs": 10, "max_numbers_per_line": 301}},
        "data.max_numbers_per_line",
        "301",
    ),
    ({"data": {"num_pairs": 166_667, "max_numbers_per_line": 3}}, "data.num_pairs", "166667"),
    (
        {"data": {"num_pairs": 48_501, "max_numbers_per_line": 2, "max_digits": 5}},
        "data.num_pairs",
        "48501",
    ),
    (
        {"data": {"num_pairs": 166_667, "max_numbers_per_line": 3, "max_digits": 6}},
        "data.num_pairs",
        "166667",
    ),
    ({"data": {"corpus": "tfds", "test": ("a", "b")}}, "data.test", r"\('a', 'b'\)"),
    ({"decode": {"average_checkpoints": 21}}, "decode.average_checkpoints", "21"),
    ({"train": {"base_d_k": 8}}, "train.base_d_k", "8"),
    ({"train": {"base_width": 8, "optimizer": "muon"}}, "train.base_width", "8"),
    ({"train": {"base_width": 8}, "model": {"positions": "t5"}}, "train.base_width", "8"),
    (
        {"train": {"base_width": 8}, "model": {"attention_score": "dot_product"}},
        "train.base_width",
        "8",
    ),
    ({"train": {"base_width": 8}, "model": {"architecture": "rnn"}}, "train.base_width", "8"),
    (
        {"decode": {"average_checkpoints": 2}, "train": {"keep_checkpoints": 1}},
        "decode.average_checkpoints",
        "2",
    ),
]


def test_values_that_contradict_each_other_are_rejected() -> None:
    for changes, field, value in CONTRADICTIONS:
        with pytest.raises(ConfigError, match=rf"^{field} must be .*, got {value}$"):
            Config().change(**changes)


VALID_COMBINATIONS: list[dict[str, dict[str, Any]]] = [
    {"model": {"positions": "learned", "d_model": 513}},
    {"model": {"positions": "none", "d_model": 513}},
    {"model": {"positions": "alibi", "d_model": 513, "attention_score": "additive"}},
    {"model": {"positions": "relative", "d_k": 15, "attention_score": "dot_product"}},
    {"model": {"positions": "rotary"}, "decode": {"max_extra_length": 51}},
    {"model": {"tie_embeddings": "all"}, "data": {"source_vocab_size": 100}},
    {"model": {"positions": "learned"}, "decode": {"max_extra_length": 50}},
    {"decode": {"max_extra_length": 51}},
    {
        "model": {"positions": "learned", "out_of_range_positions": "clamp"},
        "decode": {"max_extra_length": 51},
    },
    {"model": {"positions": "learned", "max_positions": 256}},
    {"model": {"positions": "learned", "max_positions": 8, "out_of_range_positions": "clamp"}},
    {"model": {"max_length": 257}, "data": {"max_length": 257}},
    {"data": {"corpus": "text", "train": ["a", "b"], "dev": None}},
    {"data": {"num_pairs": 166_666, "max_numbers_per_line": 3}},
    {"data": {"num_pairs": 1, "max_numbers_per_line": 300}},
    {"data": {"num_pairs": 48_500, "max_numbers_per_line": 2, "max_digits": 5}},
    {"data": {"num_pairs": 500_000, "max_digits": 5}},
    {"data": {"num_pairs": 166_666, "max_numbers_per_line": 3, "max_digits": 6}},
    {"decode": {"average_checkpoints": 20}},
    {"model": {"dropout": 0.0}},
    {"model": {"architecture": "rnn", "attention_score": "none", "rnn_cell": "gru"}},
    {"model": {"architecture": "conv", "positions": "learned", "conv_kernel_width": 4}},
]


def test_unusual_but_valid_combinations_are_allowed() -> None:
    for changes in VALID_COMBINATIONS:
        changed = Config().change(**changes).to_dict()
        for name, section in changes.items():
            assert {key: changed[name][key] for key in section} == section


def test_change_alters_only_the_given_fields_and_not_the_original() -> None:
    base = Config()
    changed = base.change(model={"num_heads": 4}, train={"seed": 7})
    expected = Config().to_dict()
    expected["model"]["num_heads"], expected["train"]["seed"] = 4, 7
    assert changed.to_dict() == expected
    assert base == Config()


def typos(word: str) -> set[str]:
    """Return every word that differs from the given word by a single typo."""
    indices = range(len(word))
    letters = string.ascii_lowercase + "_"
    return (
        {word[:i] + word[i + 1 :] for i in indices}
        | {word[:i] + word[i] + word[i:] for i in indices}
        | {word[:i] + word[i + 1] + word[i] + word[i + 2 :] for i in indices[:-1]}
        | {word[:i] + other + word[i + 1 :] for i, other in itertools.product(indices, letters)}
    )


def test_a_misspelled_field_is_reported_with_the_right_name() -> None:
    names = {kind: {key for k, key in FIELDS if k is kind} for kind in SECTIONS}
    mistakes = [(kind, key, t) for kind, key in FIELDS for t in sorted(typos(key) - names[kind])]
    sample = random.Random(0).sample(mistakes, 600)
    missed: list[tuple[str, str]] = []
    for kind, key, typo in sample:
        with pytest.raises(ConfigError, match=rf"^unknown field '{typo}' of {kind.name}") as caught:
            Config().change(**{kind.name: {typo: 1}})
        if not str(caught.value).endswith(f"; did you mean {key!r}?"):
            missed.append((key, typo))
    # Some typos are equally close to two names: d_j is as close to d_v as to d_k.
    assert len(missed) <= 0.05 * len(sample), missed


def test_a_misspelled_section_is_reported_with_the_right_name() -> None:
    for name in (kind.name for kind in SECTIONS):
        for typo in sorted(typos(name) - {name}):
            with pytest.raises(ConfigError, match=f"'{typo}' of config; did you mean '{name}'"):
                Config().change(**{typo: {}})


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (ModelConfig, {"num_head": 4}, "'num_head' of model; did you mean 'num_heads'?"),
        (Config, {"modle": 1}, "'modle' of Config; did you mean 'model'?"),
        (Row, {"config": 5}, "the config of a row must be a Config, got int"),
        (Row, {"config": Config(), "paper": 4.92}, "the paper of a row must be a Paper, got float"),
        (Paper, {"belu": 27.3}, "'belu' of Paper; did you mean 'bleu'?"),
    ],
)
def test_a_constructor_reports_a_mistake_in_one_line(kind: Any, fields: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        kind(**fields)
    assert str(caught.value).removeprefix("unknown field ") == message


def test_a_name_without_similar_ones_gets_no_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"^unknown field 'zzzzzz' of model$"):
        Config().change(model={"zzzzzz": 1})


def test_a_name_that_is_not_a_string_is_reported() -> None:
    fields: dict[Any, int] = {1: 2}
    with pytest.raises(ConfigError, match=r"^unknown field 1 of model$"):
        Config().change(model=fields)
    with pytest.raises(ConfigError, match=r"^unknown field '1' of config$"):
        Config().with_fields(fields)


@pytest.mark.parametrize("kind", [*SECTIONS, Config])
def test_a_config_is_frozen_and_hashable(kind: Any) -> None:
    config = kind()
    for field in dataclasses.fields(kind):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, field.name, getattr(config, field.name))
    assert hash(config) == hash(kind())


def test_a_number_of_pairs_that_the_corpus_does_not_use_is_noted() -> None:
    config = Config().change(data={"corpus": "trees", "num_pairs": 7})
    assert config.warnings() == ["note: data.corpus trees does not use data.num_pairs"]
    numbers = config.change(data={"corpus": "number_words"})
    assert numbers.warnings() == []


@given(
    num_heads=st.integers(1, 8),
    d_k=st.integers(1, 8),
    d_v=st.integers(1, 8),
    d_model=st.sampled_from([2, 4, 8, 12, 16, 24]),
)
@settings(deadline=None, derandomize=True)
def test_a_warning_appears_exactly_if_heads_times_width_differs_from_d_model(
    num_heads: int, d_k: int, d_v: int, d_model: int
) -> None:
    widths = {"num_heads": num_heads, "d_k": d_k, "d_v": d_v, "d_model": d_model}
    notes = Config().change(model=widths).warnings()
    differing = [key for key in ("d_k", "d_v") if num_heads * widths[key] != d_model]
    assert [note.split()[3] for note in notes] == differing
    for key, note in zip(differing, notes, strict=True):
        assert str(num_heads * widths[key]) in note
        assert str(d_model) in note


def test_the_defaults_are_the_papers_base_model() -> None:
    config = Config()
    model, train, decode = config.model, config.train, config.decode
    # These values are from the first row of Table 3.
    assert (model.num_layers, model.d_model, model.d_ff) == (6, 512, 2048)
    assert (model.num_heads, model.d_k, model.d_v) == (8, 64, 64)
    assert (model.dropout, train.label_smoothing, train.steps) == (0.1, 0.1, 100_000)
    # See sections 3.2 and 3.5. The paper does not apply dropout to attention weights or
    # activations.
    assert (model.attention_dropout, model.activation_dropout) == (0.0, 0.0)
    assert model.positions == "sinusoidal"
    assert model.attention_score == "scaled_dot_product"
    assert not model.attention_bias
    # See sections 3.1 and 3.4.
    assert (model.layer_norm, model.tie_embeddings) == ("post", "all")
    # See sections 5.1, 5.3, and 6.1.
    assert (config.data.vocab_size, config.data.batch_tokens) == (37_000, 25_000)
    assert (train.warmup_steps, train.learning_rate_scale, train.clip_norm) == (4000, 1.0, None)
    assert (train.adam_beta1, train.adam_beta2, train.adam_epsilon) == (0.9, 0.98, 1e-9)
    assert (decode.beam_size, decode.length_penalty_alpha, decode.max_extra_length) == (4, 0.6, 50)
    assert decode.length_penalty == "gnmt"
    assert config.warnings() == []


@pytest.mark.parametrize(
    ("batch_tokens", "warmup_steps", "described"),
    [
        (25_000, 4000, None),
        (25_000, 1000, None),
        (25_000, 16_000, None),
        (25_000, 999, "25.0 M tokens (data.batch_tokens 25,000 x train.warmup_steps 999)"),
        (25_000, 16_001, "400.0 M tokens"),
        (512, 4000, "2.0 M tokens"),
    ],
)
def test_a_warmup_unlike_the_papers_is_worth_a_warning(
    batch_tokens: int, warmup_steps: int, described: str | None
) -> None:
    data, train = {"batch_tokens": batch_tokens}, {"warmup_steps": warmup_steps}
    warning = Config().change(data=data, train=train).describe_warmup()
    assert (warning is None) == (described is None)
    assert described is None or f"warmup covers {described}" in str(warning)
    # A config that also changes the learning-rate scale does not trigger the warning.
    train["learning_rate_scale"] = 2
    assert Config().change(data=data, train=train).describe_warmup() is None


def test_no_shipped_config_has_a_warmup_that_is_worth_a_warning() -> None:
    for file in sorted(shipped_configs().glob("*.py")):
        for name, row in load_rows(str(file)).items():
            assert row.config.describe_warmup() is None, (file, name)


def test_an_experiment_cannot_use_float64() -> None:
    with pytest.raises(ConfigError, match=r"model.dtype must be float32 or bfloat16 \(float64 is"):
        Config().change(model={"dtype": "float64"})


@pytest.mark.parametrize(("steps", "shapes"), [(1, 2), (1000, 2), (8000, 4), (100_000, 12)])
def test_a_longer_run_of_the_recipe_has_more_shapes(steps: int, shapes: int) -> None:
    assert choose_num_shapes(load_config("multi30k").change(train={"steps": steps})) == shapes


def test_a_larger_model_or_batch_has_more_shapes() -> None:
    small = Config().change(model={"num_layers": 1}, train={"steps": 1000})
    base = Config().change(train={"steps": 1000})
    large = base.change(data={"batch_tokens": 100_000})
    assert choose_num_shapes(small) < choose_num_shapes(base) < choose_num_shapes(large)
    gated = base.change(model={"feed_forward": "swiglu", "d_ff": 20_000})
    assert choose_num_shapes(gated) > choose_num_shapes(base.change(model={"d_ff": 20_000}))


def test_a_number_of_shapes_in_the_config_is_kept() -> None:
    config = Config().change(data={"max_batch_shapes": 3})
    assert config.with_batch_shapes() == config.with_batch_shapes(5) == config
    assert Config().with_batch_shapes().data.max_batch_shapes == choose_num_shapes(Config()) == 12
    assert Config().with_batch_shapes(5).data.max_batch_shapes == 5
