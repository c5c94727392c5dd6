from collections.abc import Sequence
from pathlib import Path

from run_files import write_untrained_run

from experiments.search_comparison import compare_searches
from transformer_jax.inference.trained_run import load
from transformer_jax.sharing.verify import Translation, find_translations, sample_lines


class ScriptedSystem:
    """A fake program that returns preset translations and scores."""

    def __init__(
        self,
        ours: dict[str, Translation],
        changed: dict[str, list[str]],
        scores: dict[tuple[str, ...], float],
    ) -> None:
        self.ours, self.changed, self.scores = ours, changed, scores
        self.options = dict[str, float]()

    def translate(self, line: str, max_tokens: int) -> list[str]:
        assert max_tokens == self.ours[line].max_tokens
        return self.changed.get(line, self.ours[line].tokens)

    def score(self, line: str, tokens: Sequence[str]) -> float:
        assert line in self.changed
        return self.scores.get(tuple(tokens), -10.0)


def test_differences_are_counted_by_the_score_of_the_same_formula(tmp_path: Path) -> None:
    run = load(write_untrained_run(tmp_path / "run", steps=(4,), scale=3).path)
    lines = sample_lines(run, 5)
    search = {"beam_size": 2, "length_penalty": "power", "length_penalty_alpha": 0.5}
    ours = dict(zip(lines, find_translations(run, lines, **search), strict=True))
    length = len(ours[lines[2]].tokens) + 1
    # Three tokens and the end-of-sentence token have a length penalty of 4^0.5 = 2.
    better, worse, tied = ["a", "b", "c"], ["d", "e", "f"], ["g", "h", "i"]
    scores = {
        tuple(better): 2 * -9.0 / len(ours[lines[1]].tokens) ** 0.5,
        tuple(worse): 2 * -11.0 / length**0.5,
        tuple(tied): 2 * (-10.0 / (len(ours[lines[4]].tokens) + 1) ** 0.5),
    }
    changed = {lines[1]: better, lines[2]: worse, lines[4]: tied}
    system = ScriptedSystem(ours, changed, scores)
    found = compare_searches(system, lines, list(ours.values()), alpha=0.5)
    assert (found.lines, found.equal) == (5, 2)
    assert (found.ours_higher, found.theirs_higher) == (1, 1)
    assert [difference.line for difference in found.differences] == [lines[1], lines[2], lines[4]]
    first = found.differences[0]
    assert (first.ours, first.theirs) == (ours[lines[1]].tokens, better)
    assert first.our_score == -10.0 / (len(first.ours) + 1) ** 0.5
