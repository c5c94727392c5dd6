"""Tests of the one-line messages about mistakes in the arguments of the studies' programs."""

from collections.abc import Callable, Sequence

import pytest

from experiments import dev_and_test, rebuild_report, recurrence, width
from experiments.benchmark import __main__ as benchmark
from experiments.paper import __main__ as paper
from experiments.positions import __main__ as positions
from transformer_jax.commands.arguments import parse_program
from transformer_jax.console import run_and_report

BENCHMARK = "python -m experiments.benchmark"
POSITIONS = "python -m experiments.positions"


@pytest.mark.parametrize(
    ("main", "words", "message"),
    [
        (paper.main, ["--wrong"], "unknown option --wrong"),
        (paper.main, ["table1", "--length", "3"], "--length; did you mean --lengths?"),
        (paper.main, ["table1", "--lengths", "x"], "--lengths must be integers, got 'x'"),
        (positions.main, [], f"{POSITIONS} needs sweep; see {POSITIONS} --help"),
        (positions.main, ["a", "b"], f"{POSITIONS} got an unexpected argument 'b'"),
        (recurrence.main, ["a", "--bleu", "b"], "--bleu must be a number, got 'b'"),
        (benchmark.main, [], f"{BENCHMARK} needs one of train, decode, input"),
        (benchmark.main, ["training"], "compare, got 'training'; did you mean 'train'?"),
        (
            benchmark.main,
            ["compare"],
            f"compare needs before, after; see {BENCHMARK} compare",
        ),
        (benchmark.main, ["train", "--resume", "x"], "unknown option --resume\n"),
        (benchmark.main, ["train", "--sets", "x"], "unknown option --sets; did you mean --set?"),
        (width.main, ["--widths"], "--widths needs a value"),
    ],
)
def test_a_mistake_is_reported_in_one_line(
    main: Callable[[Sequence[str]], int],
    words: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(words) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert message in output.err


@pytest.mark.parametrize("function", [rebuild_report.rebuild, dev_and_test.write])
def test_a_function_without_its_argument_is_not_called(
    function: Callable[..., object], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_and_report(lambda: parse_program("program", function, [])) == 2
    assert capsys.readouterr().err == "transformer-jax: program needs folder; see program --help\n"
