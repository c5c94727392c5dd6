"""Every epoch has each pair once, whole; a batch depends on the seed and the step alone."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_jax.data.batches import (
    MAX_SHAPES,
    ROW_MULTIPLE,
    Batch,
    Batches,
    Ragged,
    bucket_edges,
)

Lengths = list[tuple[int, int]]
Pair = tuple[tuple[int, ...], tuple[int, ...]]

SHORT, ANY = st.integers(2, 5), st.integers(2, 40)
# Sides alike, and corpora of which one side is always the longer.
LENGTHS = st.sampled_from([(ANY, ANY), (SHORT, ANY), (ANY, SHORT)]).flatmap(
    lambda sides: st.lists(st.tuples(*sides), min_size=1, max_size=200)
)
BUDGETS = st.integers(1, 2000)
SEEDS = st.integers(0, 2**31 - 1)
EXAMPLES = settings(deadline=None, derandomize=True, max_examples=60)


def pairs_of(lengths: Lengths) -> list[Pair]:
    """Return pairs of these lengths that tell who they are: the pieces of pair i are i + 1."""
    return [((i,) * source, (-i,) * target) for i, (source, target) in enumerate(lengths, 1)]


def plan(lengths: Lengths, batch_tokens: int, seed: int = 0) -> Batches:
    source, target = (
        Ragged.of([list(side) for side in column])
        for column in zip(*pairs_of(lengths), strict=True)
    )
    return Batches(source, target, batch_tokens=batch_tokens, seed=seed)


def contents(batch: Batch) -> list[Pair]:
    """Return the pairs of a batch, and show that all else is padding, at the end."""
    found: list[Pair] = []
    for rows in zip(batch.source, batch.target, strict=True):
        source, target = (tuple(int(piece) for piece in row if piece) for row in rows)
        for row, kept in zip(rows, (source, target), strict=True):
            assert tuple(row) == kept + (0,) * (len(row) - len(kept))
        assert bool(source) is bool(target)
        if source:
            found.append((source, target))
    return found


def epoch(batches: Batches, number: int = 0) -> list[Pair]:
    first = number * batches.per_epoch
    return [
        pair for step in range(first, first + batches.per_epoch) for pair in contents(batches[step])
    ]


@given(LENGTHS, BUDGETS, SEEDS)
@EXAMPLES
def test_each_epoch_has_each_pair_once_and_whole(
    lengths: Lengths, batch_tokens: int, seed: int
) -> None:
    batches = plan(lengths, batch_tokens, seed)
    expected = Counter(pairs_of(lengths))
    assert Counter(epoch(batches, 0)) == expected
    assert Counter(epoch(batches, 1)) == expected


@given(LENGTHS, BUDGETS, SEEDS, st.data())
@EXAMPLES
def test_a_batch_is_the_same_whatever_was_asked_before(
    lengths: Lengths, batch_tokens: int, seed: int, data: st.DataObject
) -> None:
    batches = plan(lengths, batch_tokens, seed)
    steps = st.integers(0, 4 * batches.per_epoch)
    for step in data.draw(st.lists(steps, max_size=8)):
        again, fresh = batches[step], plan(lengths, batch_tokens, seed)[step]
        np.testing.assert_array_equal(again.source, fresh.source)
        np.testing.assert_array_equal(again.target, fresh.target)


def test_each_epoch_and_each_seed_has_an_order_of_its_own() -> None:
    lengths = [(2 + i % 7, 2 + i % 5) for i in range(200)]
    orders = [
        tuple(epoch(plan(lengths, 200, seed), number)) for seed in range(3) for number in range(3)
    ]
    assert len(set(orders)) == len(orders)
    # Who stands beside whom changes too, not only the order of the batches.
    first, second = (
        {frozenset(contents(plan(lengths, 200, seed)[step])) for step in range(4)}
        for seed in (0, 1)
    )
    assert not first & second


def test_short_and_long_batches_come_mixed() -> None:
    batches = plan([(length, length) for length in range(2, 34) for _ in range(8)], 100)
    widths = [batches[step].source.shape[1] for step in range(batches.per_epoch)]
    assert len(set(widths)) > 4
    assert widths not in (sorted(widths), sorted(widths, reverse=True))


@given(LENGTHS, BUDGETS)
@EXAMPLES
def test_batches_have_few_shapes_within_the_budget(lengths: Lengths, batch_tokens: int) -> None:
    batches = plan(lengths, batch_tokens)
    found = [batches[step] for step in range(batches.per_epoch)]
    shapes = Counter((*batch.source.shape, batch.target.shape[1]) for batch in found)
    planned: Counter[tuple[int, ...]] = Counter()
    for shape in batches.shapes:
        planned[shape.rows, shape.source, shape.target] += shape.batches
    assert shapes == +planned
    assert len(batches.shapes) <= MAX_SHAPES
    for batch in found:
        rows, width = batch.source.shape
        assert batch.target.shape[0] == rows
        assert rows % ROW_MULTIPLE == 0
        assert rows == ROW_MULTIPLE or rows * max(width, batch.target.shape[1]) <= batch_tokens
        assert batch.source.dtype == batch.target.dtype == np.int32


@given(LENGTHS, BUDGETS)
@EXAMPLES
def test_fill_is_the_share_of_positions_that_hold_tokens(
    lengths: Lengths, batch_tokens: int
) -> None:
    batches = plan(lengths, batch_tokens)
    sides = [side for step in range(batches.per_epoch) for side in batches[step]]
    tokens = sum(np.count_nonzero(side) for side in sides)
    assert batches.fill == pytest.approx(tokens / sum(side.size for side in sides))


def test_a_large_corpus_fills_its_batches() -> None:
    rng = np.random.default_rng(0)
    lengths = [(int(n), int(n + rng.integers(3))) for n in rng.integers(2, 60, 20_000)]
    batches = plan(lengths, 4000)
    assert batches.fill > 0.9
    tokens = [np.count_nonzero(batches[step].target) for step in range(batches.per_epoch)]
    assert 0.8 * 4000 < np.mean(tokens) <= 4000


def least_positions(lengths: list[int], buckets: int) -> int:
    """Return the fewest positions that so many buckets can have, by trying all."""
    distinct = sorted(set(lengths))
    return min(
        positions(lengths, [*inner, distinct[-1]])
        for inner in itertools.combinations(distinct[:-1], buckets - 1)
    )


def positions(lengths: list[int], edges: list[int]) -> int:
    return sum(min(edge for edge in edges if edge >= length) for length in lengths)


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=40)
    | st.lists(st.integers(1, 400), min_size=1, max_size=9),
    st.floats(0.3, 1.0),
)
@settings(deadline=None, derandomize=True, max_examples=300)
def test_buckets_are_as_few_as_are_good_and_placed_as_well_as_can_be(
    lengths: list[int], good: float
) -> None:
    edges = bucket_edges(np.array(lengths), good=good).tolist()
    assert edges == sorted(set(edges))
    assert set(edges) <= set(lengths)
    assert edges[-1] == max(lengths)
    assert positions(lengths, edges) == least_positions(lengths, len(edges))
    if len(edges) > 1:
        assert sum(lengths) < good * least_positions(lengths, len(edges) - 1)
    if len(edges) < len(set(lengths)):
        assert sum(lengths) >= good * positions(lengths, edges)


def test_there_are_never_more_buckets_than_programs_may_be_compiled() -> None:
    lengths = np.arange(1, 100)
    assert len(bucket_edges(lengths, good=1.0)) == MAX_SHAPES
    assert len(bucket_edges(lengths[:MAX_SHAPES], good=1.0)) == MAX_SHAPES
    assert len(bucket_edges(lengths[: MAX_SHAPES - 1], good=1.0)) == MAX_SHAPES - 1


@given(st.lists(st.lists(st.integers(1, 2**16 - 1))))
@settings(deadline=None, derandomize=True)
def test_ragged_sequences_come_back(sequences: list[list[int]]) -> None:
    ragged = Ragged.of(sequences, np.uint16)
    assert ragged.flat.dtype == np.uint16
    assert ragged.lengths.tolist() == [len(row) for row in sequences]
    width = max(map(len, sequences), default=0)
    rows = len(sequences) + 2
    block = ragged.padded(np.arange(len(sequences)), rows, width)
    assert block.shape == (rows, width)
    filled = [row + [0] * (width - len(row)) for row in sequences]
    assert block.tolist() == [*filled, [0] * width, [0] * width]
