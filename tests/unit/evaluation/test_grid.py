"""Test that a search grid matches separate evaluations and reuses stored results."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from example_configs import SMALL
from run_files import write_untrained_run

from transformer_jax.cli import main
from transformer_jax.config import DecodeConfig
from transformer_jax.data.number_words import NumberWords
from transformer_jax.errors import StorageError
from transformer_jax.evaluation.evaluate import evaluate
from transformer_jax.evaluation.evaluation_files import find_result, folder_name
from transformer_jax.evaluation.grid import Grid, _select_averages, evaluate_grid
from transformer_jax.files import MAX_JSON_BYTES, JsonObject
from transformer_jax.inference.trained_run import load, load_averages
from transformer_jax.progress import Note, report_to
from transformer_jax.runs.checkpoint_manager import CheckpointManager
from transformer_jax.runs.run_folder import RunFolder

GREEDY = Grid(beam_sizes=[1], averages=[2, 1])
GRID = Grid(beam_sizes=[2, 1], alphas=[3.0, 0.0], averages=[2, 1])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Return a run with two checkpoints and a development set of ten lines."""
    folder = tmp_path_factory.mktemp("grid")
    files: dict[str, tuple[str, str]] = {}
    for split, count in (("train", 200), ("dev", 10), ("test", 10)):
        pairs = list(NumberWords(200).read(split))[:count]
        paths = folder / f"{split}.en", folder / f"{split}.de"
        for path, lines in zip(paths, zip(*pairs, strict=True), strict=True):
            path.write_text("".join(f"{line}\n" for line in lines), "utf-8")
        files[split] = str(paths[0]), str(paths[1])
    data = {"corpus": "text", **files, "bleu_tokenizer": "char"}
    return write_untrained_run(folder / "run", SMALL.change(data=data), scale=3.0)


@pytest.fixture(scope="module")
def results(run: RunFolder) -> list[JsonObject]:
    return evaluate_grid(run, "dev", GREEDY)


@pytest.fixture(scope="module")
def all_results(run: RunFolder) -> list[JsonObject]:
    return evaluate_grid(run, "dev", GRID)


def settings(result: JsonObject) -> tuple[int, int, float]:
    decode = result["decode"]
    return result["average_checkpoints"], decode["beam_size"], decode["length_penalty_alpha"]


def test_a_grid_has_one_greedy_search_per_average(results: list[JsonObject]) -> None:
    assert [settings(result) for result in results] == [(1, 1, 0.6), (2, 1, 0.6)]
    assert [result["steps"] for result in results] == [[8], [4, 8]]


@pytest.mark.slow
def test_a_grid_has_every_combination(all_results: list[JsonObject]) -> None:
    searches = [(1, 0.6), (2, 0.0), (2, 3.0)]
    expected = [(average, *search) for average in (1, 2) for search in searches]
    assert [settings(result) for result in all_results] == expected
    assert [result["steps"] for result in all_results] == [[8]] * 3 + [[4, 8]] * 3


@pytest.mark.slow
def test_each_result_is_that_of_a_separate_evaluation(
    run: RunFolder, all_results: list[JsonObject]
) -> None:
    mean = load(run.path, average_checkpoints=2)
    search = {"beam_size": 2, "length_penalty_alpha": 3.0}
    assert all_results[-1] == evaluate(mean, "dev", search).result
    assert len({result["perplexity"] for result in all_results}) == 2
    assert len({result["chrf"] for result in all_results}) > 2


def test_a_repeated_grid_evaluates_only_what_is_missing(
    run: RunFolder, results: list[JsonObject]
) -> None:
    titles: list[str] = []

    def repeat() -> list[JsonObject]:
        titles.clear()
        with report_to(lambda title, *_: titles.append(title)):
            return evaluate_grid(run, "dev", GREEDY)

    assert repeat() == results
    assert titles == []
    name = folder_name(results[1])
    shutil.rmtree(run.path / "evaluations" / name)
    assert repeat() == results
    assert set(titles) == {"evaluation 2 of 2"}
    # The grid must not reuse a result that was computed with different checkpoints.
    scores = run.path / "evaluations" / name / "scores.json"
    scores.write_text(json.dumps(results[1] | {"steps": [2, 8]}))
    assert repeat() == results
    assert titles


@pytest.mark.slow
def test_the_command_line_prints_a_grid_of_the_development_set(
    run: RunFolder, all_results: list[JsonObject], capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--grid", "--beam-sizes", "1", "2", "--alphas", "0", "3", "--averages", "1", "2"]
    assert main(["evaluate", str(run.path), *options, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == all_results
    assert main(["evaluate", str(run.path), *options]) == 0
    output = capsys.readouterr().out
    assert "dev set, 10 sentences" in output
    best = max(all_results, key=lambda result: result["bleu"])
    average, beam_size, alpha = settings(best)
    assert output.count("best BLEU") == 1
    end = f"--average-checkpoints {average} --beam-size {beam_size} --alpha {alpha!r} --step 8\n"
    assert output.endswith(end)
    # The printed command uses the test set, so apply its options to the development set instead.
    assert main(["evaluate", str(run.path), *end.split(), "--by-length", "--split", "dev"]) == 0
    output = capsys.readouterr().out
    assert f"BLEU        {best['bleu']:.2f}" in output
    assert "source tokens" in output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--alphas", "0.6"], "--alphas needs --grid"),
        (["--grid", "--beam-size", "4"], "--grid cannot be combined with --beam-size"),
        (["--grid", "--alpha", "0"], "--grid cannot be combined with --alpha"),
        (["--grid", "--on", "a", "b"], "--grid cannot be combined with --on"),
        (["--grid", "--averages", "2", "3"], "only 2 that can be averaged; pass --averages 2"),
        (["--grid", "--averages", "0"], "averages must be positive, got 0"),
        (["--grid", "--beam-sizes", "0"], "jax: --beam-sizes must be from 1 to 1000"),
        (["--grid", "--alphas", "-1"], "jax: --alphas must be from 0 to 5"),
    ],
    ids=str,
)
def test_a_mistake_in_a_grid_is_one_line(
    run: RunFolder, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(run.path), *options]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert (captured.out, captured.err.count("\n")) == ("", 1)


def test_a_grid_averages_the_papers_numbers_as_far_as_the_run_has_them(
    run: RunFolder, results: list[JsonObject]
) -> None:
    default = evaluate_grid(run, "dev", Grid(beam_sizes=[1]))
    assert default == results[:1]


def test_the_default_averages_have_only_consecutive_intact_checkpoints_until_the_step(
    tmp_path: Path,
) -> None:
    run = write_untrained_run(tmp_path / "run", steps=(2, 3, 4, 5, 6, 8))

    def averages(step: int | None) -> list[int]:
        with CheckpointManager(run.checkpoints, run.identity) as checkpoints:
            return _select_averages(checkpoints, Grid(), step)[0]

    assert averages(None) == averages(6) == [1, 5]
    assert averages(5) == [1]
    (run.checkpoints / "5" / "SHA256SUMS").write_text("")
    assert averages(None) == [1]


def test_bleu_with_another_tokenizer_is_not_reused(
    run: RunFolder, results: list[JsonObject], tmp_path: Path
) -> None:
    copy = RunFolder.open(Path(shutil.copytree(run.path, tmp_path / "run")))
    decode = DecodeConfig(**results[0]["decode"])
    assert find_result(copy, "dev", [8], decode) == results[0]
    other = replace(copy, config=copy.config.change(data={"bleu_tokenizer": "13a"}))
    assert find_result(other, "dev", [8], decode) is None


def test_a_stored_result_that_is_damaged_or_lacks_a_score_is_not_reused(
    run: RunFolder, results: list[JsonObject], tmp_path: Path
) -> None:
    copy = RunFolder.open(Path(shutil.copytree(run.path, tmp_path / "run")))
    result = results[0]
    path = copy.path / "evaluations" / folder_name(result) / "scores.json"
    assert path.exists()
    scores = ("perplexity", "bleu", "chrf")
    damaged = [result | {"x": "x" * MAX_JSON_BYTES}, *(result | {x: "1"} for x in scores)]
    damaged += [{k: v for k, v in result.items() if k != x} for x in (*scores, "by_length")]
    for stored in damaged:
        path.write_text(json.dumps(stored))
        assert find_result(copy, "dev", [8], DecodeConfig(**result["decode"])) is None


def test_a_checkpoint_that_training_deletes_during_a_grid_is_not_called_damaged(
    run: RunFolder, tmp_path: Path
) -> None:
    copy = RunFolder.open(Path(shutil.copytree(run.path, tmp_path / "run")))
    averages = load_averages(copy, [4, 8], [1, 2])
    next(averages)
    shutil.rmtree(copy.checkpoints / "4")
    with pytest.raises(
        StorageError, match=r"the process that trains .* has deleted old checkpoints .4.;"
    ):
        next(averages)


def test_results_that_cannot_be_stored_are_still_returned(
    run: RunFolder, results: list[JsonObject], tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(run.path, tmp_path / "run"))
    shutil.rmtree(copy / "evaluations")
    (copy / "evaluations").touch()
    grid = Grid(beam_sizes=[1], averages=[1])
    with pytest.warns(Note, match="could not be saved"):
        assert evaluate_grid(RunFolder.open(copy), "dev", grid) == results[:1]


def test_a_stored_result_contains_the_number_of_averaged_checkpoints(
    run: RunFolder, tmp_path: Path
) -> None:
    copy = replace(run, path=shutil.copytree(run.path, tmp_path / "copy"))
    assert copy.config.decode.average_checkpoints == 1
    for result in evaluate_grid(copy, "dev", Grid((1,), (0.6,), (1, 2))):
        count = len(result["steps"])
        assert result["decode"]["average_checkpoints"] == result["average_checkpoints"] == count
        decode = DecodeConfig(**result["decode"])
        assert find_result(copy, "dev", result["steps"], decode) is not None
