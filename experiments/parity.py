"""Compare how a run and its exports to CTranslate2 translate the run's test set.

    python -m experiments.parity RUN FOLDER [FOLDER ...]

The first folder must contain a float32 export. Both programs use the same beam size and the length
penalty length^0.6. The programs end a search by different rules, so either one can find the better
translation. CTranslate2 ends a search after beam_size x patience finished hypotheses. To make the
scores comparable, the model in the first folder scores all translations.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import ctranslate2
import sentencepiece

from transformer_jax.data.corpora import CORPORA
from transformer_jax.inference.trained_run import Run, load

ALPHA = 0.6
# Pairs of a beam size and CTranslate2's patience, whose default is 1.
SEARCHES = ((1, 1), (4, 1), (4, 2))


class Counts(NamedTuple):
    """The number of equal translations, and the number of times that each program scores higher."""

    equal: int
    ours_higher: int
    theirs_higher: int
    tied: int
    """The number of different translations with equal scores."""


class Folder:
    """A model exported to CTranslate2."""

    def __init__(self, path: Path) -> None:
        self.source, self.target = (
            sentencepiece.SentencePieceProcessor(str(path / f"{side}.spm"))
            for side in ("source", "target")
        )
        self.translator = ctranslate2.Translator(str(path), intra_threads=1)

    def translate(self, lines: Sequence[str], beam_size: int, patience: float) -> list[str]:
        """Return the best translation of each line."""
        results = self.translator.translate_batch(
            self.source.encode(list(lines), out_type=str),
            beam_size=beam_size,
            patience=patience,
            length_penalty=ALPHA,
            max_batch_size=32,
        )
        return self.target.decode([result.hypotheses[0] for result in results])

    def scores(self, lines: Sequence[str], translations: Sequence[str]) -> list[float]:
        """Return the log-probability of each translation divided by length^0.6."""
        pieces = self.target.encode(list(translations), out_type=str)
        sources = self.source.encode(list(lines), out_type=str)
        results = self.translator.score_batch(sources, pieces, max_batch_size=32)
        return [sum(r.log_probs) / len(r.log_probs) ** ALPHA for r in results]


def compare(run: Run, exact: Folder, folder: Folder, beam_size: int, patience: float) -> Counts:
    """Compare the translations of the test set, and print the differing ones with their scores."""
    lines = [source for source, _ in CORPORA[run.config.data.corpus](run.config.data).read("test")]
    options = {"length_penalty": "power", "length_penalty_alpha": ALPHA}
    ours = run.translate(lines, beam_size=beam_size, **options)
    theirs = folder.translate(lines, beam_size, patience)
    different = [i for i, pair in enumerate(zip(ours, theirs, strict=True)) if len(set(pair)) > 1]
    sources = [lines[i] for i in different]
    scores = [exact.scores(sources, [x[i] for i in different]) for x in (ours, theirs)]
    signs = []
    for i, our_score, their_score in zip(different, *scores, strict=True):
        print(f"{lines[i]}\n  {our_score:.6f} {ours[i]}\n  {their_score:.6f} {theirs[i]}")
        signs.append((our_score > their_score) - (our_score < their_score))
    counts = (signs.count(sign) for sign in (1, -1, 0))
    return Counts(len(lines) - len(different), *counts)


def main() -> None:
    """Print one row of a Markdown table for each folder and search."""
    run = load(sys.argv[1], average_checkpoints=1)
    paths = [Path(path) for path in sys.argv[2:]]
    folders = [Folder(path) for path in paths]
    print("| folder | beam | patience | equal | ours scores higher | theirs scores higher | tied |")
    print("|---|---|---|---|---|---|---|")
    for search in SEARCHES:
        for path, folder in zip(paths, folders, strict=True):
            counts = compare(run, folders[0], folder, *search)
            print(f"| {path.name} | {' | '.join(map(str, (*search, *counts)))} |")


if __name__ == "__main__":
    main()
