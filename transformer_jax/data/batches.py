"""Batches of sentences of similar length, about so many tokens each (section 5.1).

The batch of a step is a pure function of (lengths, seed, step): the place in the data is one
integer, and whoever resumes a run goes on with the very next batch.
"""

import functools
from typing import Any, NamedTuple

import numpy as np

# Rows of a batch are a multiple of this, so that they divide over most numbers of devices.
ROW_MULTIPLE = 8
MAX_BUCKETS = 12


class Batch(NamedTuple):
    """Rows of pieces: each ends in EOS and is filled up with padding."""

    source: Any
    """int32[rows, longest source]; NumPy's on the host, JAX's on devices."""
    target: Any
    """int32[rows, longest target]."""


class Shard(NamedTuple):
    """Rows of each batch that are wanted: of `total` equal shares, those in [first, last)."""

    first: int = 0
    last: int = 1
    total: int = 1


class Ragged(NamedTuple):
    """Sequences of unlike length in one flat array."""

    flat: np.ndarray
    offsets: np.ndarray
    """int64[sequences + 1]: sequence i is flat[offsets[i] : offsets[i + 1]]."""

    def lengths_of(self, indices: np.ndarray) -> np.ndarray:
        """Return the lengths of some sequences."""
        return self.offsets[indices + 1] - self.offsets[indices]

    @property
    def lengths(self) -> np.ndarray:
        """int64[sequences]."""
        return np.diff(self.offsets)

    def padded(self, indices: np.ndarray, rows: int, width: int) -> np.ndarray:
        """Return these sequences as int32[rows, width], with 0 where there is nothing."""
        starts, lengths = self.offsets[indices], self.lengths_of(indices)
        block = np.zeros((rows, width), np.int32)
        is_piece = np.arange(width) < lengths[:, None]
        block[: len(indices)][is_piece] = self.flat[(starts[:, None] + np.arange(width))[is_piece]]
        return block

    @classmethod
    def of(cls, sequences: list[list[int]], dtype: type = np.int32) -> "Ragged":
        """Lay sequences end to end."""
        flat = np.fromiter((piece for row in sequences for piece in row), dtype)
        return cls(flat, np.cumsum([0, *map(len, sequences)], dtype=np.int64))


class Bucket(NamedTuple):
    """A bucket: the shape of its batches, and how many an epoch has."""

    rows: int
    source: int
    target: int
    batches: int


class Batches:
    """All batches of a run, in order: `batches[step]`. An epoch has each pair exactly once."""

    def __init__(self, source: Ragged, target: Ragged, *, batch_tokens: int, seed: int) -> None:
        """Plan batches of at most `batch_tokens` source and as many target tokens.

        A batch has at least `ROW_MULTIPLE` rows, however long they are.
        """
        self._source, self._target, self._seed = source, target, seed
        lengths = np.stack([source.lengths, target.lengths], axis=1)
        sizes = bucket_sizes(lengths)
        bucket = first_fitting(lengths, sizes)
        self._members = [np.flatnonzero(bucket == i) for i in range(len(sizes))]
        self._tokens = int(lengths.sum())
        self.buckets = self._plan_buckets(sizes, batch_tokens)
        self.per_epoch = sum(shape.batches for shape in self.buckets)
        self._order = functools.lru_cache(maxsize=2)(self._shuffle)

    def _plan_buckets(self, sizes: np.ndarray, batch_tokens: int) -> list[Bucket]:
        """Deal each bucket's pairs out evenly over as few batches as have room for them."""
        shapes: list[Bucket] = []
        for members, (source, target) in zip(self._members, sizes.tolist(), strict=True):
            fitting = batch_tokens // max(source, target) // ROW_MULTIPLE * ROW_MULTIPLE
            batches = -(-len(members) // max(fitting, ROW_MULTIPLE))
            rows = -(-len(members) // batches // ROW_MULTIPLE) * ROW_MULTIPLE
            shapes.append(Bucket(rows, source, target, batches))
        return shapes

    def _shuffle(self, epoch: int) -> list[tuple[Bucket, np.ndarray]]:
        """Return the shape and the pairs of each batch of an epoch, in order."""
        rng = np.random.Generator(np.random.Philox(key=[self._seed, epoch]))
        planned = [
            (shape, pairs)
            for shape, members in zip(self.buckets, self._members, strict=True)
            for pairs in np.array_split(rng.permutation(members), shape.batches)
        ]
        return [planned[i] for i in rng.permutation(len(planned))]

    def _plan_epoch(self, step: int) -> tuple[Bucket, np.ndarray]:
        epoch, place = divmod(step, self.per_epoch)
        return self._order(epoch)[place]

    def pairs(self, step: int) -> np.ndarray:
        """Return which pairs are in the batch of this step: int[pairs], of those kept."""
        return self._plan_epoch(step)[1]

    def __getitem__(self, step: int) -> Batch:
        """Return the batch of this step, counted from 0 over all epochs."""
        return self.local_batch(step, Shard())

    def local_batch(self, step: int, share: Shard) -> Batch:
        """Return some rows of the batch of this step; no others are read.

        Where rows do not divide into the shares, the batch is filled up with empty ones.
        """
        shape, indices = self._plan_epoch(step)
        each = -(-shape.rows // share.total)
        wanted = indices[share.first * each : share.last * each]
        rows = (share.last - share.first) * each
        return Batch(
            self._source.padded(wanted, rows, shape.source),
            self._target.padded(wanted, rows, shape.target),
        )

    @property
    def density(self) -> float:
        """Share of an epoch's positions that hold tokens."""
        return self._tokens / sum(s.rows * (s.source + s.target) * s.batches for s in self.buckets)

    @property
    def summary(self) -> str:
        """An epoch in one line."""
        return (
            f"{self.per_epoch} an epoch in {len(self.buckets)} shapes, "
            f"{self.density:.1%} of positions are tokens"
        )


def first_fitting(lengths: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return the first bucket that has room for each pair.

    Args:
        lengths: int[pairs, 2], of source and target.
        sizes: int[buckets, 2], likewise, the smallest first; there is one for each pair.
    """
    bucket = np.full(len(lengths), len(sizes) - 1)
    for i in reversed(range(len(sizes))):
        bucket[(lengths <= sizes[i]).all(axis=1)] = i
    return bucket


def bucket_sizes(lengths: np.ndarray, *, good: float = 0.92, starts: int = 16) -> np.ndarray:
    """Return int[buckets, 2], the source and target room of each bucket, smallest first.

    The fewest, up to `MAX_SHAPES`, in which a share of `good` of the positions is tokens:
    each costs a compilation. They are placed greedily, and then moved one by one to wherever
    they save most, until none moves; the best of a few beginnings is taken, the same each time.

    Args:
        lengths: int[pairs, 2], of source and target.
        good: share of tokens at which more buckets are not worth their compilation.
        starts: beginnings to compare.
    """
    plan = _PaddingCost(lengths)
    sizes = plan.greedy(good)
    if len(sizes) == 1:
        return np.asarray(sizes)
    rng = np.random.Generator(np.random.Philox(key=[0, 0]))
    best = plan.local_search(sizes)
    for _ in range(starts - 1):
        beginning = plan.local_search([sizes[0], *plan.random_start(rng, len(sizes) - 1)])
        best = min(best, beginning, key=plan.cost)
    found = np.asarray(sorted(set(best), key=lambda size: (sum(size), size)))
    # All pairs of one, often of the one for all, may have found room in smaller ones.
    return found[np.unique(first_fitting(lengths, found))]


Size = tuple[int, int]


class _PaddingCost:
    """What sets of buckets cost on pairs of these lengths."""

    def __init__(self, lengths: np.ndarray) -> None:
        # Where a side has many lengths, a few of them will do as edges.
        levels = np.union1d(np.linspace(0, 1, 129), 1 - 0.5 ** np.arange(4, 24, 0.5))
        self.edges = [np.unique(np.quantile(x, levels, method="higher")) for x in lengths.T]
        # From here on lengths are those of the edges above them.
        places = [np.searchsorted(e, x) for e, x in zip(self.edges, lengths.T, strict=True)]
        self.counts = np.zeros([len(e) for e in self.edges], np.int64)
        np.add.at(self.counts, tuple(places), 1)
        self.room = self.edges[0][:, None] + self.edges[1][None, :]
        self.tokens = int(lengths.sum())

    def _least(self, sizes: list[Size]) -> np.ndarray:
        """Return the positions that a pair of each lengths takes in its cheapest bucket."""
        least = np.full(self.counts.shape, self.room[-1, -1])
        for source, target in sizes:
            fits = np.ix_(self.edges[0] <= source, self.edges[1] <= target)
            least[fits] = np.minimum(least[fits], source + target)
        return least

    def cost(self, sizes: list[Size]) -> int:
        """Return the positions that all pairs take."""
        return int((self._least(sizes) * self.counts).sum())

    def _best_addition(self, sizes: list[Size]) -> Size:
        """Return the bucket that saves most beside these."""
        least = self._least(sizes)
        saved = np.zeros(self.counts.shape)
        for positions in np.unique(least):
            counts = np.where(least == positions, self.counts, 0)
            fitting = counts.cumsum(axis=0).cumsum(axis=1)
            saved += fitting * np.maximum(positions - self.room, 0)
        i, j = np.unravel_index(saved.argmax(), saved.shape)
        return int(self.edges[0][i]), int(self.edges[1][j])

    def greedy(self, good: float) -> list[Size]:
        """Return a bucket for all, and more until enough positions are tokens."""
        sizes: list[Size] = [(int(self.edges[0][-1]), int(self.edges[1][-1]))]
        most = min(MAX_BUCKETS, np.count_nonzero(self.counts))
        while len(sizes) < most and self.tokens < good * self.cost(sizes):
            sizes.append(self._best_addition(sizes))
        return sizes

    def random_start(self, rng: np.random.Generator, count: int) -> list[Size]:
        """Return buckets of the sizes of some pairs."""
        i, j = np.nonzero(self.counts)
        picked = rng.choice(len(i), count, p=self.counts[i, j] / self.counts.sum())
        return [(int(self.edges[0][i[k]]), int(self.edges[1][j[k]])) for k in picked]

    def local_search(self, sizes: list[Size]) -> list[Size]:
        """Move buckets, but the one for all, to wherever they save most, until none moves."""
        sizes = list(sizes)
        moved = True
        while moved:
            moved = False
            before = self.cost(sizes)
            for i in range(1, len(sizes)):
                sizes[i] = self._best_addition([*sizes[:i], *sizes[i + 1 :]])
            moved = self.cost(sizes) < before
        return sizes
