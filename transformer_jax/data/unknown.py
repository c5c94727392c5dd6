"""Report text that is missing from a vocabulary. Models read such text as the unknown token."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from transformer_jax.data.batches import Ragged
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.progress import note
from transformer_jax.special_tokens import UNKNOWN

# If more than this fraction of the tokens are unknown, the text is probably of the wrong kind.
MANY_UNKNOWN = 0.03
# The maximum number of lines to search for examples, and the maximum number of examples in a note.
MAX_SEARCHED = 1000
MAX_EXAMPLES = 4


def note_unknown(
    title: str, tokenizer: Tokenizer, lines: Sequence[str] = (), tokens: Ragged | None = None
) -> None:
    """If a text contains unknown tokens, issue a note that states how many.

    The tokens default to the encoded lines. If the lines are given, the note contains examples.
    """
    tokens = Ragged.from_lists(tokenizer.encode(lines)) if tokens is None else tokens
    places = np.flatnonzero(tokens.flat == UNKNOWN)
    if not len(places):
        return
    affected = np.unique(np.searchsorted(tokens.offsets, places, side="right") - 1)
    # The end-of-sentence tokens do not count, because every line has one.
    share = len(places) / max(1, len(tokens.flat) - len(tokens.lengths))
    examples = _find_examples(
        tokenizer, [lines[i] for i in affected[:MAX_SEARCHED]] if lines else []
    )
    advice = (
        "; with a share this large, the language, the encoding, or the whitespace may be wrong "
        "(see data.normalization)"
        if share > MANY_UNKNOWN
        else ""
    )
    note(
        f"{title}: {len(affected):,} of {len(tokens.lengths):,} lines contain text that the "
        f"vocabulary lacks, so {share:.2%} of the tokens are unknown{examples}{advice}"
    )


def _find_examples(tokenizer: Tokenizer, lines: Sequence[str]) -> str:
    """Return the most frequent unknown strings, formatted as the end of a clause."""
    counts = Counter(
        text.strip("▁")
        for line, ids in zip(lines, tokenizer.encode(lines), strict=True)
        # The end-of-sentence token has no text.
        for text, token in zip(tokenizer.split(line), ids, strict=False)
        if token == UNKNOWN
    )
    shown = ", ".join(_describe(text) for text, _ in counts.most_common(MAX_EXAMPLES))
    more = ", ..." if len(counts) > MAX_EXAMPLES else ""
    return f": {shown}{more}" if shown else ""


def _describe(text: str) -> str:
    """Return the text in quotation marks. For a single character, add the code point."""
    code = f" (U+{ord(text):04X})" if len(text) == 1 else ""
    return f"{text[:20]!r}{code}"
