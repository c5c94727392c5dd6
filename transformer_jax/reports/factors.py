"""Analyze a sweep whose rows are all combinations of the values of several fields.

A sweep with the fields A and B has three families of contrasts. A main effect is the difference
between two values of A, averaged over the values of B. A matched contrast is the same difference
for one value of B. An interaction is the difference between two matched contrasts. Each family has
simultaneous 95% intervals. As in the comparisons of rows, high-variance rows are not pooled with
the others. The first value of each field is its baseline.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
    comparison: seed_statistics.RowComparison
    """The estimate and its intervals. `interval` is simultaneous for all contrasts of the same
    kind. If a high-variance row has a weight other than 0, it is Welch's interval with a Bonferroni
    correction, or None if there are fewer than three seeds."""


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
    cells = [_cell(factors, configs[row]) for row in scores]
    return [
        Contrast(kind, name, comparison)
        for kind, weights in _list_weights(factors, cells).items()
        for name, comparison in _estimate(weights, scores).items()
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
    weights: Weights, scores: seed_statistics.Scores
) -> dict[str, seed_statistics.RowComparison]:
    """Estimate one family of contrasts between rows that all have the same seeds."""
    seeds = sorted(next(iter(scores.values())))
    table = np.array([[by_seed[seed] for seed in seeds] for by_seed in scores.values()])
    matrix = np.array(list(weights.values()))
    differences = (matrix @ table.mean(axis=1)).round(12).tolist()
    levels = seed_statistics.CONFIDENCE, 1 - (1 - seed_statistics.CONFIDENCE) / len(matrix)
    found = {}
    for name, row, difference in zip(weights, matrix.tolist(), differences, strict=True):
        welch = corrected = None
        if len(seeds) >= seed_statistics.MIN_WELCH_SEEDS:
            welch, corrected = (
                seed_statistics.welch_contrast(table.tolist(), row, level) for level in levels
            )
        found[name] = seed_statistics.RowComparison(difference, corrected, welch)
    high_variance = seed_statistics.find_high_variance(scores)
    is_similar = np.array([row not in high_variance for row in scores])
    is_pooled = ~np.any(matrix[:, ~is_similar], axis=1)
    similar = table[is_similar]
    freedom = (len(similar) - 1) * (len(seeds) - 1)
    if freedom < seed_statistics.MIN_FREEDOM or not is_pooled.any():
        return found
    residuals = similar - similar.mean(axis=1, keepdims=True) - similar.mean(axis=0)
    residuals += similar.mean()
    # Remove floating-point noise, which would matter if all differences were equal.
    deviation = round(math.sqrt(float((residuals**2).sum()) / freedom), 12)
    pooled = matrix[is_pooled]
    # All contrasts share the 5% error rate equally, as the rows do.
    intervals, _ = seed_statistics.simultaneous_intervals(
        list(itertools.compress(differences, is_pooled)),
        pooled @ pooled.T / len(seeds),
        deviation,
        freedom,
        share=len(pooled) / len(matrix),
    )
    names = itertools.compress(weights, is_pooled)
    for name, (interval, p) in zip(names, intervals, strict=True):
        found[name] = replace(found[name], interval=interval, p=p)
    return found
