"""Choose a few bucket sizes that keep padding low.

XLA compiles one program for each batch shape, so sentence pairs are grouped into a few buckets. A
bucket of size (S, T) pads pairs with at most S source and T target tokens to S + T positions. The
search minimizes the total number of positions. First, the search repeatedly adds the bucket that
saves the most positions, until little padding remains. Second, the search replaces one bucket at a
time to minimize the total, until nothing improves. Third, the search repeats the second phase from
random sets of buckets and keeps the best result. The random number generator has a fixed seed, so
the same lengths always give the same buckets.
"""

import math

import numpy as np

from transformer_jax.config.sections import MAX_BATCH_SHAPES

RESTARTS = 15

# The source and target widths of a bucket.
Size = tuple[int, int]


def choose_bucket_sizes(
    lengths: np.ndarray, *, target_density: float = 0.92, max_buckets: int = MAX_BATCH_SHAPES
) -> np.ndarray:
    """Return the source and target widths of the buckets, int[buckets, 2], smallest first.

    `lengths` contains the length of each source and target, int[pairs, 2]. There are at most
    `max_buckets` buckets, and no more than needed for `target_density`, the fraction of positions
    that contain tokens.
    """
    padding = PaddingCost(lengths)
    sizes = padding.greedy_search(target_density, max_buckets)
    if len(sizes) == 1:
        return np.asarray(sizes)
    rng = np.random.Generator(np.random.Philox(key=[0, 0]))
    best = padding.local_search(sizes)
    for _ in range(RESTARTS):
        candidate = padding.local_search([sizes[0], *padding.random_start(rng, len(sizes) - 1)])
        best = min(best, candidate, key=padding.cost)
    ordered = np.asarray(sorted(set(best), key=lambda size: (sum(size), size)))
    # Drop empty buckets. The largest bucket is often empty, because every pair fits in a
    # smaller one.
    return ordered[np.unique(assign_buckets(lengths, ordered))]


def assign_buckets(lengths: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return the index of the first bucket that fits each pair. Every pair must fit in a bucket."""
    bucket = np.full(len(lengths), len(sizes) - 1)
    for i in reversed(range(len(sizes))):
        bucket[(lengths <= sizes[i]).all(axis=1)] = i
    return bucket


class PaddingCost:
    """Compute the padding cost of bucket sets, and search for sets with a low cost.

    The first bucket in a set must be large enough for all pairs.
    """

    def __init__(self, lengths: np.ndarray) -> None:
        """Count the pairs by source and target length: the two columns of `lengths`."""
        # Round each length up to the next candidate width. The candidates are quantiles of the
        # lengths. The quantiles are denser among the longest sentences.
        levels = np.union1d(np.linspace(0, 1, 129), 1 - 0.5 ** np.arange(4, 24, 0.5))
        self.widths = [np.unique(np.quantile(side, levels, method="higher")) for side in lengths.T]
        indices = [np.searchsorted(w, side) for w, side in zip(self.widths, lengths.T, strict=True)]
        self.counts = np.zeros([len(w) for w in self.widths], np.int64)
        np.add.at(self.counts, tuple(indices), 1)
        # The number of positions that a pair occupies in a bucket of each candidate size.
        self.positions = self.widths[0][:, None] + self.widths[1][None, :]
        self.tokens = int(lengths.sum())

    def cost(self, sizes: list[Size]) -> int:
        """Return the total number of positions that all pairs occupy, including padding."""
        return int((self._positions_per_pair(sizes) * self.counts).sum())

    def _positions_per_pair(self, sizes: list[Size]) -> np.ndarray:
        """Return, for each pair size, the number of positions in the smallest bucket that fits."""
        cheapest = np.full(self.counts.shape, self.positions[-1, -1])
        for source, target in sizes:
            fits = np.ix_(self.widths[0] <= source, self.widths[1] <= target)
            cheapest[fits] = np.minimum(cheapest[fits], source + target)
        return cheapest

    def _size(self, i: int, j: int) -> Size:
        return int(self.widths[0][i]), int(self.widths[1][j])

    def _find_best_addition(self, sizes: list[Size]) -> Size:
        """Return the bucket that saves the most positions when it is added to `sizes`."""
        current = self._positions_per_pair(sizes)
        saved = np.zeros(self.counts.shape)
        # All pairs with the same current cost would save the same number of positions by moving to
        # a candidate bucket. A cumulative sum counts the pairs that fit in each candidate bucket.
        for positions in np.unique(current):
            counts = np.where(current == positions, self.counts, 0)
            fitting = counts.cumsum(axis=0).cumsum(axis=1)
            saved += fitting * np.maximum(positions - self.positions, 0)
        return self._size(*divmod(int(saved.argmax()), saved.shape[1]))

    def greedy_search(self, target_density: float, max_buckets: int) -> list[Size]:
        """Start with one bucket for all pairs; stop at `target_density` or at `max_buckets`."""
        sizes = [self._size(-1, -1)]
        most = min(max_buckets, np.count_nonzero(self.counts))
        while len(sizes) < most and self.tokens < target_density * self.cost(sizes):
            sizes.append(self._find_best_addition(sizes))
        return sizes

    def random_start(self, rng: np.random.Generator, count: int) -> list[Size]:
        """Return `count` random bucket sizes, drawn from the lengths of the pairs."""
        i, j = np.nonzero(self.counts)
        drawn = rng.choice(len(i), count, p=self.counts[i, j] / self.counts.sum())
        return [self._size(i[k], j[k]) for k in drawn]

    def local_search(self, sizes: list[Size]) -> list[Size]:
        """Replace buckets, except the first, with the best ones until the cost stops falling."""
        sizes, best_cost = list(sizes), math.inf
        while (cost := self.cost(sizes)) < best_cost:
            best_cost = cost
            for i in range(1, len(sizes)):
                sizes[i] = self._find_best_addition([*sizes[:i], *sizes[i + 1 :]])
        return sizes
