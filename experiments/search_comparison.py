"""Compare the greedy or beam searches of two programs on the same model (section 6.1).

Each program has its own rule for ending a beam search, so either program can find a better
translation than the other. The comparison scores both programs' translations with the same formula.
"""

from collections.abc import Sequence
from typing import NamedTuple

from transformer_jax.sharing.verify import System, Translation


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
    """The result of comparing two searches."""

    lines: int
    """The total number of lines."""
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
    system: System,
    lines: Sequence[str],
    ours: Sequence[Translation],
    *,
    alpha: float = 1.0,
    scorer: System | None = None,
) -> SearchComparison:
    """Translate lines with an exported model, and compare the translations with ours.

    `ours` is the result of `find_translations` for the same lines. In both programs, the search
    must have the same beam size and the length penalty length^alpha (see `System.options`). A
    score is a log-probability divided by length^alpha, where the length includes the
    end-of-sentence token. `scorer`, which defaults to `system`, computes the log-probabilities of
    both programs' translations.
    """
    scorer = scorer or system
    differences = []
    for line, our in zip(lines, ours, strict=True):
        theirs = system.translate(line, our.max_tokens)
        if theirs != our.tokens:
            our_score, their_score = (
                scorer.score(line, tokens) / (len(tokens) + 1) ** alpha
                for tokens in (our.tokens, theirs)
            )
            differences.append(Difference(line, our.tokens, theirs, our_score, their_score))
    return SearchComparison(len(lines), differences)
