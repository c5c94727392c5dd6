"""Translation scores: BLEU, chrF, and the paper's compound-split BLEU (section 6.1)."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import sacrebleu

from transformer_jax.errors import DataError

# The paper's script treats text as bytes, so only ASCII whitespace separates words.
COMPOUND = re.compile(r"(\S)-(\S)", re.ASCII)


@dataclass(frozen=True)
class Scores:
    """Translation scores, with the sacreBLEU details needed for comparisons."""

    sentences: int
    exact: float
    """The fraction of translations that are identical to their reference."""
    bleu: float
    """BLEU, in percent."""
    bleu_signature: str
    precisions: list[float]
    """BLEU's n-gram precisions, in percent, for n from 1 to 4."""
    brevity_penalty: float
    lengths: list[int]
    """The total numbers of BLEU tokens in the translations and in the references."""
    chrf: float
    """chrF2, in percent."""
    chrf_signature: str

    @property
    def bleu_details(self) -> str:
        """One line with the precisions, brevity penalty, and lengths."""
        precisions = "/".join(f"{precision:.1f}" for precision in self.precisions)
        words, expected = self.lengths
        return f"{precisions} BP {self.brevity_penalty:.3f} ({words:,} for {expected:,} words)"


def sacrebleu_metrics(
    tokenizer: str, *, warn: bool = True
) -> tuple[sacrebleu.BLEU, sacrebleu.CHRF]:
    """Return a BLEU metric with this tokenizer, and a chrF metric.

    If `warn` is true, BLEU warns about text that is already tokenized.
    """
    force = tokenizer == "none" or not warn
    return sacrebleu.BLEU(tokenize=tokenizer, force=force), sacrebleu.CHRF()


def bleu_signature(tokenizer: str) -> str:
    """Return the sacreBLEU signature for BLEU with this tokenizer and one reference."""
    bleu, _ = sacrebleu_metrics(tokenizer, warn=False)
    # The signature contains the number of references only after a score has been computed.
    bleu.corpus_score([""], [[""]])
    return str(bleu.get_signature())


def score(
    hypotheses: Sequence[str], references: Sequence[str], *, tokenizer: str = "13a"
) -> Scores:
    """Score translations with sacreBLEU, using one reference per translation.

    Raises:
        DataError: the numbers of translations and references differ or are zero. For such input,
            sacreBLEU itself may return 100 or ignore a reference.
    """
    if len(hypotheses) != len(references) or not references:
        raise DataError(
            f"cannot score {len(hypotheses)} translations with {len(references)} references"
        )
    bleu, chrf = sacrebleu_metrics(tokenizer)
    bleu_score = bleu.corpus_score(hypotheses, [references])
    chrf_score = chrf.corpus_score(hypotheses, [references])
    return Scores(
        sentences=len(references),
        exact=float(np.mean([h == r for h, r in zip(hypotheses, references, strict=True)])),
        bleu=bleu_score.score,
        bleu_signature=str(bleu.get_signature()),
        precisions=list(bleu_score.precisions),
        brevity_penalty=bleu_score.bp,
        lengths=[bleu_score.sys_len, bleu_score.ref_len],
        chrf=chrf_score.score,
        chrf_signature=str(chrf.get_signature()),
    )


def compound_bleu(
    tokenizer: str, hypotheses: Sequence[str], references: Sequence[str]
) -> float | None:
    """Return BLEU computed as in the paper, which uses Tensor2Tensor's `get_ende_bleu.sh`.

    In hypotheses and references, punctuation is replaced as in Moses's
    `replace-unicode-punctuation.perl`, and the text is tokenized as in `tokenizer.perl -l de` and
    split at hyphens. BLEU is computed as in `multi-bleu.perl`, without smoothing. If `tokenizer`
    is "none", the text must already be tokenized. Return None if `tokenizer` splits text into
    characters, because no compounds remain.
    """
    if tokenizer in ("char", "zh"):
        return None
    sides = hypotheses, references
    if tokenizer != "none":
        from sacremoses import MosesPunctNormalizer, MosesTokenizer

        replace = MosesPunctNormalizer("de").replace_unicode_punct
        tokenize = MosesTokenizer("de").tokenize
        sides = tuple([" ".join(tokenize(replace(line))) for line in side] for side in sides)
    systems, expected = ([COMPOUND.sub(r"\1 ##AT##-##AT## \2", x) for x in side] for side in sides)
    bleu = sacrebleu.BLEU(tokenize="none", smooth_method="none", force=True)
    return bleu.corpus_score(systems, [expected]).score
