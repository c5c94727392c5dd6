import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
from example_configs import SMALL
from run_files import write_untrained_run

from transformer_jax.inference.trained_run import Run, load
from transformer_jax.inference.translate import translate_batch
from transformer_jax.sharing.verify import Verification, find_translations, sample_lines, verify


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = tmp_path_factory.mktemp("runs") / "run"
    return load(write_untrained_run(path, steps=(4,), scale=3).path)


class WrongSystem:
    """A fake library that returns this package's results, but changes one token and one score."""

    def __init__(self, run: Run, lines: Sequence[str], wrong: str, shift: float = 0.5) -> None:
        self.ours = dict(zip(lines, find_translations(run, lines), strict=True))
        self.wrong, self.shift = wrong, shift
        self.options = dict[str, float]()

    def translate(self, line: str, max_tokens: int) -> list[str]:
        assert max_tokens == self.ours[line].max_tokens
        tokens = self.ours[line].tokens
        return [*tokens[:-1], "x"] if line == self.wrong else tokens

    def score(self, line: str, tokens: Sequence[str]) -> float:
        assert list(tokens) == self.ours[line].tokens
        return self.ours[line].score + (self.shift if line == self.wrong else 0)


def test_lines_are_translated_in_batches_of_a_fixed_size(run: Run) -> None:
    # The 40 short lines need two batches, and the long line is padded to a different width.
    lines = [" ".join(["one"] * 9), *(f"one {number}" for number in range(40))]
    lengths = [len(tokens) for tokens in run.vocabulary.source.encode(lines)]
    assert lengths[0] > 16 >= max(lengths[1:])
    few = find_translations(run, lines[:2])
    count_programs = cast(Any, translate_batch)._cache_size
    programs = count_programs()
    many = find_translations(run, lines)
    assert many[:2] == few
    assert count_programs() == programs


def test_one_wrong_translation_is_found(run: Run) -> None:
    lines = sample_lines(run)
    assert len(set(lines)) == 20
    result = verify(run, WrongSystem(run, lines, wrong=lines[3]))
    assert not result.is_close
    assert str(result) == "19 of 20 translations are equal; largest score difference 5.0e-01"


def test_a_score_that_is_not_a_number_is_not_close(run: Run) -> None:
    lines = sample_lines(run)
    result = verify(run, WrongSystem(run, lines, wrong=lines[3], shift=math.nan))
    assert math.isnan(result.score_difference)
    assert not result.is_close


@pytest.mark.parametrize(
    ("equal", "difference", "is_close"),
    [(20, 0.05, True), (18, 0.0, True), (17, 0.0, False), (20, 0.06, False)],
)
def test_near_ties_and_rounding_are_close(equal: int, difference: float, is_close: bool) -> None:
    assert Verification(20, equal, difference).is_close == is_close


def test_a_run_whose_text_is_missing_is_verified_with_random_tokens(run: Run) -> None:
    missing = ("missing.en", "missing.de")
    text = {"corpus": "text", "train": missing, "dev": missing}
    # Encoding the text of eight random tokens can produce more than eight tokens.
    for longest in (64, 9):
        config = SMALL.change(data={**text, "max_length": longest}, model={"max_length": longest})
        lines = sample_lines(Run(replace(run.folder, config=config), run.params, run.steps))
        assert len(lines) == 20
        assert all(1 < len(tokens) <= longest for tokens in run.vocabulary.source.encode(lines))
