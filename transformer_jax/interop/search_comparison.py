"""Compare the greedy or beam searches of two programs on the same model (section 6.1).

Each program has its own rule for ending a beam search, so either one can find a better translation.
The same formula scores the translations of both programs.
"""

from collections.abc import Sequence
from typing import NamedTuple

from transformer_jax.inference.trained_run import Run
from transformer_jax.interop.verify import System, find_translations


class Difference(NamedTuple):
    """A line that the two programs translate differently."""

    line: str
    ours: list[str]
    """The tokens of this package's translation."""
    theirs: list[str]
    """The tokens of the other program's translation."""
    our_score: float
    their_score: float


class SearchComparison(NamedTuple):
    """The result of a comparison of two searches."""

    lines: int
    """The number of lines."""
    differences: list[Difference]

    @property
    def equal(self) -> int:
        """The number of lines for which both programs return the same tokens."""
        return self.lines - len(self.differences)

    @property
    def ours_higher(self) -> int:
        """The number of lines for which this package's translation has the higher score."""
        return sum(x.our_score > x.their_score for x in self.differences)

    @property
    def theirs_higher(self) -> int:
        """The number of lines for which the other program's translation has the higher score."""
        return sum(x.our_score < x.their_score for x in self.differences)


def compare_searches(
    run: Run,
    system: System,
    lines: Sequence[str],
    *,
    beam_size: int = 1,
    alpha: float = 1.0,
    scorer: System | None = None,
) -> SearchComparison:
    """Translate non-blank lines with a run's model and with the exported model.

    Both programs use the same beam size, the same limit on the length of each translation, and the
    length penalty length^alpha. A score is a log-probability divided by length^alpha, where the
    length includes the end-of-sentence token. `scorer` computes the log-probabilities of both
    programs' translations. By default, `system` computes them.
    """
    scorer = scorer or system
    ours = find_translations(run, lines, beam_size=beam_size, alpha=alpha)
    differences = []
    for line, our in zip(lines, ours, strict=True):
        theirs = system.translate(line, our.max_tokens, beam_size=beam_size, alpha=alpha)
        if theirs != our.tokens:
            our_score, their_score = (
                scorer.score(line, tokens) / (len(tokens) + 1) ** alpha
                for tokens in (our.tokens, theirs)
            )
            differences.append(Difference(line, our.tokens, theirs, our_score, their_score))
    return SearchComparison(len(lines), differences)
