"""Test that each epoch contains every pair once, and that only the seed and step affect a batch."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_jax.config.sections import MAX_BATCH_SHAPES
from transformer_jax.data.batches import ROW_MULTIPLE, Batch, Batches, Ragged, Shard

Lengths = list[tuple[int, int]]
Pair = tuple[tuple[int, ...], tuple[int, ...]]

SHORT, ANY = st.integers(2, 5), st.integers(2, 40)
# In some of these corpora, one side is always short; in others, both sides can have any length.
LENGTHS = st.sampled_from([(ANY, ANY), (SHORT, ANY), (ANY, SHORT)]).flatmap(
    lambda sides: st.lists(st.tuples(*sides), min_size=1, max_size=200)
)
BUDGETS = st.integers(1, 2000)
SEEDS = st.integers(0, 2**31 - 1)
EXAMPLES = settings(deadline=None, derandomize=True, max_examples=20)


def pairs_of(lengths: Lengths) -> list[Pair]:
    """Return pairs of the given lengths. In pair i, every token is i (source) or -i (target)."""
    return [((i,) * source, (-i,) * target) for i, (source, target) in enumerate(lengths, 1)]


def plan(lengths: Lengths, batch_tokens: int, seed: int = 0) -> Batches:
    source, target = (
        Ragged.from_lists([list(sequence) for sequence in side])
        for side in zip(*pairs_of(lengths), strict=True)
    )
    return Batches(source, target, batch_tokens=batch_tokens, seed=seed)


def unpad(batch: Batch) -> list[Pair]:
    """Return the pairs in a batch, and check that each row has padding only at its end."""
    pairs: list[Pair] = []
    for rows in zip(batch.source, batch.target, strict=True):
        source, target = (tuple(int(token) for token in row if token) for row in rows)
        for row, tokens in zip(rows, (source, target), strict=True):
            assert tuple(row) == tokens + (0,) * (len(row) - len(tokens))
        assert bool(source) is bool(target)
        if source:
            pairs.append((source, target))
    return pairs


def epoch(batches: Batches, number: int = 0) -> list[Pair]:
    first = number * batches.per_epoch
    return [
        pair for step in range(first, first + batches.per_epoch) for pair in unpad(batches[step])
    ]


@given(LENGTHS, BUDGETS, SEEDS)
@EXAMPLES
def test_each_epoch_has_each_pair_exactly_once(
    lengths: Lengths, batch_tokens: int, seed: int
) -> None:
    batches = plan(lengths, batch_tokens, seed)
    expected = Counter(pairs_of(lengths))
    assert Counter(epoch(batches, 0)) == expected
    assert Counter(epoch(batches, 1)) == expected


@given(LENGTHS, BUDGETS, SEEDS, st.data())
@EXAMPLES
def test_a_batch_does_not_depend_on_the_batches_read_before(
    lengths: Lengths, batch_tokens: int, seed: int, data: st.DataObject
) -> None:
    batches = plan(lengths, batch_tokens, seed)
    steps = st.integers(0, 4 * batches.per_epoch)
    for step in data.draw(st.lists(steps, max_size=2)):
        again, fresh = batches[step], plan(lengths, batch_tokens, seed)[step]
        np.testing.assert_array_equal(again.source, fresh.source)
        np.testing.assert_array_equal(again.target, fresh.target)


def test_each_epoch_and_each_seed_has_a_different_order() -> None:
    lengths = [(2 + i % 7, 2 + i % 5) for i in range(800)]
    by_seed = [plan(lengths, 200, seed) for seed in range(3)]
    orders = [tuple(epoch(batches, number)) for batches in by_seed for number in range(3)]
    assert len(set(orders)) == len(orders)
    # A different seed also groups the pairs into different batches.
    first, second = (
        {frozenset(unpad(batches[step])) for step in range(4)} for batches in by_seed[:2]
    )
    assert not first & second


def test_all_seeds_have_the_same_sequence_of_shapes() -> None:
    lengths = [(2 + i % 7, 2 + i % 5) for i in range(200)]
    first, second = (plan(lengths, 100, seed) for seed in (0, 1))
    steps = range(2 * first.per_epoch)
    shapes = [first[step].source.shape for step in steps]
    assert shapes == [second[step].source.shape for step in steps]
    epochs = shapes[: first.per_epoch], shapes[first.per_epoch :]
    assert epochs[0] != epochs[1]
    reseeded = first.with_seed(1)
    for step in steps:
        np.testing.assert_array_equal(reseeded[step].target, second[step].target)


@given(LENGTHS, BUDGETS, SEEDS, st.integers(0, 50), st.integers(0, 50))
@EXAMPLES
def test_upcoming_buckets_are_those_of_the_next_batches(
    lengths: Lengths, batch_tokens: int, seed: int, first: int, count: int
) -> None:
    batches = plan(lengths, batch_tokens, seed)
    shapes = [
        (*batch.source.shape, batch.target.shape[1])
        for batch in map(batches.__getitem__, range(first, first + count))
    ]
    upcoming = batches.upcoming(first, first + count)
    assert [bucket[:3] for bucket in upcoming] == list(dict.fromkeys(shapes))


def test_more_than_100_passes_over_the_text_are_worth_a_warning() -> None:
    batches = plan([(4, 4)] * 160, batch_tokens=32)
    assert batches.per_epoch == 20
    assert batches.describe_repetition(2000) is None
    warning = batches.describe_repetition(2020)
    assert warning is not None
    assert "2,020 steps are 101 passes over the training set, with 20 batches each" in warning


def test_short_and_long_batches_are_mixed() -> None:
    batches = plan([(length, length) for length in range(2, 34) for _ in range(8)], 100)
    widths = [batches[step].source.shape[1] for step in range(batches.per_epoch)]
    assert len(set(widths)) > 4
    assert widths not in (sorted(widths), sorted(widths, reverse=True))


@given(LENGTHS, BUDGETS)
@EXAMPLES
def test_batches_have_the_planned_shapes_within_the_budget(
    lengths: Lengths, batch_tokens: int
) -> None:
    batches = plan(lengths, batch_tokens)
    epoch = [batches[step] for step in range(batches.per_epoch)]
    shapes = Counter((*batch.source.shape, batch.target.shape[1]) for batch in epoch)
    planned: Counter[tuple[int, ...]] = Counter()
    for bucket in batches.buckets:
        planned[bucket.rows, bucket.source, bucket.target] += bucket.batches
    assert shapes == +planned
    assert len(batches.buckets) <= MAX_BATCH_SHAPES
    for batch in epoch:
        rows, width = batch.source.shape
        assert batch.target.shape[0] == rows
        assert rows % ROW_MULTIPLE == 0
        # A batch with the minimum number of rows may exceed the token budget, because sentences are
        # never truncated.
        assert rows == ROW_MULTIPLE or rows * max(width, batch.target.shape[1]) <= batch_tokens
        assert batch.source.dtype == batch.target.dtype == np.int32
    tokens = sum(np.count_nonzero(side) for batch in epoch for side in batch)
    positions = sum(side.size for batch in epoch for side in batch)
    assert batches.density == pytest.approx(tokens / positions)


@given(LENGTHS, BUDGETS)
@EXAMPLES
def test_each_bucket_has_as_few_and_as_even_batches_as_possible(
    lengths: Lengths, batch_tokens: int
) -> None:
    batches = plan(lengths, batch_tokens)
    pairs_by_shape: dict[tuple[int, ...], list[int]] = {}
    for step in range(batches.per_epoch):
        batch = batches[step]
        shape = (*batch.source.shape, batch.target.shape[1])
        pairs_by_shape.setdefault(shape, []).append(len(unpad(batch)))
    widths = [shape[1:] for shape in pairs_by_shape]
    assert len(widths) == len(set(widths)) == len(batches.buckets)
    for (rows, *width), pairs in pairs_by_shape.items():
        assert rows - ROW_MULTIPLE < max(pairs) <= rows
        most_rows = max(ROW_MULTIPLE, batch_tokens // max(width) // ROW_MULTIPLE * ROW_MULTIPLE)
        assert len(pairs) == -(-sum(pairs) // most_rows)
        assert max(pairs) - min(pairs) <= 1


def test_batches_of_realistic_text_are_dense_and_nearly_full() -> None:
    rng = np.random.default_rng(0)
    source = rng.gamma(5.0, 28 / 5, 50_000)
    target = source * rng.lognormal(0.05, 0.1, len(source))
    sides = (
        Ragged(np.ones(side.sum(), np.uint16), np.concatenate([[0], np.cumsum(side)]))
        for side in (np.clip(side.round().astype(int) + 1, 2, 256) for side in (source, target))
    )
    batches = Batches(*sides, batch_tokens=25_000, seed=0)
    assert batches.density >= 0.88
    epoch = [batches[step] for step in range(batches.per_epoch)]
    for side in zip(*epoch, strict=True):
        tokens = [np.count_nonzero(block) for block in side]
        assert 0.75 * 25_000 < np.mean(tokens) <= 25_000


@given(st.lists(st.lists(st.integers(1, 2**16 - 1))))
@settings(deadline=None, derandomize=True)
def test_ragged_sequences_are_padded_with_zeros(sequences: list[list[int]]) -> None:
    ragged = Ragged.from_lists(sequences)
    # Tokens in memory-mapped files are stored as unsigned integers.
    ragged = ragged._replace(flat=ragged.flat.astype(np.uint16))
    assert ragged.lengths.tolist() == [len(sequence) for sequence in sequences]
    width = max(map(len, sequences), default=0)
    rows = len(sequences) + 2
    padded = ragged.pad(np.arange(len(sequences)), rows, width)
    assert padded.shape == (rows, width)
    expected = [sequence + [0] * (width - len(sequence)) for sequence in sequences]
    assert padded.tolist() == [*expected, [0] * width, [0] * width]


@pytest.mark.parametrize("total", [1, 2, 3, 8])
def test_shards_joined_in_order_are_the_batch(total: int) -> None:
    lengths = np.random.default_rng(0).integers(1, 30, (2, 100))
    source, target = (Ragged.from_lists([[int(n) + 3] * int(n) for n in side]) for side in lengths)
    batches = Batches(source, target, batch_tokens=300, seed=0)
    for step in range(batches.per_epoch):
        batch = batches[step]
        shards = [batches.local_batch(step, Shard(i, i + 1, total)) for i in range(total)]
        assert len({shard.source.shape for shard in shards}) == 1
        for side, expected in enumerate(batch):
            rows = np.concatenate([shard[side] for shard in shards])
            np.testing.assert_array_equal(rows[: len(expected)], expected)
            # If the rows cannot be divided evenly, the last shards are padded with empty rows.
            assert not rows[len(expected) :].any()
            assert len(rows) < len(expected) + total
