"""Batch sentence pairs of similar length, with a limit on the tokens per batch (section 5.1).

Each step's batch is a pure function of the corpus, the seed, and the step. A resumed run therefore
reads the same batches as an uninterrupted run. The shape of a step's batch does not depend on the
seed, so that runs with different seeds can share each step's program.
"""

import copy
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from transformer_jax.config.sections import MAX_BATCH_SHAPES
from transformer_jax.data.buckets import assign_buckets, choose_bucket_sizes

# The number of rows in a batch is a multiple of `ROW_MULTIPLE`, so the rows usually divide evenly
# among the devices.
ROW_MULTIPLE = 8
# The seed for the order of the batch shapes in each epoch. No run's seed is this large.
SHAPE_SEED = 1 << 31


class Batch(NamedTuple):
    """The token IDs of sentence pairs, int32[rows, width].

    Each sentence ends with EOS, followed by zero padding. The arrays are NumPy arrays on the host
    and JAX arrays on devices.
    """

    source: Any
    target: Any


class Shard(NamedTuple):
    """The shards that one process needs from each batch: [first, last) out of `total`."""

    first: int = 0
    last: int = 1
    total: int = 1


class Ragged(NamedTuple):
    """Sequences of different lengths: sequence i is flat[offsets[i] : offsets[i + 1]]."""

    flat: np.ndarray
    offsets: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """The length of each sequence, int64[sequences]."""
        return np.diff(self.offsets)

    def pad(self, indices: np.ndarray, rows: int, width: int) -> np.ndarray:
        """Return the sequences at `indices`, padded with 0 and empty rows to int32[rows, width].

        No sequence may be longer than `width`.
        """
        starts = self.offsets[indices]
        lengths = self.offsets[indices + 1] - starts
        padded = np.zeros((rows, width), np.int32)
        is_token = np.arange(width) < lengths[:, None]
        padded[: len(indices)][is_token] = self.flat[(starts[:, None] + np.arange(width))[is_token]]
        return padded

    @classmethod
    def from_lists(cls, sequences: Sequence[Sequence[int]]) -> "Ragged":
        """Concatenate the sequences."""
        flat = np.fromiter((token for sequence in sequences for token in sequence), np.int32)
        return cls(flat, np.cumsum([0, *map(len, sequences)], dtype=np.int64))


def max_rows(batch_tokens: int, width: int) -> int:
    """Return the maximum number of rows in a batch whose larger width is `width`."""
    return max(batch_tokens // width // ROW_MULTIPLE, 1) * ROW_MULTIPLE


# If a run would read its text more than this many times, training starts with a warning.
MAX_EPOCHS = 100


class Bucket(NamedTuple):
    """The shape of a batch (widths in tokens), and the number of its batches per epoch."""

    rows: int
    source: int
    target: int
    batches: int


class Batches:
    """A run's batches, indexed by step: `batches[step]`. Each epoch contains each pair once."""

    def __init__(
        self,
        source: Ragged,
        target: Ragged,
        *,
        batch_tokens: int,
        seed: int,
        max_shapes: int = MAX_BATCH_SHAPES,
    ) -> None:
        """Plan batches with at most `batch_tokens` positions on each side, including padding.

        A batch has at least `ROW_MULTIPLE` rows, so batches with very long sentences exceed
        `batch_tokens`.
        """
        self.source, self.target, self._seed = source, target, seed
        lengths = np.stack([source.lengths, target.lengths], axis=1)
        sizes = choose_bucket_sizes(lengths, max_buckets=max_shapes)
        bucket = assign_buckets(lengths, sizes)
        self._members = [np.flatnonzero(bucket == i) for i in range(len(sizes))]
        self._tokens = int(lengths.sum())
        self.buckets: list[Bucket] = []
        # Distribute the pairs in each bucket evenly over as few batches as possible.
        for members, size in zip(self._members, sizes.tolist(), strict=True):
            batches = -(-len(members) // max_rows(batch_tokens, max(size)))
            rows = -(-len(members) // batches // ROW_MULTIPLE) * ROW_MULTIPLE
            self.buckets.append(Bucket(rows, size[0], size[1], batches))
        self.per_epoch = sum(bucket.batches for bucket in self.buckets)
        self._cached_epoch = functools.lru_cache(maxsize=2)(self._shuffle_epoch)

    def with_seed(self, seed: int) -> "Batches":
        """Return batches of the same shapes that contain the pairs in a different order."""
        other = copy.copy(self)
        other._seed = seed
        other._cached_epoch = functools.lru_cache(maxsize=2)(other._shuffle_epoch)
        return other

    def _shuffle_epoch(self, epoch: int) -> list[tuple[Bucket, np.ndarray]]:
        """Return the bucket and pair indices of each batch in an epoch, in order."""
        rng = np.random.Generator(np.random.Philox(key=[self._seed, epoch]))
        order = np.random.Generator(np.random.Philox(key=[SHAPE_SEED, epoch]))
        batches = [
            (bucket, pairs)
            for bucket, members in zip(self.buckets, self._members, strict=True)
            for pairs in np.array_split(rng.permutation(members), bucket.batches)
        ]
        return [batches[i] for i in order.permutation(len(batches))]

    def _look_up(self, step: int) -> tuple[Bucket, np.ndarray]:
        epoch, index = divmod(step, self.per_epoch)
        return self._cached_epoch(epoch)[index]

    def upcoming(self, first: int, last: int) -> list[Bucket]:
        """Return the buckets for steps `first` to `last` - 1, in the order of their first use."""
        buckets: list[Bucket] = []
        for step in range(first, last):
            bucket = self._look_up(step)[0]
            if bucket not in buckets:
                buckets.append(bucket)
            if len(buckets) == len(self.buckets):
                break
        return buckets

    def pairs(self, step: int) -> np.ndarray:
        """Return the indices of the pairs in this step's batch, int[pairs]."""
        return self._look_up(step)[1]

    def lengths(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the source and target lengths in this step's batch."""
        pairs = self.pairs(step)
        sides = self.source.offsets, self.target.offsets
        source, target = (offsets[pairs + 1] - offsets[pairs] for offsets in sides)
        return source, target

    def __getitem__(self, step: int) -> Batch:
        """Return this step's batch. Step numbers start at 0 and continue across epochs."""
        return self.local_batch(step, Shard())

    def local_batch(self, step: int, shard: Shard) -> Batch:
        """Return one process's rows in this step's batch. Empty rows equalize the shard sizes."""
        bucket, pairs = self._look_up(step)
        rows_per_shard = -(-bucket.rows // shard.total)
        local_pairs = pairs[shard.first * rows_per_shard : shard.last * rows_per_shard]
        rows = (shard.last - shard.first) * rows_per_shard
        return Batch(
            self.source.pad(local_pairs, rows, bucket.source),
            self.target.pad(local_pairs, rows, bucket.target),
        )

    @property
    def density(self) -> float:
        """The fraction of positions in an epoch that contain tokens instead of padding."""
        return self._tokens / sum(b.rows * (b.source + b.target) * b.batches for b in self.buckets)

    def describe_repetition(self, steps: int) -> str | None:
        """Return a warning, or None if training reads each pair at most `MAX_EPOCHS` times."""
        epochs = steps / self.per_epoch
        if epochs <= MAX_EPOCHS:
            return None
        return (
            f"warning: {steps:,} steps are {epochs:,.0f} passes over the training set, with "
            f"{self.per_epoch:,} batches each: reduce train.steps, or use more text"
        )

    @property
    def summary(self) -> str:
        """A one-line description of the batches in an epoch."""
        return (
            f"{self.per_epoch} per epoch in {len(self.buckets)} shapes, "
            f"{self.density:.1%} of positions are tokens"
        )
