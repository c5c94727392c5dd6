"""Every epoch has each pair once, whole; a batch depends on the seed and the step alone."""

import itertools
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_jax.data.batches import (
    MAX_BUCKETS,
    ROW_MULTIPLE,
    Batch,
    Batches,
    Ragged,
    Shard,
    _PaddingCost,
    bucket_sizes,
    first_fitting,
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
    for shape in batches.buckets:
        planned[shape.rows, shape.source, shape.target] += shape.batches
    assert shapes == +planned
    assert len(batches.buckets) <= MAX_BUCKETS
    for batch in found:
        rows, width = batch.source.shape
        assert batch.target.shape[0] == rows
        assert rows % ROW_MULTIPLE == 0
        # A budget that has no room for the fewest rows is passed: sentences are never cut.
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
    assert batches.density == pytest.approx(tokens / sum(side.size for side in sides))


@given(LENGTHS, BUDGETS)
@EXAMPLES
def test_rows_are_dealt_out_evenly_over_as_few_batches_as_have_room(
    lengths: Lengths, batch_tokens: int
) -> None:
    batches = plan(lengths, batch_tokens)
    dealt: dict[tuple[int, ...], list[int]] = {}
    for step in range(batches.per_epoch):
        batch = batches[step]
        shape = (*batch.source.shape, batch.target.shape[1])
        dealt.setdefault(shape, []).append(len(contents(batch)))
    widths = [shape[1:] for shape in dealt]
    for (rows, *width), pairs in dealt.items():
        assert rows - ROW_MULTIPLE < max(pairs) <= rows
        room = max(ROW_MULTIPLE, batch_tokens // max(width) // ROW_MULTIPLE * ROW_MULTIPLE)
        assert len(pairs) == -(-sum(pairs) // room)
        assert max(pairs) - min(pairs) <= 1
    assert len(widths) == len(set(widths)) == len(batches.buckets)


def like_text(pairs: int) -> np.ndarray:
    """Return lengths as of sentences and their translations: alike, seldom long, never equal."""
    rng = np.random.default_rng(0)
    source = rng.gamma(5.0, 28 / 5, pairs)
    target = source * rng.lognormal(0.05, 0.1, pairs)
    return np.clip(np.stack([source, target], axis=1).round().astype(int) + 1, 2, 256)


def test_a_large_corpus_fills_its_batches() -> None:
    sides = (
        Ragged(np.ones(side.sum(), np.uint16), np.concatenate([[0], np.cumsum(side)]))
        for side in like_text(50_000).T
    )
    batches = Batches(*sides, batch_tokens=25_000, seed=0)
    assert batches.density >= 0.88
    found = [batches[step] for step in range(batches.per_epoch)]
    for side in zip(*found, strict=True):
        tokens = [np.count_nonzero(block) for block in side]
        assert 0.75 * 25_000 < np.mean(tokens) <= 25_000


def positions(lengths: np.ndarray, sizes: np.ndarray) -> int:
    """Return how many positions these pairs take, each in the cheapest bucket with room."""
    fits = (lengths[:, None, :] <= sizes).all(axis=2)
    return int(np.where(fits, sizes.sum(axis=1), np.iinfo(int).max).min(axis=1).sum())


def all_sets_of(sizes: list[tuple[int, int]], count: int) -> Iterator[np.ndarray]:
    """Yield every set of so many buckets that has the last one, which has room for all."""
    for inner in itertools.combinations(sizes[:-1], count - 1):
        yield np.asarray([*inner, sizes[-1]])


GOOD = st.floats(0.3, 1.0)
SEARCHES = settings(deadline=None, derandomize=True, max_examples=150)


@given(LENGTHS.map(np.asarray), GOOD)
@SEARCHES
def test_buckets_have_room_for_all_and_none_is_idle(lengths: np.ndarray, good: float) -> None:
    sizes = bucket_sizes(lengths, good=good)
    assert 1 <= len(sizes) <= MAX_BUCKETS
    assert len(np.unique(sizes, axis=0)) == len(sizes)
    assert (np.diff(sizes.sum(axis=1)) >= 0).all()
    for side in (0, 1):
        assert set(sizes[:, side]) <= set(lengths[:, side])
    bucket = first_fitting(lengths, sizes)
    assert set(bucket) == set(range(len(sizes)))
    assert (lengths <= sizes[bucket]).all()
    # The first with room is the cheapest with room.
    assert sizes[bucket].sum() == positions(lengths, sizes)
    np.testing.assert_array_equal(bucket_sizes(lengths, good=good), sizes)


@given(LENGTHS.map(np.asarray), GOOD)
@SEARCHES
def test_buckets_are_never_worse_than_those_of_the_longer_side_or_than_greedy_ones(
    lengths: np.ndarray, good: float
) -> None:
    sizes = bucket_sizes(lengths, good=good)
    ours = positions(lengths, sizes)
    assert ours <= positions(lengths, np.asarray(_PaddingCost(lengths).greedy(good)))
    longer = np.unique(lengths.max(axis=1))
    # Enough of these can be tried only where they are few.
    if len(longer) <= 12:
        edges = [(int(edge), int(edge)) for edge in longer]
        tried = all_sets_of(edges, min(len(sizes), len(edges)))
        assert ours <= min(positions(lengths, one) for one in tried)


SIDES = st.lists(st.integers(2, 60), min_size=1, max_size=4, unique=True)
FEW_LENGTHS = st.tuples(SIDES, SIDES).flatmap(
    lambda sides: st.lists(st.tuples(*map(st.sampled_from, sides)), min_size=1, max_size=30)
)


@given(FEW_LENGTHS.map(np.asarray), GOOD)
@SEARCHES
def test_few_lengths_have_the_best_of_all_buckets_of_which_one_has_room_for_all(
    lengths: np.ndarray, good: float
) -> None:
    sizes = bucket_sizes(lengths, good=good)
    sides = [np.unique(side).tolist() for side in lengths.T]
    every = list(itertools.product(*sides))
    if len(sizes) <= 4:
        best = min(positions(lengths, one) for one in all_sets_of(every, len(sizes)))
        # Of 7,641 drawn ones 4 missed it, the worst by 3 %.
        assert positions(lengths, sizes) <= 1.05 * best


@given(st.integers(2, 300), st.integers(2, 300), st.integers(1, 50))
@EXAMPLES
def test_pairs_of_one_length_have_one_bucket_without_padding(
    source: int, target: int, pairs: int
) -> None:
    sizes = bucket_sizes(np.asarray([[source, target]] * pairs))
    assert sizes.tolist() == [[source, target]]


def test_a_bucket_for_all_that_no_pair_needs_is_left_out() -> None:
    lengths = [(2, 40)] * 100 + [(40, 2)] * 100 + [(2, 2)]
    assert bucket_sizes(np.asarray(lengths)).tolist() == [[2, 40], [40, 2]]
    assert Counter(epoch(plan(lengths, 100))) == Counter(pairs_of(lengths))


def test_there_are_never_more_buckets_than_programs_may_be_compiled() -> None:
    diagonal = np.stack([np.arange(1, 100)] * 2, axis=1)
    for distinct in (99, MAX_BUCKETS, MAX_BUCKETS - 1):
        sizes = bucket_sizes(diagonal[:distinct], good=1.0)
        assert len(sizes) == min(distinct, MAX_BUCKETS)
    assert len(bucket_sizes(like_text(20_000), good=1.0)) == MAX_BUCKETS


def test_more_buckets_are_made_only_until_enough_is_filled() -> None:
    lengths = like_text(5000)
    counts = [len(bucket_sizes(lengths, good=good)) for good in (0.1, 0.5, 0.7, 0.8, 0.9)]
    assert counts == sorted(counts)
    assert counts[0] == 1 < counts[-1]
    for good in (0.5, 0.7, 0.8):
        assert lengths.sum() >= good * positions(lengths, bucket_sizes(lengths, good=good))


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


@pytest.mark.parametrize("total", [1, 2, 3, 8])
def test_shares_are_the_rows_of_the_whole_batch_in_order(total: int) -> None:
    lengths = np.random.default_rng(0).integers(1, 30, (2, 100))
    source, target = (Ragged.of([[int(n) + 3] * int(n) for n in side]) for side in lengths)
    batches = Batches(source, target, batch_tokens=300, seed=0)
    for step in range(batches.per_epoch):
        whole = batches[step]
        parts = [batches.local_batch(step, Shard(i, i + 1, total)) for i in range(total)]
        assert len({part.source.shape for part in parts}) == 1
        for side, expected in enumerate(whole):
            rows = np.concatenate([part[side] for part in parts])
            np.testing.assert_array_equal(rows[: len(expected)], expected)
            # Shares that do not come out even end in empty rows.
            assert not rows[len(expected) :].any()
            assert len(rows) < len(expected) + total
