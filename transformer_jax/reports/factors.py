"""Analyze a sweep whose rows are all combinations of the values of several fields.

A sweep with the fields A and B has three families of contrasts. A main effect is the difference
between two values of A, averaged over the values of B. A matched contrast is the same difference
for one value of B. An interaction is the difference between two matched contrasts. Each family has
simultaneous 95% intervals. The first value of each field is its baseline.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

import numpy as np
from jaxtyping import Float

from transformer_jax.config import Config
from transformer_jax.config.rows import FieldValue
from transformer_jax.reports import seed_statistics

Kind = Literal["main effect", "matched contrast", "interaction"]
Factors = Mapping[str, Sequence[FieldValue]]
"""The values of each field, keyed by the field's name, such as "model.d_k"."""


@dataclass(frozen=True)
class Contrast:
    """A weighted sum of row means, which is 0 if the fields have no such effect."""

    kind: Kind
    name: str
    difference: float
    interval: seed_statistics.Interval
    p: float
    """The p-value, corrected for all contrasts of the same kind."""


def find_factors(configs: Mapping[str, Config]) -> dict[str, list[FieldValue]] | None:
    """Return the values of each field, baseline first, if the rows are all their combinations."""
    base = next(iter(configs.values()))
    changed = {key for config in configs.values() for key in base.differences(config)}
    fields = map(".".join, sorted(changed - {("train", "seed")}))
    values = {x: list(dict.fromkeys(map(attrgetter(x), configs.values()))) for x in fields}
    cells = {_cell(values, config) for config in configs.values()}
    is_full = len(cells) == len(configs) == math.prod(map(len, values.values()))
    return values if len(values) > 1 and is_full else None


def analyze_factors(
    scores: seed_statistics.Scores, configs: Mapping[str, Config], factors: Factors
) -> list[Contrast]:
    """Return all contrasts, or [] unless all rows have the same seeds and at least two of them."""
    seeds = {frozenset(by_seed) for by_seed in scores.values()}
    if len(seeds) != 1 or len(scores) != len(configs) or len(next(iter(seeds))) < 2:
        return []
    order = sorted(next(iter(seeds)))
    table = np.array([[by_seed[seed] for seed in order] for by_seed in scores.values()])
    residuals = table - table.mean(axis=1, keepdims=True) - table.mean(axis=0) + table.mean()
    num_rows, num_seeds = table.shape
    freedom = (num_rows - 1) * (num_seeds - 1)
    # Remove floating-point noise, which would matter if all differences were equal.
    deviation = round(math.sqrt(float((residuals**2).sum()) / freedom), 12)
    cells = [_cell(factors, configs[row]) for row in scores]
    means = table.mean(axis=1)
    return [
        contrast
        for kind, weights in _list_weights(factors, cells).items()
        for contrast in _estimate(kind, weights, means, deviation / math.sqrt(num_seeds), freedom)
    ]


def _cell(factors: Factors, config: Config) -> tuple[FieldValue, ...]:
    return tuple(attrgetter(field)(config) for field in factors)


Weights = dict[str, Float[np.ndarray, " R"]]


def _list_weights(factors: Factors, cells: Sequence[tuple[FieldValue, ...]]) -> dict[Kind, Weights]:
    """Return the weights of the row means in each contrast, by kind and name."""
    names = [field.partition(".")[2] for field in factors]
    columns = [
        np.array([levels.index(cell[k]) for cell in cells])
        for k, levels in enumerate(factors.values())
    ]
    # For each field, list the contrasts between each later value and the first value.
    steps = [
        {
            f"{name} {level} - {levels[0]}": (column == number) * 1.0 - (column == 0)
            for number, level in enumerate(levels[1:], start=1)
        }
        for name, levels, column in zip(names, factors.values(), columns, strict=True)
    ]
    main: Weights = {}
    matched: Weights = {}
    interactions: Weights = {}
    for k, choices in enumerate(steps):
        others = [list(enumerate(x)) for i, x in enumerate(factors.values()) if i != k]
        labels = [x for i, x in enumerate(names) if i != k]
        for label, weights in choices.items():
            main[label] = weights / math.prod(map(len, others))
            for levels in itertools.product(*others):
                is_match = np.ones(len(cells), bool)
                rest = [x for i, x in enumerate(columns) if i != k]
                for column, (number, _) in zip(rest, levels, strict=True):
                    is_match &= column == number
                place = ", ".join(f"{x} {y}" for x, (_, y) in zip(labels, levels, strict=True))
                matched[f"{label} at {place}"] = weights * is_match
    for (i, first), (j, second) in itertools.combinations(enumerate(steps), 2):
        rest = math.prod(len(x) for k, x in enumerate(factors.values()) if k not in (i, j))
        for (a, u), (b, v) in itertools.product(first.items(), second.items()):
            interactions[f"({a}) x ({b})"] = u * v / rest
    return {"main effect": main, "matched contrast": matched, "interaction": interactions}


def _estimate(
    kind: Kind, weights: Weights, means: Float[np.ndarray, " R"], error: float, freedom: int
) -> list[Contrast]:
    """Estimate one family; `error` is the standard error of a row's mean, without seed effects."""
    matrix = np.array(list(weights.values()))
    scale = np.linalg.norm(matrix, axis=1)
    cosines = (matrix @ matrix.T / np.outer(scale, scale)).round(12)
    correlation = tuple(map(tuple, cosines.tolist()))
    critical = seed_statistics.dunnett_quantile(seed_statistics.CONFIDENCE, correlation, freedom)
    contrasts = []
    for name, difference, length in zip(weights, (matrix @ means).round(12), scale, strict=True):
        half = critical * error * length
        statistic = abs(difference) / (error * length) if error else math.inf if difference else 0.0
        interval = seed_statistics.Interval(float(difference - half), float(difference + half))
        p = 1 - seed_statistics.dunnett_probability(statistic, correlation, freedom)
        contrasts.append(Contrast(kind, name, float(difference), interval, p))
    return contrasts
