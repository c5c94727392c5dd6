"""Apply the same change to all rows in an ablation, while preserving the differences between rows.

To keep the command line fast, this module imports only `config` and `errors` from this package.
"""

import ast
import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from transformer_jax.config import Config, Row
from transformer_jax.config.architectures import uses
from transformer_jax.config.validation import annotations, check_field_name
from transformer_jax.errors import ConfigError

Scale = Literal["full", "half", "small", "tiny"]
# Each scale divides the model's width and depth by these numbers.
DIVISORS: dict[Scale, tuple[int, int]] = {
    "full": (1, 1),
    "half": (2, 1),
    "small": (4, 2),
    "tiny": (8, 2),
}
CONTROL = "control"
MAX_ROWS = 10_000
WIDTHS = ("d_model", "d_ff", "d_k", "d_v")
BASE_WIDTHS = ("base_width", "base_d_k")
DEPTHS = ("num_layers", "num_decoder_layers")
FieldValue = bool | int | float | str | None


def split_field(name: str) -> tuple[str, str]:
    """Return the section and the key of a field such as "model.d_k"."""
    section, _, key = name.replace("-", "_").partition(".")
    sections = annotations(Config)
    check_field_name(section, list(sections), "a config")
    check_field_name(key, list(annotations(sections[section][0])), f"the section {section}")
    return section, key


def parse_value(field: str, text: str) -> FieldValue:
    """Convert text to a value for a field, such as 0.5, True, None, or "learned"."""
    form = _field_type(field)
    value: FieldValue = text
    if form == str | None:
        value = None if text.lower() == "none" else text
    elif form is not str and text not in getattr(form, "__args__", ()):
        named = {"true": True, "false": False, "none": None}
        # `literal_eval` raises the last three for "{[]: 1}" and for thousands of signs.
        errors = (ValueError, SyntaxError, TypeError, MemoryError, RecursionError)
        with contextlib.suppress(*errors):
            found = named[text.lower()] if text.lower() in named else ast.literal_eval(text)
            # The name of a row contains its values, so do not accept lists.
            value = found if isinstance(found, FieldValue) else text
    return normalize_value(field, value)


def normalize_value(field: str, value: FieldValue) -> FieldValue:
    """Return a field's value; convert an integer to a float if the field can be a float.

    The name of a row contains its values, so equal values must have the same form.
    """
    form = _field_type(field)
    is_real = form is float or float in getattr(form, "__args__", ())
    # If an integer is too large for a float, the field's rule rejects it.
    with contextlib.suppress(OverflowError):
        value = float(value) if is_real and type(value) is int else value
    return value


def _field_type(field: str) -> object:
    section, key = split_field(field)
    return annotations(annotations(Config)[section][0])[key][0]


def grid_rows(row: Row, grid: Sequence[str]) -> dict[str, Row]:
    """Return a row for each combination of values, such as "model.d_k=8,16,32"."""
    choices: dict[str, list[FieldValue]] = {}
    for item in grid:
        name, equals, values = item.partition("=")
        if not equals or "" in values.split(","):
            raise ConfigError(f"a grid is FIELD=VALUE,VALUE, such as model.d_k=8,16, got {item!r}")
        field = ".".join(split_field(name))
        if field in choices:
            raise ConfigError(f"the grid has the field {field} twice")
        if field == "train.seed":
            raise ConfigError("train.seed cannot be in a grid: each row has --seeds runs")
        choices[field] = list(dict.fromkeys(parse_value(name, x) for x in values.split(",")))
    if (count := math.prod(map(len, choices.values()))) > MAX_ROWS:
        raise ConfigError(f"the grid has {count:,} combinations, but the maximum is {MAX_ROWS:,}")
    rows: dict[str, Row] = {}
    for values in itertools.product(*choices.values()):
        changes = dict(zip(choices, values, strict=True))
        name = "+".join(f"{field.partition('.')[2]}-{x}" for field, x in changes.items())
        rows[name] = Row(row.config.with_fields(changes))
    return rows


def check_distinct(before: Mapping[str, Row], after: Mapping[str, Row]) -> None:
    """Raise a ConfigError if the same changes made two different rows equal.

    Args:
        before: all rows before the changes.
        after: the rows to train, with the changes.
    """
    names: dict[Config, str] = {}
    for name, row in after.items():
        other = names.setdefault(row.config, name)
        if fields := before[other].config.differences(before[name].config):
            named = ", ".join(".".join(field) for field in fields)
            raise ConfigError(
                f"rows {other} and {name} would be equal: they differ only in {named}, and an "
                "option sets the same value in all rows"
            )


def with_control(rows: Mapping[str, Row]) -> dict[str, Row]:
    """Add a negative control to a sweep: a copy of the first row, named "control"."""
    control = Row(next(iter(rows.values())).config, is_control=True)
    if rows.get(CONTROL, control) != control:
        raise ConfigError(f"a sweep with a control cannot have another row named {CONTROL!r}")
    return {**rows, CONTROL: control}


def with_sections(
    rows: Mapping[str, Row], sections: Mapping[str, Config], first: Row | None = None
) -> dict[str, Row]:
    """Replace config sections such as "data" in all rows with sections from other configs.

    Each row keeps the values that differ from those of `first`, which defaults to the first row.
    Raise ConfigError if a resulting config is invalid.
    """
    base = (first or next(iter(rows.values()))).config

    def replace_sections(row: Row) -> Row:
        differences = base.differences(row.config)
        fields = {
            section: {
                **other.to_dict()[section],
                **{key: value for (s, key), (_, value) in differences.items() if s == section},
            }
            for section, other in sections.items()
        }
        if "train" in fields:
            # Preserve the ratio of this row's training steps to those of the first row.
            ratio = row.config.train.steps / base.train.steps
            fields["train"]["steps"] = max(1, round(ratio * sections["train"].train.steps))
        return dataclasses.replace(row, config=row.config.change(**fields))

    return {name: replace_sections(row) for name, row in rows.items()}


def scale_rows(rows: Mapping[str, Row], scale: Scale) -> dict[str, Row]:
    """Shrink the models of all rows while preserving the ratios between rows.

    Widths are divided by the scale's width divisor and rounded up to even numbers, as sinusoids and
    rotary positions require. Depths are divided by the scale's depth divisor and rounded up. The
    number of heads does not change.
    """
    width_divisor, depth_divisor = DIVISORS[scale]

    def divide(section: Mapping[str, Any], widths: Iterable[str]) -> dict[str, int]:
        if width_divisor == 1:
            return {}
        return {key: 2 * -(-section[key] // (2 * width_divisor)) for key in widths if section[key]}

    def shrink(row: Row) -> Row:
        model, train = (row.config.to_dict()[section] for section in ("model", "train"))
        depths = {key: -(-model[key] // depth_divisor) for key in DEPTHS if model[key]}
        widths = divide(model, [key for key in WIDTHS if uses(row.config.model, key)])
        changes = {"model": {**depths, **widths}, "train": divide(train, BASE_WIDTHS)}
        return dataclasses.replace(row, config=row.config.change(**changes))

    return {name: shrink(row) for name, row in rows.items()}
