"""Model sizes and batches, shared by all workers."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from transformer_jax.config import Config
from transformer_jax.config.validation import did_you_mean
from transformer_jax.data.batches import Batch
from transformer_jax.errors import UsageError
from transformer_jax.special_tokens import EOS, PAD, UNKNOWN

# The special tokens and a few others.
MIN_VOCAB = 8


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
        if changed.get("vocab", self.vocab) < MIN_VOCAB:
            raise UsageError(f"--set vocab must be at least {MIN_VOCAB}, got {changed['vocab']}")
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


def text_sources(config: Config, count: int) -> list[list[int]]:
    """Return the tokens, including EOS, of each of the first `count` source sentences."""
    from transformer_jax.data.prepare import prepare_text

    source, _ = prepare_text(config.data).tokens("train")
    chosen = range(min(count, len(source.offsets) - 1))
    return [source.flat[source.offsets[i] : source.offsets[i + 1]].tolist() for i in chosen]


def random_sources(sizes: Sizes, count: int, length: int) -> list[list[int]]:
    """Return random sources of `length` tokens, plus EOS."""
    # Hugging Face's model uses the last token for padding.
    rows = random_tokens(np.random.default_rng(0), sizes.vocab - 1, count, length)
    return [[*row, EOS] for row in rows.tolist()]
