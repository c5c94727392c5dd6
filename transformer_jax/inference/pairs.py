"""Run a model on given translations, for example to compute each token's log-probability.

The decoder reads the target instead of choosing tokens, as in training (section 3.1). Each pair is
padded to a width that depends only on its own length, so its results do not depend on other pairs,
and each function is compiled once per width.

Shapes: B pairs in a batch, S source positions, T target positions.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float

from transformer_jax import progress
from transformer_jax.backend import standard_settings
from transformer_jax.data.batches import Batch, Ragged
from transformer_jax.data.tokenizer import Vocabulary
from transformer_jax.data.unknown import note_unknown
from transformer_jax.errors import DataError, UsageError, memory_errors
from transformer_jax.inference.translate import (
    Translator,
    count_rows,
    fit_tokens,
    group_by_width,
    padded_length,
    strip_lines,
)
from transformer_jax.model.encoder_decoder import EncoderDecoder, Params
from transformer_jax.model.operations import sum_dtype, summarize

Pair = tuple[Ragged, Ragged]
"""The tokens of the sources and of the targets. Each sentence ends with `EOS`."""


def encode_pair(
    translator: Translator, params: Params, source: str, target: str | None, *, truncate: bool
) -> tuple[list[int], list[int]]:
    """Return the tokens of a sentence pair.

    If `target` is None, the target consists of the tokens that the search returned for the best
    translation. Encoding its text again can give different tokens. If the model computes NaN, the
    target is empty.
    """
    translator.check([source], truncate=truncate)
    [source_ids] = translator.encode([source], truncate=truncate)
    if not source_ids:
        raise DataError("the source sentence is blank: it needs at least one token")
    if target is None:
        return source_ids, translator.translate_tokens(params, source_ids)
    target_ids = translator.encode_target(target, truncate=truncate)
    note_unknown("the target", translator.vocabulary.target, [target])
    return source_ids, target_ids


def pad_pair(model: EncoderDecoder, source: list[int], target: list[int]) -> Batch:
    """Return a batch with one row, in which the width of each side depends only on that side."""
    sides = zip((source, target), model.config.max_lengths, strict=True)
    return Batch(
        *(
            Ragged.from_lists([tokens]).pad(np.array([0]), 1, padded_length(len(tokens), longest))
            for tokens, longest in sides
        )
    )


class PairScore(NamedTuple):
    """How likely a translation is, given its source."""

    tokens: tuple[str, ...]
    """The target's tokens, ending in `<EOS>`. "▁" marks the start of a word."""
    log_probs: Float[np.ndarray, " T"]
    """ln P(token | source, earlier tokens) for each token, in nats."""

    @property
    def log_prob(self) -> float:
        """The sum over all tokens: ln P(target | source), in nats."""
        return math.fsum(self.log_probs)


def read_pairs(sources: Iterable[str], targets: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return parallel lines without line endings."""
    sides = strip_lines(sources, "source"), strip_lines(targets, "target")
    if len(sides[0]) != len(sides[1]):
        numbers = " and ".join(str(len(side)) for side in sides)
        raise UsageError(f"the numbers of sources and targets differ: {numbers}")
    return sides


def encode_pairs(
    model: EncoderDecoder,
    vocabulary: Vocabulary,
    sources: Iterable[str],
    targets: Iterable[str],
    *,
    truncate: bool = False,
) -> Pair:
    """Return the tokens of parallel lines, and issue notes about unknown tokens."""
    sources, targets = read_pairs(sources, targets)
    encoded: list[Ragged] = []
    longest = model.config.max_lengths
    for side, lines, tokenizer, limit in zip(
        ("source", "target"), (sources, targets), vocabulary, longest, strict=True
    ):
        tokens = tokenizer.encode(lines)
        note_unknown(f"the {side}", tokenizer, lines, Ragged.from_lists(tokens))
        if truncate:
            tokens = [fit_tokens(x, limit) for x in tokens]
        encoded.append(Ragged.from_lists(tokens))
    check_lengths(("the sources", "the targets"), encoded, longest)
    return encoded[0], encoded[1]


def check_lengths(
    names: Sequence[str], sides: Sequence[Ragged], longest: tuple[int, int | None]
) -> None:
    """Raise a DataError for the first line that is too long for the model, on either side."""
    for name, side, verb, limit in zip(names, sides, ("reads", "writes"), longest, strict=True):
        for number, length in enumerate(side.lengths.tolist(), start=1):
            if limit is not None and length > limit:
                raise DataError(
                    f"{name}, line {number}: {length} tokens, but the model {verb} at most {limit}"
                )


Program = Callable[[EncoderDecoder, Params, Batch], Array]
"""A compiled function whose result has one row for each row of the batch."""


def run_on_pairs(
    program: Program, model: EncoderDecoder, params: Params, pairs: Pair
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield each pair's index and its row of the program's result, and advance the current task."""
    lengths = np.maximum(*(side.lengths for side in pairs)).tolist()
    for width, indices in group_by_width([padded_length(length, None) for length in lengths]):
        num_rows = count_rows(width)
        sides = (
            side.pad(np.array(indices), num_rows, width if limit is None else min(width, limit))
            for side, limit in zip(pairs, model.config.max_lengths, strict=True)
        )
        size = f"{num_rows} pair{'s' * (num_rows > 1)} of {width} tokens"
        message = f"the device has too little memory for {size}: "
        with (
            memory_errors(message, "use a device with more memory"),
            standard_settings(model.config.dtype),
        ):
            rows = jax.device_get(program(model, params, Batch(*sides)))
        yield from zip(indices, rows, strict=False)
        progress.advance(len(indices))


@functools.partial(jax.jit, static_argnums=0)
def _log_probs(model: EncoderDecoder, params: Params, batch: Batch) -> Float[Array, "B T"]:
    """Return the log-probability of each target token; the values for padding are meaningless."""
    logits: Any = model.apply({"params": params}, *batch)
    log_total, _, target_logit = summarize(logits.astype(sum_dtype(logits)), batch.target)
    return target_logit - log_total


def token_log_probs(
    model: EncoderDecoder, params: Params, pairs: Pair
) -> list[Float[np.ndarray, " _"]]:
    """Return the log-probability, in nats, of each target token of each pair."""
    lengths = pairs[1].lengths
    found = [np.zeros(0)] * len(lengths)
    for index, log_probs in run_on_pairs(_log_probs, model, params, pairs):
        found[index] = log_probs[: lengths[index]]
    return found


def score_pairs(
    model: EncoderDecoder,
    params: Params,
    vocabulary: Vocabulary,
    sources: Iterable[str],
    targets: Iterable[str],
) -> list[PairScore]:
    """Return the score of each pair of lines, in order."""
    pairs = encode_pairs(model, vocabulary, sources, targets)
    target = pairs[1]
    starts = zip(target.offsets[:-1], target.offsets[1:], strict=True)
    texts = [tuple(vocabulary.target.to_texts(target.flat[i:j].tolist())) for i, j in starts]
    log_probs = token_log_probs(model, params, pairs)
    return [PairScore(*values) for values in zip(texts, log_probs, strict=True)]
