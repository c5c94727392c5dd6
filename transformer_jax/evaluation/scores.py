"""Translation scores: BLEU, chrF, and the paper's compound-split BLEU (section 6.1)."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import sacrebleu

from transformer_jax.errors import DataError
from transformer_jax.optional import require_library
from transformer_jax.progress import note

# The paper's script treats text as bytes, so only ASCII whitespace separates words.
COMPOUND = re.compile(r"(\S)-(\S)", re.ASCII)
# The characters of scripts that do not separate words with spaces.
HAN = re.compile(
    "[\u2e80-\u2fdf\u3005-\u3007\u3021-\u3029\u3100-\u312f\u31a0-\u31bf\u3400-\u4dbf"
    "\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)
KANA = re.compile("[\u3040-\u30ff\u31f0-\u31ff\uff66-\uff9f]")
# The other scripts are Thai, Lao, Tibetan, Burmese, Khmer, Tai Le, New Tai Lue, Lanna, Tai Viet,
# Balinese, Javanese, and Yi.
OTHERS = re.compile(
    "[\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u1950-\u19ff\u1a20-\u1aaf\u1b00-\u1b7f"
    "\ua000-\ua4cf\ua980-\ua9ff\uaa60-\uaadf]"
)
# In Japanese text, kana make up more than this fraction of the characters.
MIN_KANA = 0.05
# The libraries that sacreBLEU's tokenizers for Japanese and Korean require.
LIBRARIES = {"ja-mecab": "MeCab", "ko-mecab": "mecab_ko"}
# BLEU counts n-grams of up to this many words.
MAX_ORDER = 4
# If less than this fraction of references have `MAX_ORDER` or more words, BLEU is not informative.
MIN_LONG_REFERENCES = 0.1


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
        lengths = f"{words:,} words, {expected:,} in the references"
        return f"{precisions} BP {self.brevity_penalty:.3f} ({lengths})"


def choose_tokenizer(name: str, references: Sequence[str]) -> str:
    """Return the name of sacreBLEU's tokenizer, which depends on the references if it is "auto".

    If most letters belong to scripts that do not separate words with spaces, the tokenizer is "zh"
    for Chinese and "char" for other languages. Otherwise, the tokenizer is "13a".
    """
    if name != "auto":
        return name
    text = "".join(references)
    han, kana, others = (len(pattern.findall(text)) for pattern in (HAN, KANA, OTHERS))
    unspaced = han + kana + others
    # Vowel signs of the other scripts are not letters, so do not count all letters at once.
    rest = OTHERS.sub("", KANA.sub("", HAN.sub("", text)))
    if unspaced <= sum(map(str.isalpha, rest)):
        return "13a"
    return "zh" if han > others and kana < MIN_KANA * unspaced else "char"


def check_tokenizer(name: str, references: Sequence[str]) -> None:
    """Check that BLEU can be computed, and issue a note if it will not be very informative."""
    tokenizer = choose_tokenizer(name, references)
    if tokenizer in LIBRARIES:
        require_library(LIBRARIES[tokenizer])
    is_long = [len(line.split()) >= MAX_ORDER for line in references]
    if tokenizer in ("13a", "intl", "none") and sum(is_long) < MIN_LONG_REFERENCES * len(is_long):
        note(
            f"only {sum(is_long):,} of {len(is_long):,} references have {MAX_ORDER} or more words, "
            "so BLEU is not very informative: to split them into characters, set "
            "data.bleu_tokenizer to char"
        )


def sacrebleu_metrics(
    tokenizer: str, *, warn: bool = True
) -> tuple[sacrebleu.BLEU, sacrebleu.CHRF]:
    """Return a BLEU and a chrF metric. With `warn`, BLEU warns about tokenized text."""
    force = tokenizer == "none" or not warn
    return sacrebleu.BLEU(tokenize=tokenizer, force=force), sacrebleu.CHRF()


def bleu_signature(tokenizer: str) -> str:
    """Return the sacreBLEU signature for BLEU with this tokenizer and one reference."""
    bleu, _ = sacrebleu_metrics(tokenizer, warn=False)
    # The signature contains the number of references only after a score has been computed.
    bleu.corpus_score([""], [[""]])
    return str(bleu.get_signature())


def score(
    hypotheses: Sequence[str], references: Sequence[str], *, tokenizer: str = "auto"
) -> Scores:
    """Score translations with sacreBLEU, using one reference per translation.

    Raise a DataError if the numbers of lines differ or are 0, because sacreBLEU may then return
    100.
    """
    if len(hypotheses) != len(references) or not references:
        raise DataError(
            f"cannot score {len(hypotheses)} translations with {len(references)} references"
        )
    bleu, chrf = sacrebleu_metrics(choose_tokenizer(tokenizer, references))
    bleu_score = bleu.corpus_score(hypotheses, [references])
    chrf_score = chrf.corpus_score(hypotheses, [references])
    pairs = zip(hypotheses, references, strict=True)
    return Scores(
        sentences=len(references),
        # A model cannot generate repeated spaces, or spaces at the ends.
        exact=float(np.mean([" ".join(h.split()) == " ".join(r.split()) for h, r in pairs])),
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

    Moses replaces Unicode punctuation and tokenizes the text, except with the tokenizer "none". The
    text is then split at hyphens. As in `multi-bleu.perl`, there is no smoothing. Return None if
    `tokenizer` splits text into characters or is for a language without hyphenated compounds.
    """
    if tokenizer not in ("13a", "intl", "none"):
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
