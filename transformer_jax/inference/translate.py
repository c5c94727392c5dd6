"""Translate lines independently of each other (section 6.1).

Each sentence is padded to a width that depends only on its own length, and each batch has a fixed
number of rows. The other sentences in a batch therefore cannot affect a translation, and the search
is compiled once for each width.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int

from transformer_jax import progress
from transformer_jax.backend import standard_settings
from transformer_jax.config import DecodeConfig
from transformer_jax.data.batches import Ragged
from transformer_jax.data.tokenizer import Vocabulary
from transformer_jax.data.unknown import note_unknown
from transformer_jax.errors import DataError, Setting, UsageError, memory_errors
from transformer_jax.inference.sampling import NEVER_DRAWN, Sampling, draw_tokens, identify_draw
from transformer_jax.inference.search import NEG_INF, Translations, beam_search, greedy_search
from transformer_jax.model.encoder_decoder import EncoderDecoder, Params
from transformer_jax.special_tokens import EOS, PAD

# The number of rows in a batch whose width is at most `FULL_WIDTH`. The number depends only on the
# width, so that XLA compiles only one program per width. Attention's memory is proportional to the
# number of rows and to the square of the width.
ROWS, FULL_WIDTH = 32, 1024
# The minimum padded width of a source, so that short sources share one compiled program.
MIN_WIDTH = 16


class Hypothesis(NamedTuple):
    """A translation and its score."""

    text: str
    score: float
    """The log-probability in nats, divided by the length penalty in a beam search."""


class Sentence(NamedTuple):
    """A sentence to translate."""

    source: list[int]
    prefix: list[int] | None = None
    """The tokens with which the translation must begin. All sentences of a batch have a prefix, or
    none has one, because they need different programs."""
    sample: int = 0
    """The number of the sample, if the translation is drawn at random."""


def padded_length(length: int, longest: int | None) -> int:
    """Round a length up to a power of two, limited to the range `MIN_WIDTH` to `longest`."""
    padded = max(MIN_WIDTH, 1 << (length - 1).bit_length())
    return padded if longest is None else min(padded, longest)


def fit_tokens(tokens: list[int], longest: int | None) -> list[int]:
    """Return at most `longest` tokens, of which the last is `EOS`."""
    return tokens if longest is None or len(tokens) <= longest else [*tokens[: longest - 1], EOS]


def count_rows(width: int) -> int:
    """Return the number of rows in a batch: `ROWS`, or fewer if the batch is very wide."""
    return max(1, ROWS * FULL_WIDTH**2 // max(width, FULL_WIDTH) ** 2)


def group_by_width(widths: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    """Yield each width in ascending order, with the indices of the rows of one batch."""
    by_width: dict[int, list[int]] = {}
    for index, width in enumerate(widths):
        by_width.setdefault(width, []).append(index)
    for width, indices in sorted(by_width.items()):
        num_rows = count_rows(width)
        for start in range(0, len(indices), num_rows):
            yield width, indices[start : start + num_rows]


@functools.partial(jax.jit, static_argnums=(0, 1, 2), static_argnames="sampling")
def translate_batch(
    model: EncoderDecoder,
    config: DecodeConfig,
    num_best: int,
    params: Params,
    source: Int[Array, "B S"],
    limit: Int[Array, " B"],
    prefix: Int[Array, "B L"] | None = None,
    draws: Int[Array, "B 3"] | None = None,
    sampling: Sampling | None = None,
    alpha: ArrayLike | None = None,
) -> Translations:
    """Translate a batch. All checkpoints of a model use the same compiled program.

    `limit` is the maximum length of each translation. No limit may exceed S +
    `config.max_extra_length` or the number of positions that the decoder can read. L is S +
    `config.max_extra_length`. The program does not check the limits or the token IDs; `Translator`
    keeps them in range. `sampling` and `draws` (see `draw_tokens`) replace greedy search. `alpha`
    replaces `config.length_penalty_alpha`; all values of `alpha` share a compiled program.
    """
    beam_size, max_length = config.beam_size, source.shape[1] + config.max_extra_length
    apply: Any = functools.partial(model.apply, {"params": params})
    sizes = {"num_hypotheses": beam_size, "max_length": max_length}
    state = apply(source, **sizes, method="init_decoding")
    step = functools.partial(apply, method="decode_step")
    start = model.config.decoder_start_id
    shared: dict[str, Any] = {
        "max_length": max_length,
        "start": start,
        "eos": EOS,
        # A model whose decoder starts with PAD must not generate PAD. In converted opus-mt models,
        # PAD was added after training, so its logit is untrained. All other models have learned not
        # to generate PAD.
        "suppress_tokens": (PAD,) if start == PAD else (),
        "prefix": prefix,
    }
    if sampling is not None and draws is not None:
        choose = functools.partial(draw_tokens, sampling, draws)
        shared |= {"suppress_tokens": NEVER_DRAWN, "choose": choose}
    if beam_size == 1:
        return greedy_search(step, state, limit, **shared)
    return beam_search(
        step,
        state,
        limit,
        beam_size=beam_size,
        alpha=config.length_penalty_alpha if alpha is None else alpha,
        length_penalty=config.length_penalty,
        beam_end=config.beam_end,
        num_best=num_best,
        **shared,
    )


class Translator:
    """A translator for one model and decode config; it compiles the search once per width."""

    def __init__(
        self,
        model: EncoderDecoder,
        vocabulary: Vocabulary,
        config: DecodeConfig,
        sampling: Sampling | None = None,
    ) -> None:
        """Store the arguments; with `sampling`, draw translations instead of searching.

        Raise a ValueError if the vocabulary does not have the size that the model expects.
        """
        # On a device, an out-of-range token ID does not raise an error.
        expected = model.source_vocab_size or model.vocab_size, model.vocab_size
        sizes = len(vocabulary.source), len(vocabulary.target)
        if sizes != expected:
            raise ValueError(f"the vocabulary has {sizes} tokens, but the model has {expected}")
        self.model, self.vocabulary, self.sampling = model, vocabulary, sampling
        self.config = config if sampling is None else replace(config, beam_size=1)
        self.longest_source, self.longest_target = model.config.max_lengths

    def check(
        self,
        lines: Sequence[str],
        *,
        num_best: int = 1,
        truncate: bool = False,
        prefixes: Sequence[str] | None = None,
    ) -> None:
        """Check the arguments to `translate`, and issue a note about text with unknown tokens.

        Raises a UsageError if `num_best` is not positive, or if it exceeds the beam size of a
        search. Also raises the same errors as `encode` and `encode_prefixes`.
        """
        if num_best < 1:
            raise UsageError(f"the number of translations must be positive, got {num_best}")
        if self.sampling is None and num_best > (beam_size := self.config.beam_size):
            raise UsageError(
                f"a beam of {beam_size} cannot return the {num_best} best translations; pass ",
                Setting("beam_size", num_best),
            )
        sources = self.encode(lines, truncate=truncate)
        note_unknown("the source", self.vocabulary.source, lines)
        self.encode_prefixes(prefixes, sources)
        note_unknown("the prefixes", self.vocabulary.target, prefixes or ())

    def encode(self, lines: Sequence[str], *, truncate: bool = False) -> list[list[int]]:
        """Return the tokens in each line, including `eos`. A blank line has no tokens.

        Raises:
            UsageError: `lines` is a single string.
            DataError: a line is not valid text, or it is too long for the model and `truncate` is
                false.
        """
        if isinstance(lines, str):
            raise UsageError("translate needs a list of lines, not a single string")
        lines = list(lines)
        for number, line in enumerate(lines, start=1):
            check_text(f"line {number}", line)
        longest, max_length = self.longest_source, self.model.config.max_length
        field = "model.max_positions" if longest < max_length else "model.max_length"
        encoded = self.vocabulary.source.encode(lines)
        for number, tokens in enumerate(encoded, start=1):
            if len(tokens) > longest and not truncate:
                raise DataError(
                    f"line {number} has {len(tokens)} tokens, but the model reads at most "
                    f"{longest} ({field}): shorten the line, or pass ",
                    Setting("truncate", True),
                )
        # A blank line has no token except `eos`.
        return [fit_tokens(tokens, longest) if len(tokens) > 1 else [] for tokens in encoded]

    def encode_target(self, line: str, *, truncate: bool = False) -> list[int]:
        """Return the tokens of a translation, including `eos`.

        Raises:
            DataError: the line is blank or not valid text, or it is too long for the model and
                `truncate` is false.
        """
        check_text("the target sentence", line)
        [tokens] = self.vocabulary.target.encode([line])
        longest = self.longest_target
        if len(tokens) == 1:
            raise DataError("the target sentence is blank: it needs at least one token")
        if longest is not None and len(tokens) > longest and not truncate:
            raise DataError(
                f"the target sentence has {len(tokens)} tokens, but the model reads at most "
                f"{longest} (model.max_positions): shorten the sentence, or pass ",
                Setting("truncate", True),
            )
        return fit_tokens(tokens, longest)

    def encode_prefixes(
        self, prefixes: Sequence[str] | None, sources: Sequence[list[int]]
    ) -> Sequence[list[int] | None]:
        """Return the tokens with which the translation of each encoded source must begin, if any.

        Raises:
            UsageError: the numbers of prefixes and sources differ.
            DataError: a prefix is too long for a translation of its source.
        """
        if prefixes is None:
            return [None] * len(sources)
        if len(prefixes) != len(sources):
            raise UsageError(
                f"the numbers of lines and prefixes differ: {len(sources)} and {len(prefixes)}"
            )
        encoded = [tokens[:-1] for tokens in self.vocabulary.target.encode(list(prefixes))]
        for number, (tokens, source) in enumerate(zip(encoded, sources, strict=True), start=1):
            if tokens and not source:
                raise DataError(f"line {number} is blank, so prefix {number} must be blank, too")
            longest = self.limit(len(source)) - 1
            if tokens and len(tokens) > longest:
                raise DataError(
                    f"prefix {number} has {len(tokens)} tokens, but a translation of line {number} "
                    f"has at most {longest}: shorten the prefix"
                )
        return encoded

    def width(self, length: int) -> int:
        """Return the padded length of a source sentence."""
        return padded_length(length, self.longest_source)

    def limit(self, length: int) -> int:
        """Return the maximum length of a source's translation, including `eos` (section 6.1).

        A learned position table can lower this limit.
        """
        limit = length + self.config.max_extra_length
        return limit if self.longest_target is None else min(limit, self.longest_target)

    def translate(
        self,
        params: Params,
        lines: Sequence[str],
        *,
        num_best: int = 1,
        truncate: bool = False,
        prefixes: Sequence[str] | None = None,
    ) -> list[list[Hypothesis]]:
        """Return up to `num_best` translations of each line, or exactly as many samples.

        A blank line gets one empty translation, or as many empty samples. This method advances the
        current task (see `progress.task`) by the number of finished lines or samples. The errors
        are those of `encode`, `encode_prefixes`, and `translate_batches`.
        """
        sources = self.encode(lines, truncate=truncate)
        copies, num_best = (1, num_best) if self.sampling is None else (num_best, 1)
        pairs = zip(sources, self.encode_prefixes(prefixes, sources), strict=True)
        sentences = [Sentence(*pair, sample) for pair in pairs for sample in range(copies)]
        found = [[Hypothesis("", 0.0)]] * len(sentences)
        progress.advance(sum(not sentence.source for sentence in sentences))
        for indices, best in self.translate_batches(params, sentences, num_best):
            for index, tokens, scores in zip(indices, best.tokens, best.scores, strict=False):
                found[index] = self._decode(tokens[:num_best], scores[:num_best])
            progress.advance(len(indices))
        starts = range(0, len(found), copies)
        return [list(itertools.chain(*found[i : i + copies])) for i in starts]

    def translate_batches(
        self, params: Params, sentences: Sequence[Sentence], num_best: int
    ) -> Iterator[tuple[list[int], Translations]]:
        """Group sentences by width; yield the indices and translations of each batch.

        This method skips blank sources. The arrays of translations may have more rows than
        the batch has indices.

        Raises:
            OutOfMemoryError: the device does not have enough memory for a batch.
        """
        widths = [self.width(len(x.source)) if x.source else 0 for x in sentences]
        for width, batch in group_by_width(widths):
            if width:
                yield batch, self._search(params, [sentences[i] for i in batch], width, num_best)

    def translate_tokens(self, params: Params, source: list[int]) -> list[int]:
        """Return the tokens of the best translation of one encoded, nonblank source.

        The last token is `eos`. The search is the same as in `translate`.
        """
        width = self.width(len(source))
        tokens = self._search(params, [Sentence(source)], width, 1).tokens[0, 0]
        return [int(token) for token in tokens if token != PAD]

    def _search(
        self, params: Params, sentences: Sequence[Sentence], width: int, num_best: int
    ) -> Translations:
        """Translate the sentences of one batch; unused rows have a limit of 0."""
        num_rows = count_rows(width)
        limit = pad_rows([[self.limit(len(x.source))] for x in sentences], num_rows, 1)[:, 0]
        arrays = [pad_rows([x.source for x in sentences], num_rows, width), limit]
        extra: dict[str, Any] = {}
        if sentences[0].prefix is not None:
            prefixes = [x.prefix or [] for x in sentences]
            longest = width + self.config.max_extra_length
            extra["prefix"] = pad_rows(prefixes, num_rows, longest)
        if (sampling := self.sampling) is not None:
            draws = [identify_draw(sampling.seed, x.source, x.sample) for x in sentences]
            # All seeds and numbers of samples share a compiled program.
            extra |= {"draws": pad_rows(draws, num_rows, 3), "sampling": replace(sampling, seed=0)}
        count = f"{num_rows} sentence{'s' * (num_rows > 1)}"
        size = f"{count} of {width} tokens with a beam of {self.config.beam_size}"
        advice: list[str | Setting] = ["use a device with more memory"]
        if self.config.beam_size > 1:
            advice = ["try a smaller beam, such as ", Setting("beam_size", 1)]
        message = f"the device has too little memory for {size}: "
        with memory_errors(message, *advice), standard_settings(self.model.config.dtype):
            # All values of these two settings share a compiled program.
            config = replace(self.config, length_penalty_alpha=0.0, average_checkpoints=1)
            extra["alpha"] = np.float32(self.config.length_penalty_alpha)
            best = translate_batch(self.model, config, num_best, params, *arrays, **extra)
            return jax.device_get(best)

    def _decode(
        self, tokens: Int[np.ndarray, "J L"], scores: Float[np.ndarray, " J"]
    ) -> list[Hypothesis]:
        """Return one sentence's hypotheses (at least one), without the empty slots."""
        texts = self.vocabulary.target.decode(tokens.tolist())
        # If the model computes NaN, no score is above NEG_INF / 2, but callers expect at least one
        # translation.
        return [
            Hypothesis(text, float(score))
            for rank, (text, score) in enumerate(zip(texts, scores, strict=True))
            if rank == 0 or score > NEG_INF / 2
        ]


def pad_rows(rows: Sequence[Sequence[int]], num_rows: int, width: int) -> Int[np.ndarray, "B W"]:
    """Return an array with the given rows, padded with zeros."""
    return Ragged.from_lists(rows).pad(np.arange(len(rows)), num_rows, width)


def choose_minimum_risk(samples: Sequence[Hypothesis]) -> Hypothesis:
    """Return the first sample with the highest mean chrF against all samples."""
    from sacrebleu import CHRF

    chrf, counts = CHRF(), Counter(sample.text for sample in samples)
    gains = {
        text: sum(n * chrf.sentence_score(text, [other]).score for other, n in counts.items())
        for text in counts
    }
    return max(samples, key=lambda sample: gains[sample.text])


def strip_lines(lines: Iterable[str], name: str) -> list[str]:
    """Return lines without their line endings, for example the lines of an open file."""
    checked = list(lines)
    for number, line in enumerate(checked, start=1):
        check_text(f"{name} {number}", line)
    return [line.removesuffix("\n").removesuffix("\r") for line in checked]


def check_text(name: str, line: object) -> None:
    """Raise an error if a line is not a string, or contains surrogates (invalid UTF-8 bytes)."""
    if not isinstance(line, str):
        raise UsageError(f"{name} must be a string, got {line!r}")
    try:
        line.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{name} is not UTF-8: see character {error.start + 1}") from error
