"""Batches of sentences of similar length, about so many tokens each (section 5.1).

The batch of a step is a pure function of (lengths, seed, step): the place in the data is one
integer, and whoever resumes a run goes on with the very next batch.
"""

import functools
from typing import Any, NamedTuple

import numpy as np

# Rows of a batch are a multiple of this, so that they divide over most numbers of devices.
ROW_MULTIPLE = 8
MAX_SHAPES = 12


class Batch(NamedTuple):
    """Rows of pieces: each ends in EOS and is filled up with padding."""

    source: Any
    """int32[rows, longest source]; NumPy's on the host, JAX's on devices."""
    target: Any
    """int32[rows, longest target]."""


class Ragged(NamedTuple):
    """Sequences of unlike length in one flat array."""

    flat: np.ndarray
    offsets: np.ndarray
    """int64[sequences + 1]: sequence i is flat[offsets[i] : offsets[i + 1]]."""

    @property
    def lengths(self) -> np.ndarray:
        """int64[sequences]."""
        return np.diff(self.offsets)

    def padded(self, indices: np.ndarray, rows: int, width: int) -> np.ndarray:
        """Return these sequences as int32[rows, width], with 0 where there is nothing."""
        block = np.zeros((rows, width), np.int32)
        for row, index in enumerate(indices):
            pieces = self.flat[self.offsets[index] : self.offsets[index + 1]]
            block[row, : len(pieces)] = pieces
        return block

    @classmethod
    def of(cls, sequences: list[list[int]], dtype: type = np.int32) -> "Ragged":
        """Lay sequences end to end."""
        flat = np.fromiter((piece for row in sequences for piece in row), dtype)
        return cls(flat, np.cumsum([0, *map(len, sequences)], dtype=np.int64))


class Shape(NamedTuple):
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
        lengths = np.maximum(source.lengths, target.lengths)
        edges = bucket_edges(lengths)
        bucket = np.searchsorted(edges, lengths)
        self._members = [np.flatnonzero(bucket == i) for i in range(len(edges))]
        self.shapes = self._plan_shapes(batch_tokens)
        self.per_epoch = sum(shape.batches for shape in self.shapes)
        self._order = functools.lru_cache(maxsize=2)(self._shuffle)

    def _plan_shapes(self, batch_tokens: int) -> list[Shape]:
        """Choose each bucket's shape; what does not fill a batch goes to the next longer one."""
        shapes: list[Shape] = []
        left = width = height = 0
        for i, members in enumerate(self._members):
            width = max(width, int(self._source.lengths[members].max()))
            height = max(height, int(self._target.lengths[members].max()))
            pairs = left + len(members)
            fitting = batch_tokens // max(width, height) // ROW_MULTIPLE * ROW_MULTIPLE
            needed = -(-pairs // ROW_MULTIPLE) * ROW_MULTIPLE
            rows = max(ROW_MULTIPLE, min(fitting, needed))
            is_last = i == len(self._members) - 1
            batches = -(-pairs // rows) if is_last else pairs // rows
            left = pairs - batches * rows
            shapes.append(Shape(rows, width, height, batches))
        return shapes

    def _shuffle(self, epoch: int) -> list[tuple[Shape, np.ndarray]]:
        """Return the shape and the pairs of each batch of an epoch, in order."""
        rng = np.random.Generator(np.random.Philox(key=[self._seed, epoch]))
        planned: list[tuple[Shape, np.ndarray]] = []
        left = np.zeros(0, np.int64)
        for shape, members in zip(self.shapes, self._members, strict=True):
            pairs = np.concatenate([left, rng.permutation(members)])
            split = np.arange(1, shape.batches + 1) * shape.rows
            *full, left = np.split(pairs, split) if shape.batches else [pairs]
            planned += [(shape, indices) for indices in full]
        return [planned[i] for i in rng.permutation(len(planned))]

    def __getitem__(self, step: int) -> Batch:
        """Return the batch of this step, counted from 0 over all epochs."""
        epoch, place = divmod(step, self.per_epoch)
        shape, indices = self._order(epoch)[place]
        return Batch(
            self._source.padded(indices, shape.rows, shape.source),
            self._target.padded(indices, shape.rows, shape.target),
        )

    @property
    def fill(self) -> float:
        """Share of an epoch's positions that hold tokens."""
        tokens = int(self._source.lengths.sum() + self._target.lengths.sum())
        return tokens / sum(s.rows * (s.source + s.target) * s.batches for s in self.shapes)


def bucket_edges(lengths: np.ndarray, *, good: float = 0.92) -> np.ndarray:
    """Return the longest length of each bucket, so that little is padding.

    The fewest buckets, up to `MAX_SHAPES`, in which a share of `good` of the positions is
    tokens, placed as well as can be (dynamic programming over the distinct lengths): each
    bucket costs a compilation.
    """
    distinct, counts = np.unique(lengths, return_counts=True)
    pairs = np.concatenate([[0], np.cumsum(counts)])
    tokens = int(distinct @ counts)
    # cost[i, j]: positions of a bucket that holds distinct lengths i to j - 1.
    cost = (pairs[None, :] - pairs[:, None]) * np.concatenate([[0], distinct])[None, :]
    cost = np.where(np.arange(len(pairs))[:, None] < np.arange(len(pairs))[None, :], cost, np.inf)
    best = cost[0]
    cuts: list[np.ndarray] = []
    while tokens < good * best[-1] and len(cuts) + 1 < min(MAX_SHAPES, len(distinct)):
        through = best[:, None] + cost
        cuts.append(np.argmin(through, axis=0))
        best = np.min(through, axis=0)
    edges = [len(distinct)]
    for cut in reversed(cuts):
        edges.append(int(cut[edges[-1]]))
    return distinct[np.asarray(edges[::-1]) - 1]
