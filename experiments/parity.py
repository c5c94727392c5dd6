"""Compare how a run's model and its exports translate the run's test set.

    python -m experiments.parity RUN

This command exports the run to every format and loads each export in a program that reads the
format. All programs use the same beam size, length penalty (length^0.6), and length limits. Each
program has a different rule for ending a beam search, so translations can differ. No program always
finds the best translation. To make the scores comparable, the float32 model in CTranslate2 scores
all translations, except in the comparison with the safetensors export. The safetensors export has
the same parameters as the run, so in that comparison, the run and the export each score their own
translations. The command prints a table of the results to standard output. For each line whose
translations differ, the command prints both translations and their scores to standard error.
"""

import functools
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from experiments.search_comparison import Difference, SearchComparison, compare_searches
from transformer_jax.console import run_and_report
from transformer_jax.data.corpora import CORPORA
from transformer_jax.inference.trained_run import Run, load
from transformer_jax.sharing.ctranslate2_format import export_ctranslate2, without_padding
from transformer_jax.sharing.marian_format import export_marian
from transformer_jax.sharing.packaging import export_safetensors, read_safetensors
from transformer_jax.sharing.verify import (
    CTranslate2System,
    MarianSystem,
    System,
    Translation,
    find_translations,
)

ALPHA = 0.6
BEAM_SIZES = (1, 4)
# CTranslate2 ends a beam search once beam_size x patience hypotheses have finished. The default
# patience is 1.
PATIENCES = (1, 2)

Compare = Callable[[int], SearchComparison]
"""A function that compares two programs' searches for a given beam size."""
Translate = Callable[[int], list[Translation]]
"""A function that returns a run's translations for a given beam size."""


def compare_exports(run: Run, lines: list[str], folder: Path) -> Iterator[tuple[str, Compare]]:
    """Export the run to new folders, and yield each export's name and comparison function."""
    export_ctranslate2(run, folder / "float32")
    export_ctranslate2(run, folder / "int8", "int8")
    export_marian(run, folder / "marian")
    export_safetensors(run, folder / "safetensors")
    exact = CTranslate2System(folder / "float32")
    ours = translate_once(run, lines)
    other = without_padding(run)
    unpadded = ours if other is run else translate_once(other, lines)

    def compare(translate: Translate, system: System, option: str) -> Compare:
        def compare_for(beam_size: int) -> SearchComparison:
            system.options |= {option: beam_size, "length_penalty": ALPHA}
            return compare_searches(system, lines, translate(beam_size), alpha=ALPHA, scorer=exact)

        return compare_for

    for quantization in ("float32", "int8"):
        for patience in PATIENCES:
            system = CTranslate2System(folder / quantization, quantization)
            system.options["patience"] = patience
            yield (
                f"ctranslate2 {quantization}, patience {patience}",
                compare(unpadded, system, "beam_size"),
            )
    yield "marian, float32", compare(ours, MarianSystem(folder / "marian"), "num_beams")
    again = translate_once(read_safetensors(folder / "safetensors"), lines)
    yield (
        "safetensors, float32",
        lambda beam_size: compare_translations(lines, ours(beam_size), again(beam_size)),
    )


def translate_once(run: Run, lines: list[str]) -> Translate:
    """Return a function that translates the lines only once for each beam size."""
    penalty = {"length_penalty": "power", "length_penalty_alpha": ALPHA}
    return functools.cache(
        lambda beam_size: find_translations(run, lines, beam_size=beam_size, **penalty)
    )


def compare_translations(
    lines: list[str], ours: list[Translation], theirs: list[Translation]
) -> SearchComparison:
    """Compare the translations of two runs."""
    differences = [
        Difference(line, one.tokens, two.tokens, one.score, two.score)
        for line, one, two in zip(lines, ours, theirs, strict=True)
        if one.tokens != two.tokens
    ]
    return SearchComparison(len(lines), differences)


def main() -> int:
    """Compare the run given on the command line with its exports, and return the exit code."""
    if len(sys.argv) != 2:
        print("usage: python -m experiments.parity RUN", file=sys.stderr)
        return 2
    return run_and_report(lambda: print_comparisons(load(sys.argv[1])))


def print_comparisons(run: Run) -> None:
    """Print one row of a Markdown table for each export and beam size."""
    data = run.config.data
    lines = [line for line, _ in CORPORA[data.corpus](data).read("test") if line.strip()]
    print("| exported as | beam size | equal | ours scores higher | theirs scores higher |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name, compare in compare_exports(run, lines, Path(folder)):
            for beam_size in BEAM_SIZES:
                comparison = compare(beam_size)
                counts = comparison.equal, comparison.ours_higher, comparison.theirs_higher
                row = [name, str(beam_size), *(f"{count:,}" for count in counts)]
                print(f"| {' | '.join(row)} |", flush=True)
                for line, ours, theirs, our_score, their_score in comparison.differences:
                    print(f"{name}, beam size {beam_size}: {line}", file=sys.stderr)
                    print(f"  {our_score:.6f} {''.join(ours)}", file=sys.stderr)
                    print(f"  {their_score:.6f} {''.join(theirs)}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
