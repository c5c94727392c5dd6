"""A config refuses what cannot be meant, says why, and survives JSON."""

import ast
import dataclasses
import inspect
import itertools
import json
import math
import random
import string
import types
import typing
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_jax.config import Config, DataConfig, DecodeConfig, ModelConfig, TrainConfig
from transformer_jax.config import schema as config_module
from transformer_jax.errors import ConfigError

SECTIONS = (ModelConfig, DataConfig, TrainConfig, DecodeConfig)
FIELDS = [(kind, field.name) for kind in SECTIONS for field in dataclasses.fields(kind)]
KINDS = {(kind, key): typing.get_type_hints(kind)[key] for kind, key in FIELDS}

# The range of each number: the least and the greatest value allowed, then values beyond it.
Range = tuple[float, float, tuple[float, ...]]
INTEGER: Range = (1, 10**9, (0, -1))
REAL: Range = (1e-12, 1e12, (0.0, -1e-9, math.inf, math.nan))
WIDTH: Range = (1, 10**6, (0, -1, 10**6 + 1))
FRACTION: Range = (0.0, 0.999, (1.0, -1e-9, math.inf, math.nan))
RANGES: dict[str, Range] = {
    "num_layers": (1, 1000, (0, -1, 1001)),
    "d_model": (2, 499_998, (0, -2, 10**6 + 2)),
    "d_ff": WIDTH,
    "num_heads": WIDTH,
    "d_k": WIDTH,
    "d_v": WIDTH,
    "dropout": FRACTION,
    "attention_dropout": FRACTION,
    "activation_dropout": FRACTION,
    "layer_norm_epsilon": REAL,
    "max_relative_position": WIDTH,
    "max_positions": WIDTH,
    "max_length": (1, 10**6, (0, -1)),
    "num_pairs": (1, 500_000, (0, -1, 500_001)),
    "max_numbers_per_line": (1, 25, (0, -1, 301)),
    "max_digits": (5, 6, (0, 4, 7)),
    "vocab_size": (8, 1_000_000, (7, -8, 1_000_001)),
    "source_vocab_size": (8, 1_000_000, (7, -8, 1_000_001)),
    "max_ratio": (1.0, 1e12, (0.999, -1.0, math.inf, math.nan)),
    "batch_tokens": INTEGER,
    "steps": INTEGER,
    "warmup_steps": INTEGER,
    "learning_rate_scale": REAL,
    "adam_beta1": FRACTION,
    "adam_beta2": FRACTION,
    "adam_epsilon": REAL,
    "clip_norm": REAL,
    "label_smoothing": FRACTION,
    "gradient_accumulation_steps": INTEGER,
    "seed": (0, 2**31 - 1, (-1, 2**31)),
    "checkpoint_every": INTEGER,
    "bleu_every": INTEGER,
    "patience": INTEGER,
    "max_minutes_between_checkpoints": REAL,
    "keep_checkpoints": INTEGER,
    "log_every": INTEGER,
    "profile": (0, 10**9, (-1,)),
    "beam_size": INTEGER,
    "length_penalty_alpha": (0.0, 1e12, (-1e-9, math.inf, math.nan)),
    "max_extra_length": (0, 10**9, (-1,)),
    "average_checkpoints": INTEGER,
}


def parts_of(kind: Any) -> tuple[Any, ...]:
    """Return the types that a field's type allows."""
    return typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)


NUMBERS = [pair for pair in FIELDS if {int, float} & set(parts_of(KINDS[pair]))]


def values(pair: tuple[type, str]) -> st.SearchStrategy[Any]:
    """Draw what a field allows by itself."""
    kind, key = KINDS[pair], pair[1]
    if typing.get_origin(kind) is Literal:
        return st.sampled_from(typing.get_args(kind))
    if kind is bool:
        return st.booleans()
    optional = st.none() if types.NoneType in parts_of(kind) else st.nothing()
    if str in parts_of(kind):
        return st.text() | optional
    if tuple[str, str] in parts_of(kind):
        return st.tuples(st.text(), st.text()) | optional
    low, high, _ = RANGES[key]
    if int in parts_of(kind):
        return st.integers(int(low), int(high)) | optional
    return st.floats(low, high) | st.just(1 if high >= 1 else 0) | optional


@st.composite
def configs(draw: st.DrawFn) -> Config:
    """Draw a config that keeps all rules, also those between two fields."""
    drawn: dict[type, dict[str, Any]] = {kind: {} for kind in SECTIONS}
    for kind, key in FIELDS:
        drawn[kind][key] = draw(values((kind, key)))
    model, data, train, decode = (drawn[kind] for kind in SECTIONS)
    for key in ("d_model", "d_k"):
        model[key] += model[key] % 2
    if model["positions"] in ("rotary", "relative"):
        model["attention_score"] = "scaled_dot_product"
    if model["positions"] != "learned":
        model |= {"max_positions": None, "out_of_range_positions": "error"}
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
    most = 500_000 // data["max_numbers_per_line"]
    if digits is not None:
        most = min(most, 10**digits // 4 * data["max_numbers_per_line"] - 1500)
    data["num_pairs"] = min(data["num_pairs"], most)
    if data["source"] != "text":
        data |= dict.fromkeys(("train", "dev", "test"))
    return Config(
        ModelConfig(**model), DataConfig(**data), TrainConfig(**train), DecodeConfig(**decode)
    )


@given(configs())
@settings(deadline=None, derandomize=True, max_examples=150)
def test_json_gives_back_the_very_config(config: Config) -> None:
    restored = Config.from_dict(json.loads(json.dumps(config.to_dict())))
    assert restored == config
    # Equality takes 1 for 1.0; the words do not.
    assert repr(restored) == repr(config)


def test_json_gives_back_the_default_and_holds_every_field() -> None:
    stored = json.loads(json.dumps(Config().to_dict()))
    assert Config.from_dict(stored) == Config()
    assert {(name, key) for name, section in stored.items() for key in section} == {
        (kind.name, key) for kind, key in FIELDS
    }


def test_fields_left_out_have_their_defaults() -> None:
    assert Config.from_dict({}) == Config()
    changed = Config.from_dict({"model": {"num_heads": 4}})
    assert changed == dataclasses.replace(Config(), model=ModelConfig(num_heads=4))


@pytest.mark.parametrize("data", [None, 3, [], "model", {"model": []}, {"model": None}])
def test_what_is_no_object_of_sections_is_refused(data: Any) -> None:
    with pytest.raises(ConfigError, match="must be an object of sections"):
        Config.from_dict(data)


@pytest.mark.parametrize("name", ["self", "cls", "sections", "name", "__class__"])
def test_a_section_named_like_a_word_of_python_is_unknown(name: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown field '{name}' of config"):
        Config.from_dict({name: {}})


def wrong_values(kind: Any) -> list[object]:
    """Return values of types that a field must not take."""
    if typing.get_origin(kind) is Literal:
        return ["other", None, 3, [], True]
    allowed = parts_of(kind)
    wrong: list[object] = [[], {}, 1j, ("one",), ("one", 2), ("a", "b", "c")]
    wrong += [] if str in allowed else ["text"]
    wrong += [] if tuple[str, str] in allowed else [("a", "b")]
    wrong += [] if bool in allowed else [True, False]
    wrong += [0, 1] if allowed == (bool,) else []
    wrong += [] if float in allowed else [1.5]
    wrong += [] if types.NoneType in allowed else [None]
    return wrong


@pytest.mark.parametrize(("kind", "key"), FIELDS)
def test_a_wrong_type_is_told_with_its_field_and_value(kind: Any, key: str) -> None:
    for value in wrong_values(KINDS[kind, key]):
        with pytest.raises(ConfigError) as told:
            kind(**{key: value})
        message = str(told.value)
        assert message.startswith(f"{kind.name}.{key} must be ")
        assert f"got {value!r}" in message
        assert "\n" not in message


@pytest.mark.parametrize(("kind", "key"), NUMBERS)
def test_a_number_out_of_range_is_told_with_its_field_and_value(kind: Any, key: str) -> None:
    low, high, beyond = RANGES[key]
    whole = int in parts_of(KINDS[kind, key])
    for value in (low, high):
        assert getattr(kind(**{key: value}), key) == value
    for value in beyond:
        with pytest.raises(ConfigError) as told:
            kind(**{key: value})
        assert str(told.value).startswith(f"{kind.name}.{key} must be ")
        assert str(told.value).endswith(f"got {value!r}")
        assert isinstance(value, int) is whole  # or it would be refused for its type


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"model": {"d_model": 513}}, "model.d_model", "513"),
        ({"model": {"d_k": 0}}, "model.d_k", "0"),
        ({"model": {"positions": "concatenated_sinusoidal", "d_model": 7}}, "model.d_model", "7"),
        ({"model": {"positions": "rotary", "d_k": 15}}, "model.d_k", "15"),
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
        ({"model": {"positions": "learned", "max_positions": 255}}, "data.max_length", "256"),
        ({"data": {"train": ("a", "b")}}, "data.train", r"\('a', 'b'\)"),
        (
            {"data": {"num_pairs": 10, "max_numbers_per_line": 301}},
            "data.max_numbers_per_line",
            "301",
        ),
        ({"data": {"num_pairs": 166_667, "max_numbers_per_line": 3}}, "data.num_pairs", "166667"),
        ({"data": {"num_pairs": 23_501, "max_digits": 5}}, "data.num_pairs", "23501"),
        (
            {"data": {"num_pairs": 166_667, "max_numbers_per_line": 3, "max_digits": 6}},
            "data.num_pairs",
            "166667",
        ),
        ({"data": {"corpus": "tfds", "test": ("a", "b")}}, "data.test", r"\('a', 'b'\)"),
        ({"decode": {"average_checkpoints": 21}}, "decode.average_checkpoints", "21"),
        (
            {"decode": {"average_checkpoints": 2}, "train": {"keep_checkpoints": 1}},
            "decode.average_checkpoints",
            "2",
        ),
    ],
)
def test_what_cannot_be_together_is_refused(
    changes: dict[str, dict[str, Any]], field: str, value: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^{field} must be .*, got {value}$"):
        Config().change(**changes)


@pytest.mark.parametrize(
    "changes",
    [
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
        {"data": {"num_pairs": 23_500, "max_digits": 5}},
        {"data": {"num_pairs": 166_666, "max_numbers_per_line": 3, "max_digits": 6}},
        {"decode": {"average_checkpoints": 20}},
        {"model": {"dropout": 0.0}},
    ],
)
def test_what_can_be_together_is_allowed(changes: dict[str, dict[str, Any]]) -> None:
    changed = Config().change(**changes).to_dict()
    for name, section in changes.items():
        assert {key: changed[name][key] for key in section} == section


def test_change_leaves_all_else_and_the_first_config_as_they_were() -> None:
    base = Config()
    changed = base.change(model={"num_heads": 4}, train={"seed": 7})
    expected = Config().to_dict()
    expected["model"]["num_heads"], expected["train"]["seed"] = 4, 7
    assert changed.to_dict() == expected
    assert base == Config()


def typos(word: str) -> set[str]:
    """Return what one slip of a finger makes of a word."""
    places = range(len(word))
    letters = string.ascii_lowercase + "_"
    return (
        {word[:i] + word[i + 1 :] for i in places}
        | {word[:i] + word[i] + word[i:] for i in places}
        | {word[:i] + word[i + 1] + word[i] + word[i + 2 :] for i in places[:-1]}
        | {word[:i] + other + word[i + 1 :] for i, other in itertools.product(places, letters)}
    )


def test_a_slip_in_a_field_is_told_with_the_name_that_was_meant() -> None:
    names = {kind: {key for k, key in FIELDS if k is kind} for kind in SECTIONS}
    slips = [(kind, key, typo) for kind, key in FIELDS for typo in sorted(typos(key) - names[kind])]
    sample = random.Random(0).sample(slips, 600)
    missed: list[tuple[str, str]] = []
    for kind, key, typo in sample:
        with pytest.raises(ConfigError, match=rf"^unknown field '{typo}' of {kind.name}") as told:
            Config().change(**{kind.name: {typo: 1}})
        if not str(told.value).endswith(f"; did you mean {key!r}?"):
            missed.append((key, typo))
    # Some slips lie as near to another name: d_j is no nearer to d_k than to d_v.
    assert len(missed) <= 0.05 * len(sample), missed


def test_a_slip_in_a_section_is_told_with_the_name_that_was_meant() -> None:
    for name in (kind.name for kind in SECTIONS):
        for typo in sorted(typos(name) - {name}):
            with pytest.raises(ConfigError, match=f"'{typo}' of config; did you mean '{name}'"):
                Config().change(**{typo: {}})


def test_a_name_like_none_that_exists_gets_no_proposal() -> None:
    with pytest.raises(ConfigError, match=r"^unknown field 'zzzzzz' of model$"):
        Config().change(model={"zzzzzz": 1})


@pytest.mark.parametrize("kind", [*SECTIONS, Config])
def test_a_config_is_frozen_and_can_be_a_key(kind: Any) -> None:
    made = kind()
    for field in dataclasses.fields(kind):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(made, field.name, getattr(made, field.name))
    assert hash(made) == hash(kind())


@given(
    num_heads=st.integers(1, 8),
    d_k=st.integers(1, 8),
    d_v=st.integers(1, 8),
    d_model=st.sampled_from([2, 4, 8, 12, 16, 24]),
)
@settings(deadline=None, derandomize=True)
def test_a_note_appears_exactly_when_heads_times_width_differs_from_d_model(
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
    # Table 3, first row.
    assert (model.num_layers, model.d_model, model.d_ff) == (6, 512, 2048)
    assert (model.num_heads, model.d_k, model.d_v) == (8, 64, 64)
    assert (model.dropout, train.label_smoothing, train.steps) == (0.1, 0.1, 100_000)
    # Sections 3.2 and 3.5: what later code has and the paper has not.
    assert (model.attention_dropout, model.activation_dropout) == (0.0, 0.0)
    assert model.positions == "sinusoidal"
    assert model.attention_score == "scaled_dot_product"
    assert not model.attention_bias
    # Sections 3.1 and 3.4.
    assert (model.layer_norm, model.tie_embeddings) == ("post", "all")
    # Sections 5.1, 5.3 and 6.1.
    assert (config.data.vocab_size, config.data.batch_tokens) == (37_000, 25_000)
    assert (train.warmup_steps, train.learning_rate_scale, train.clip_norm) == (4000, 1.0, None)
    assert (train.adam_beta1, train.adam_beta2, train.adam_epsilon) == (0.9, 0.98, 1e-9)
    assert (decode.beam_size, decode.length_penalty_alpha, decode.max_extra_length) == (4, 0.6, 50)
    assert decode.length_penalty == "gnmt"
    assert config.warnings() == []


def test_every_field_has_words_for_the_help() -> None:
    tree = ast.parse(inspect.getsource(config_module))
    described = {
        (node.name, first.target.id)
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        for first, second in itertools.pairwise(node.body)
        if isinstance(first, ast.AnnAssign) and isinstance(first.target, ast.Name)
        if isinstance(second, ast.Expr) and isinstance(second.value, ast.Constant)
        if isinstance(second.value.value, str)
    }
    assert {(kind.__name__, key) for kind, key in FIELDS} <= described
