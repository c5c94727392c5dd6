"""From lines to lines: a translation depends on its sentence and on nothing else (section 6.1).

Sentences are padded to a width that each one's own length decides, and searched in batches of
a fixed number of rows. So the batch that a sentence shares changes nothing, and each width is
compiled once.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Int

from transformer_jax.config import DecodeConfig
from transformer_jax.data.tokenizer import Vocabulary
from transformer_jax.errors import DataError, OutOfMemoryError, is_out_of_memory
from transformer_jax.inference.search import NEG_INF, Translations, beam_search, greedy_search
from transformer_jax.model.decoding import decode_step, init_decoding
from transformer_jax.model.transformer import Params, Transformer
from transformer_jax.special_tokens import BOS, EOS

ROWS = 32
MIN_WIDTH = 16


class Hypothesis(NamedTuple):
    """A translation and its score: log-probability over length penalty.

    Of greedy search, which compares nothing, the log-probability itself.
    """

    text: str
    score: float


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def search(
    model: Transformer,
    config: DecodeConfig,
    num_best: int,
    params: Params,
    source: Int[Array, "B S"],
    limit: Int[Array, " B"],
) -> Translations:
    """Search translations of a batch; of one model this is compiled once for all checkpoints."""
    max_length = source.shape[1] + config.max_extra_length
    state = init_decoding(
        model, params, source, num_hypotheses=config.beam_size, max_length=max_length
    )
    step = functools.partial(decode_step, model, params)
    if config.beam_size == 1:
        return greedy_search(step, state, limit, max_length=max_length, bos=BOS, eos=EOS)
    return beam_search(
        step,
        state,
        limit,
        beam_size=config.beam_size,
        max_length=max_length,
        bos=BOS,
        eos=EOS,
        alpha=config.length_penalty_alpha,
        length_penalty=config.length_penalty,
        num_best=num_best,
    )


class Translator:
    """A model's search over lines, compiled at first use for each width of source."""

    def __init__(self, model: Transformer, vocabulary: Vocabulary, config: DecodeConfig) -> None:
        self.model = model
        self.vocabulary = vocabulary
        self.config = config
        self.longest_source, self.longest_target = model.config.max_lengths

    def encode(self, lines: Sequence[str], *, truncate: bool = False) -> list[list[int]]:
        """Return the pieces of each line, with their end; none for a blank one.

        Raises:
            DataError: a line is longer than the model reads, unless it may be truncated.
        """
        longest, limit = self.longest_source, "model.max_length"
        if longest < self.model.config.max_length:
            limit = "model.max_positions"
        encoded = self.vocabulary.source.encode(lines)
        for number, pieces in enumerate(encoded, start=1):
            if len(pieces) > longest and not truncate:
                raise DataError(
                    f"line {number} has {len(pieces)} pieces, and the model reads {longest} "
                    f"({limit}): shorten it, or allow --truncate"
                )
        # Each has its end already; one that is cut gets it anew.
        cut = [p if len(p) <= longest else [*p[: longest - 1], EOS] for p in encoded]
        return [pieces if len(pieces) > 1 else [] for pieces in cut]

    def width(self, length: int) -> int:
        """Return the padded length of a sentence: the next power of two, at most the longest."""
        return min(max(MIN_WIDTH, 1 << (length - 1).bit_length()), self.longest_source)

    def translate(
        self,
        params: Params,
        lines: Sequence[str],
        *,
        num_best: int = 1,
        truncate: bool = False,
        progress: Callable[[int], None] = lambda _: None,
    ) -> list[list[Hypothesis]]:
        """Return the best translations of each line, best first; a blank line's is empty.

        Args:
            params: of the model.
            lines: any number, of any length that the model reads.
            num_best: how many translations of each line, at most the beam's size.
            truncate: read the beginning of a line that is too long, in place of an error.
            progress: called after each batch with the number of lines done by it.

        Raises:
            DataError: as `encode` does.
        """
        sources = self.encode(lines, truncate=truncate)
        results = [[Hypothesis("", 0.0)] for _ in lines]
        by_width: dict[int, list[int]] = {}
        for index, source in enumerate(sources):
            if source:
                by_width.setdefault(self.width(len(source)), []).append(index)
        progress(sum(not source for source in sources))
        for width, indices in sorted(by_width.items()):
            for start in range(0, len(indices), ROWS):
                rows = indices[start : start + ROWS]
                found = self._batch(params, [sources[i] for i in rows], width, num_best)
                for index, hypotheses in zip(rows, found, strict=True):
                    results[index] = hypotheses
                progress(len(rows))
        return results

    def _batch(
        self, params: Params, sources: list[list[int]], width: int, num_best: int
    ) -> list[list[Hypothesis]]:
        """Translate at most `ROWS` sentences; rows that are not used have nothing to do."""
        source = np.zeros((ROWS, width), np.int32)
        limit = np.zeros(ROWS, np.int32)
        for row, pieces in enumerate(sources):
            source[row, : len(pieces)] = pieces
            limit[row] = len(pieces) + self.config.max_extra_length
        if self.longest_target is not None:
            limit = np.minimum(limit, self.longest_target)
        try:
            found = jax.device_get(search(self.model, self.config, num_best, params, source, limit))
        except jax.errors.JaxRuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemoryError(
                f"the device has no room for {ROWS} sentences of {width} pieces with a beam of "
                f"{self.config.beam_size}: try a smaller one, as --beam-size 1"
            ) from error
        return [
            [
                Hypothesis(text, float(score))
                for rank, (text, score) in enumerate(
                    zip(self.vocabulary.target.decode(best.tolist()), row_scores, strict=True)
                )
                # Where there are fewer than were asked for, but never none.
                if rank == 0 or score > NEG_INF / 2
            ]
            for best, row_scores in zip(
                found.tokens[: len(sources), :num_best],
                found.scores[: len(sources), :num_best],
                strict=True,
            )
        ]
