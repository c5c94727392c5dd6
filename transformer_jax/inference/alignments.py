"""Word alignments from cross-attention, and their alignment error rate.

The attention of the decoder to the encoder (section 3.2.3) shows which source tokens the model
reads while it predicts a target token. `Run.align` describes how words are aligned and the format
of an alignment, and `alignment_error_rate` describes gold alignments.

Shapes: B pairs in a batch, L layers, H heads, K means over heads, T target positions.
"""

import functools
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from transformer_jax.config.validation import checked
from transformer_jax.data.batches import Batch
from transformer_jax.data.tokenizer import Tokenizer, Vocabulary
from transformer_jax.errors import DataError, UsageError
from transformer_jax.inference.pairs import encode_pairs, read_pairs, run_on_pairs
from transformer_jax.inference.translate import strip_lines
from transformer_jax.model.encoder_decoder import EncoderDecoder, Params
from transformer_jax.model.inspect import attention_weights
from transformer_jax.progress import note
from transformer_jax.special_tokens import EOS, PAD
from transformer_jax.visualization.attention_views import Selection

LINK = re.compile(r"(\d+)([-?p])(\d+)")
Link = tuple[int, int]
"""The indices of a source word and a target word, counted from 0."""


@functools.partial(jax.jit, static_argnums=0)
def _align_tokens(
    model: EncoderDecoder, params: Params, batch: Batch, *, means: Float[Array, "K H"]
) -> Int[Array, "B L K T"]:
    """For each mean over heads, return the source position with the largest mean weight."""
    weights = attention_weights(model, params, *batch)["cross"]
    is_word = (batch.source != PAD) & (batch.source != EOS)
    mean = jnp.einsum("lbhts,kh->blkts", weights.astype(jnp.float32), means)
    return jnp.argmax(jnp.where(is_word[:, None, None, None], mean, -1), axis=-1)


class Aligner(NamedTuple):
    """A model that aligns words."""

    model: EncoderDecoder
    params: Params
    vocabulary: Vocabulary

    def count_heads(self) -> tuple[int, int]:
        """Return the number of layers that attend to the source and the number of heads in each."""
        tokens = jnp.ones((1, 1), jnp.int32)
        program = functools.partial(attention_weights, self.model)
        weights = jax.eval_shape(program, self.params, tokens, tokens)
        if "cross" not in weights:
            raise UsageError("this model does not attend to the source")
        layers, _, heads, *_ = weights["cross"].shape
        return layers, heads

    def align(
        self,
        sources: Sequence[str],
        targets: Sequence[str],
        means: Float[np.ndarray, "K H"],
        *,
        truncate: bool = False,
    ) -> Iterator[tuple[int, list[list[set[Link]]]]]:
        """Yield the index of each pair, and its links for each layer and each mean over heads."""
        pairs = encode_pairs(self.model, self.vocabulary, sources, targets, truncate=truncate)
        program = functools.partial(_align_tokens, means=means.astype(np.float32))
        num_different = 0
        for index, choices in run_on_pairs(program, self.model, self.params, pairs):
            lines = sources[index], targets[index]
            source, target = (number_words(*x) for x in zip(self.vocabulary, lines, strict=True))
            counts = [max(words, default=-1) + 1 for words in (source, target)]
            num_different += counts != [len([*filter(None, line.split(" "))]) for line in lines]
            # The last token is `EOS`, which does not belong to any word. Truncation can remove
            # other tokens.
            length = int(pairs[1].lengths[index]) - 1 if source else 0
            links = [
                [
                    {(source[s], t) for s, t in zip(row[:length].tolist(), target, strict=False)}
                    for row in of_layer
                ]
                for of_layer in choices
            ]
            yield index, links
        if num_different:
            note(
                "number of pairs whose word count changes with normalization (data.normalization), "
                f"so that their alignments count the normalized words: {num_different}"
            )


def number_words(tokenizer: Tokenizer, line: str) -> list[int]:
    """Return the index of the word to which each token in a line belongs, without `EOS`."""
    starts = [token.startswith("▁") for token in tokenizer.split(line)]
    # The first token starts a word even if it does not have the mark, for example if it is a
    # language code.
    return (np.cumsum([True, *starts[1:]]) - 1).tolist() if starts else []


def align_pairs(
    aligner: Aligner,
    sources: Iterable[str],
    targets: Iterable[str],
    *,
    layer: int | None = None,
    heads: Collection[SupportsIndex] | None = None,
    truncate: bool = False,
) -> list[str]:
    """Return the alignment of each pair, in order. `Run.align` explains the arguments."""
    num_layers, num_heads = aligner.count_heads()
    sources, targets = read_pairs(sources, targets)
    layer = max(num_layers - 2, 0) if layer is None else layer
    chosen = Selection(layer=layer, heads=heads).resolve(num_layers, num_heads, 1)
    mean = np.isin(np.arange(num_heads), chosen.heads)[None] / len(chosen.heads)
    lines = [""] * len(sources)
    for index, layers in aligner.align(sources, targets, mean, truncate=truncate):
        [links] = layers[chosen.layer]
        lines[index] = " ".join(f"{source}-{target}" for source, target in sorted(links))
    return lines


def head_error_rates(
    aligner: Aligner, sources: Iterable[str], targets: Iterable[str], gold: Sequence[str]
) -> Float[np.ndarray, "L H"]:
    """Return the error rate of each head. `Run.alignment_error_rates` explains the arguments."""
    sources, targets = read_pairs(sources, targets)
    references = read_gold(gold, len(sources))
    for number, (reference, *lines) in enumerate(zip(references, sources, targets, strict=True), 1):
        pairs = zip(aligner.vocabulary, lines, strict=True)
        counts = [max(number_words(*pair), default=-1) + 1 for pair in pairs]
        for link in sorted(reference.possible):
            if link[0] >= counts[0] or link[1] >= counts[1]:
                raise DataError(
                    f"alignment {number}: link {link[0]}-{link[1]} is outside the lines, which "
                    f"have {counts[0]} and {counts[1]} words (words are counted from 0)"
                )
    rates = np.zeros(aligner.count_heads())
    aligned = dict(aligner.align(sources, targets, np.eye(rates.shape[1])))
    for layer, head in np.ndindex(*rates.shape):
        links = [aligned[i][layer][head] for i in range(len(sources))]
        rates[layer, head] = error_rate(links, references)
    return rates


class Gold(NamedTuple):
    """The links of a gold alignment. Each sure link is also possible."""

    sure: set[Link]
    possible: set[Link]


def read_gold(lines: Sequence[str], num_pairs: int) -> list[Gold]:
    """Read gold alignments, one for each pair."""
    if len(lines) != num_pairs:
        raise UsageError(
            f"the numbers of alignments and gold alignments differ: {num_pairs} and {len(lines)}"
        )
    lines = strip_lines(lines, "alignment")
    return [_read_links(line, number) for number, line in enumerate(lines, start=1)]


def _read_links(line: str, number: int) -> Gold:
    gold = Gold(set(), set())
    for text in line.split():
        if (link := LINK.fullmatch(text)) is None:
            raise DataError(
                f"alignment {number}: {text!r} is not a link such as 0-0 (sure) or 0?0 (possible)"
            )
        gold.possible.add((int(link[1]), int(link[3])))
        if link[2] == "-":
            gold.sure.add((int(link[1]), int(link[3])))
    return gold


@checked
def alignment_error_rate(alignments: Iterable[str], gold: Iterable[str]) -> float:
    """Return the alignment error rate of Och and Ney (2003), between 0 (best) and 1.

    The rate is 1 - (|A & S| + |A & P|) / (|A| + |S|), where A is the set of links in all
    alignments, S is the set of sure links, and P is the set of sure and possible links. Both
    arguments contain one line per sentence pair, such as "0-0 1-2", and can be open files. In
    `gold`, "1?2" or "1p2" is a possible link.

    Raises:
        UsageError: the numbers of lines differ.
        DataError: a line is not an alignment, or there are no links.
    """
    lines = list(alignments)
    found = [gold.possible for gold in read_gold(lines, len(lines))]
    return error_rate(found, read_gold(list(gold), len(lines)))


def error_rate(found: Sequence[set[Link]], gold: Sequence[Gold]) -> float:
    """Return the alignment error rate for sets of links."""
    total = sum(len(a) + len(g.sure) for a, g in zip(found, gold, strict=True))
    if not total:
        raise DataError("neither the alignments nor the gold alignments have links")
    pairs = zip(found, gold, strict=True)
    return 1 - sum(len(a & g.sure) + len(a & g.possible) for a, g in pairs) / total
