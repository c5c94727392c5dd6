"""Test that fields reject values that break their rules, and that errors suggest valid names."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import pytest

from transformer_jax.config.validation import (
    ON_INIT_FROM,
    ON_RESUME,
    POSITIVE,
    PROBABILITY,
    ConfigSection,
    Rule,
    at_least,
    between,
    check_field_name,
    did_you_mean,
    field_names,
    marked,
)
from transformer_jax.errors import ConfigError


@dataclass(frozen=True)
class Example(ConfigSection):
    """A config section with one field of each kind."""

    count: Annotated[int, between(1, 9)] = 1
    rate: Annotated[float | None, POSITIVE, at_least(2)] = None
    files: tuple[str, str] | None = None
    names: tuple[str, ...] = ()
    free: Annotated[int, ON_RESUME] = 0
    mode: Annotated[Literal["fast", "slow"], ON_INIT_FROM, ON_RESUME] = "fast"

    name = "example"


@pytest.mark.parametrize(
    ("rule", "allowed", "rejected", "words"),
    [
        (between(1, 9), (1, 9), (0, 10), "from 1 to 9"),
        (at_least(2), (2, 1e38), (1.9, 1e39, math.inf, 10**400), "at least 2 and finite"),
        (POSITIVE, (2e-38, 3e38), (0, 1e-39, 1e39, -1, math.inf), "positive and finite in float32"),
        (PROBABILITY, (0, 1 - 2**-24), (-0.1, 1 - 1e-8, 1), "at least 0 and below 1 in float32"),
    ],
    ids=["between", "at_least", "positive", "probability"],
)
def test_a_rule_accepts_its_range_and_rejects_nan(
    rule: Rule, allowed: tuple[float, ...], rejected: tuple[float, ...], words: str
) -> None:
    assert all(rule.allows(value) for value in allowed)
    assert not any(rule.allows(value) for value in (*rejected, math.nan))
    assert rule.words == words


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("count", 10, "from 1 to 9"),
        ("count", True, "int"),
        ("count", None, "int"),
        ("rate", -1.0, "positive and finite in float32"),
        ("rate", 1, "at least 2 and finite"),
        ("rate", "1", "float or None"),
        ("files", ("a",), "a pair of strings or None"),
        ("names", ("a", 1), "strings"),
        ("names", "a", "strings"),
        ("names", ("a", "a\udcff"), "UTF-8"),
        ("files", ("a\udcff.en", "a"), "UTF-8"),
        ("mode", "sloww", "one of 'fast', 'slow'"),
    ],
)
def test_a_section_rejects_values_that_break_a_type_or_a_rule(
    field: str, value: object, rule: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Example(**{field: value})  # type: ignore[arg-type]
    advice = "; did you mean 'slow'?" if field == "mode" else ""
    assert str(caught.value) == f"example.{field} must be {rule}, got {value!r}{advice}"


def test_rules_do_not_restrict_none_or_other_fields() -> None:
    assert Example(rate=None, files=None, free=-(10**9)).free == -(10**9)
    assert Example(rate=2, files=("a", "b")).files == ("a", "b")


def test_the_closest_name_is_suggested_if_there_is_a_similar_one() -> None:
    assert field_names(Example) == ["count", "rate", "files", "names", "free", "mode"]
    assert did_you_mean("cuont", field_names(Example)) == "; did you mean 'count'?"
    assert did_you_mean("zzzzzz", field_names(Example)) == ""
    check_field_name("count", field_names(Example), "example")
    with pytest.raises(ConfigError, match=r"^unknown field 'cuont' of example; did you mean 'co"):
        check_field_name("cuont", field_names(Example), "example")


def test_marks_select_the_fields_that_may_change() -> None:
    assert marked(Example, ON_RESUME) == {"free", "mode"}
    assert marked(Example, ON_INIT_FROM) == {"mode"}
