"""The work that contestants do: sizes of models, and batches that all of them get alike."""

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from transformer_jax.config import Config
from transformer_jax.config.validation import did_you_mean
from transformer_jax.data.batches import Batch, Batches
from transformer_jax.errors import UsageError
from transformer_jax.special_tokens import EOS, PAD, UNKNOWN


@dataclass(frozen=True)
class Sizes:
    """A model, and one batch without padding."""

    d_model: int = 512
    layers: int = 6
    heads: int = 8
    d_ff: int = 2048
    vocab: int = 32_000
    batch: int = 32
    src: int = 32
    """Pieces of each source."""
    tgt: int = 32
    """Pieces of each target."""
    dtype: str = "float32"

    def with_changes(self, changes: Sequence[str]) -> "Sizes":
        """Return the same with some changed, each as "d_ff=1024".

        Raises:
            UsageError: there is no such size, or this is none.
        """
        known = [field.name for field in dataclasses.fields(self) if field.name != "dtype"]
        found: dict[str, Any] = {}
        for change in changes:
            name, _, value = change.partition("=")
            if name not in known:
                raise UsageError(
                    f"--split takes NAME=NUMBER of {', '.join(known)}, got {change!r}"
                    f"{did_you_mean(name, known)}"
                )
            if not value.isascii() or not value.isdigit() or not 0 < int(value) < 1 << 31:
                raise UsageError(f"--split {name} must be a positive number, got {value!r}")
            found[name] = int(value)
        return dataclasses.replace(self, **found)


# The first two are those by which this project compares itself with others on a CPU.
SIZES = {
    "base": Sizes(),
    "tiny": Sizes(d_model=256, layers=3, heads=4, d_ff=1024, vocab=8000, batch=64, src=24, tgt=24),
    "big": Sizes(d_model=1024, heads=16, d_ff=4096),
    "toy": Sizes(d_model=16, layers=1, heads=2, d_ff=32, vocab=50, batch=4, src=6, tgt=5),
}


def load_sizes(name: str, changes: Sequence[str] = ()) -> Sizes:
    """Return the sizes of this name, with changes as `Sizes.but` takes them.

    Raises:
        UsageError: there are none of this name.
    """
    if name not in SIZES:
        raise UsageError(
            f"no sizes {name!r}{did_you_mean(name, SIZES)} (there are {', '.join(SIZES)})"
        )
    return SIZES[name].with_changes(changes)


def random_tokens(rng: np.random.Generator, vocab: int, *shape: int) -> np.ndarray:
    """Draw pieces that are neither padding nor another special one."""
    return rng.integers(UNKNOWN + 1, vocab, shape, dtype=np.int32)


def full_batch(sizes: Sizes) -> Batch:
    """Return a batch without padding, the same each time."""
    rng = np.random.default_rng(0)
    source = random_tokens(rng, sizes.vocab, sizes.batch, sizes.src)
    return Batch(source, random_tokens(rng, sizes.vocab, sizes.batch, sizes.tgt))


def count_target_tokens(batch: Batch) -> int:
    """Return how many target tokens are learnt from: padding is none."""
    return int((batch.target != PAD).sum())


def save_batches(path: Path, batches: Sequence[Batch]) -> str:
    """Keep batches for contestants to read; return the path."""
    arrays = {f"{i}.{side}": getattr(b, side) for i, b in enumerate(batches) for side in b._fields}
    np.savez(path, allow_pickle=False, **arrays)
    return str(path)


def text_batches(config: Config, tokens: int, *, shapes: int, count: int) -> list[Batch]:
    """Return real batches of the shapes that most of a text's tokens are in, as they come.

    Args:
        config: whose text.
        tokens: target tokens that a batch has at least, on average, where there is so much text.
        shapes: how many at most; each is compiled.
        count: how many batches at most.
    """
    from transformer_jax.data.prepare import prepare

    text = prepare(config.data).tokens("train")
    room = tokens
    while True:
        batches = Batches(*text, batch_tokens=room, seed=config.train.seed)
        found = _most_common(batches, shapes, count)
        mean = sum(map(count_target_tokens, found)) / len(found)
        if mean >= tokens or batches.per_epoch == len(batches.buckets):
            return found
        # Batches are planned by positions, of which some are padding.
        room = round(room * min(2.0, 1.01 * tokens / mean)) + 1


def _most_common(batches: Batches, shapes: int, count: int) -> list[Batch]:
    """Return the first batches of an epoch that have one of the shapes with most positions."""
    most = sorted(batches.buckets, key=lambda s: -s.batches * s.rows * (s.source + s.target))
    wanted = {shape[:3] for shape in most[:shapes]}
    every = (batches[step] for step in range(batches.per_epoch))
    found = (b for b in every if (*b.source.shape, b.target.shape[1]) in wanted)
    return list(itertools.islice(found, count))


def text_sources(config: Config, count: int) -> list[list[int]]:
    """Return the pieces of so many sources of a text, each with its end."""
    from transformer_jax.data.prepare import prepare

    source, _ = prepare(config.data).tokens("train")
    chosen = range(min(count, len(source.offsets) - 1))
    return [source.flat[source.offsets[i] : source.offsets[i + 1]].tolist() for i in chosen]


def random_sources(sizes: Sizes, count: int, length: int) -> list[list[int]]:
    """Return so many sources of one length, without their ends counted in it."""
    rows = random_tokens(np.random.default_rng(0), sizes.vocab, count, length)
    return [[*row, EOS] for row in rows.tolist()]
