"""Model sizes and batches, shared by all workers."""

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
    """The dimensions of a model and of a batch without padding."""

    d_model: int = 512
    layers: int = 6
    heads: int = 8
    d_ff: int = 2048
    vocab: int = 32_000
    batch: int = 32
    src: int = 32
    """Tokens per source."""
    tgt: int = 32
    """Tokens per target."""
    dtype: str = "float32"

    def with_changes(self, changes: Sequence[str]) -> "Sizes":
        """Return a copy of the sizes with changes such as "d_ff=1024".

        Raises:
            UsageError: the name is unknown, or the value is not a positive number.
        """
        known = [field.name for field in dataclasses.fields(self) if field.name != "dtype"]
        changed: dict[str, Any] = {}
        for change in changes:
            name, _, value = change.partition("=")
            if name not in known:
                raise UsageError(
                    f"--set takes NAME=NUMBER of {', '.join(known)}, got {change!r}"
                    f"{did_you_mean(name, known)}"
                )
            if not value.isascii() or not value.isdigit() or not 0 < int(value) < 1 << 31:
                raise UsageError(f"--set {name} must be a positive number, got {value!r}")
            changed[name] = int(value)
        return dataclasses.replace(self, **changed)


# "base" and "tiny" are the standard sizes for comparisons on a CPU.
SIZES = {
    "base": Sizes(),
    "tiny": Sizes(d_model=256, layers=3, heads=4, d_ff=1024, vocab=8000, batch=64, src=24, tgt=24),
    "big": Sizes(d_model=1024, heads=16, d_ff=4096),
    "toy": Sizes(d_model=16, layers=1, heads=2, d_ff=32, vocab=50, batch=4, src=6, tgt=5),
}


def load_sizes(name: str, changes: Sequence[str] = ()) -> Sizes:
    """Return the sizes with this name, after applying the given changes.

    Raises:
        UsageError: the name is unknown, or a change is invalid.
    """
    if name not in SIZES:
        raise UsageError(
            f"no sizes {name!r}{did_you_mean(name, SIZES)} (available: {', '.join(SIZES)})"
        )
    return SIZES[name].with_changes(changes)


def random_tokens(rng: np.random.Generator, vocab: int, *shape: int) -> np.ndarray:
    """Return random tokens, excluding special tokens."""
    return rng.integers(UNKNOWN + 1, vocab, shape, dtype=np.int32)


def full_batch(sizes: Sizes) -> Batch:
    """Return a batch without padding. Calls with equal sizes return equal batches."""
    rng = np.random.default_rng(0)
    source = random_tokens(rng, sizes.vocab, sizes.batch, sizes.src)
    return Batch(source, random_tokens(rng, sizes.vocab, sizes.batch, sizes.tgt))


def count_target_tokens(batch: Batch) -> int:
    """Return the number of target tokens, excluding padding."""
    return int((batch.target != PAD).sum())


def save_batches(path: Path, batches: Sequence[Batch]) -> str:
    """Save batches for workers to read, and return the path."""
    arrays = {f"{i}.{side}": getattr(b, side) for i, b in enumerate(batches) for side in b._fields}
    np.savez(path, allow_pickle=False, **arrays)
    return str(path)


def text_batches(config: Config, tokens: int, *, shapes: int, count: int) -> list[Batch]:
    """Return batches of a config's text, restricted to the most common shapes.

    Args:
        config: the config that specifies the text.
        tokens: the minimum average number of target tokens per batch. Batches from a small text can
            have fewer target tokens.
        shapes: the maximum number of shapes. Each shape requires one compilation.
        count: the maximum number of batches.
    """
    from transformer_jax.data.prepare import prepare_text

    text = prepare_text(config.data).tokens("train")
    room = tokens
    while True:
        batches = Batches(*text, batch_tokens=room, seed=config.train.seed)
        selected = _most_common(batches, shapes, count)
        mean = sum(map(count_target_tokens, selected)) / len(selected)
        if mean >= tokens or batches.per_epoch == len(batches.buckets):
            return selected
        # `batch_tokens` counts padding but `tokens` does not, so increase `batch_tokens`.
        room = round(room * min(2.0, 1.01 * tokens / mean)) + 1


def _most_common(batches: Batches, shapes: int, count: int) -> list[Batch]:
    """Return the first `count` batches of an epoch whose shapes are among the most common.

    `shapes` is the number of shapes to keep. The function keeps the shapes whose batches have the
    most positions in total.
    """
    most = sorted(batches.buckets, key=lambda s: -s.batches * s.rows * (s.source + s.target))
    wanted = {shape[:3] for shape in most[:shapes]}
    every = (batches[step] for step in range(batches.per_epoch))
    matching = (b for b in every if (*b.source.shape, b.target.shape[1]) in wanted)
    return list(itertools.islice(matching, count))


def text_sources(config: Config, count: int) -> list[list[int]]:
    """Return the tokens, including EOS, of each of the first `count` source sentences."""
    from transformer_jax.data.prepare import prepare_text

    source, _ = prepare_text(config.data).tokens("train")
    chosen = range(min(count, len(source.offsets) - 1))
    return [source.flat[source.offsets[i] : source.offsets[i + 1]].tolist() for i in chosen]


def random_sources(sizes: Sizes, count: int, length: int) -> list[list[int]]:
    """Return random sources of `length` tokens, plus EOS."""
    rows = random_tokens(np.random.default_rng(0), sizes.vocab, count, length)
    return [[*row, EOS] for row in rows.tolist()]
