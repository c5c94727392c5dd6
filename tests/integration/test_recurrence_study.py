"""Test the recurrence study's tables and figure with synthetic runs."""

import json
import math
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import sacrebleu
from example_configs import SMALL
from run_files import write_untrained_run

from experiments.recurrence import describe, draw_figure, main, read_rows, to_markdown
from transformer_jax.config import DecodeConfig, Row
from transformer_jax.config.loading import load_row, load_rows
from transformer_jax.data.corpora import bleu_tokenizer
from transformer_jax.sweeps.plan import Origin, Sweep, SweepRun, plan_sweep

SMALL_RNN = load_row("recurrence:additive").config.change(
    model={"d_model": SMALL.model.d_model}, data=SMALL.to_dict()["data"]
)
NAMES = {"fast": "Transformer", "slow": "LSTM, additive attention"}
STEP_SECONDS = {"fast": 0.5, "slow": 2.0}
# BLEU on the development set after 10, 20, and 30 steps, for each row and seed.
DEV_BLEU = {
    "fast": [[10.0, 20.0, 30.0], [20.0, 40.0, 50.0]],
    "slow": [[10.0, 20.0, 24.0], [10.0, 20.0, 25.0]],
}
REPORTS = 24
# The numbers of source tokens and correct words (out of four) for each sentence in the test set.
SENTENCES = [(8, 4), (9, 4), (12, 3), (20, 2), (31, 1), (75, 0)]
REFERENCE = "one two three four"


def finish(run: SweepRun) -> None:
    """Write the files of a finished run."""
    folder = write_untrained_run(run.path, run.config, steps=())
    reports: list[dict[str, Any]] = []
    now = 0.0
    for number in range(REPORTS):
        # Every fourth interval between reports includes an interruption, and other programs make
        # every step of the second seed slower.
        now += (5 + run.seed) * STEP_SECONDS[run.row] + (100 if number % 4 == 3 else 0)
        reports.append({"step": 5 * (number + 1), "split": "train", "time": now})
    for step, bleu in zip((10, 20, 30), DEV_BLEU[run.row][run.seed], strict=True):
        reports.append({"step": step, "split": "dev", "bleu": bleu, "perplexity": 100 / step})
    folder.metrics.write_text("".join(f"{json.dumps(report)}\n" for report in reports))
    evaluation = run.path / "evaluations" / "test-step30-average1-beam4-alpha0.6"
    write_evaluation(evaluation, run.config.decode)
    run.status_file.write_text(json.dumps({"status": "done", "finished": ["train", "test"]}))


def write_evaluation(evaluation: Path, decode: DecodeConfig, shift: int = 0) -> None:
    """Write an evaluation in which each translation has `shift` fewer correct words."""
    evaluation.mkdir(parents=True)
    rows = "".join(f"{length},5,2.5\n" for length, _ in SENTENCES)
    (evaluation / "sentences.csv").write_text(f"source_tokens,target_tokens,nll\n{rows}")
    (evaluation / "hypothesis.txt").write_text(
        "".join(translate(max(0, n - shift)) + "\n" for _, n in SENTENCES)
    )
    (evaluation / "reference.txt").write_text(f"{REFERENCE}\n" * len(SENTENCES))
    scores = {"split": "test", "step": 30, "average_checkpoints": decode.average_checkpoints}
    (evaluation / "scores.json").write_text(json.dumps({**scores, "decode": asdict(decode)}))


def translate(correct: int) -> str:
    """Return a translation in which only the first `correct` words are correct."""
    words = REFERENCE.split()
    return " ".join([*words[:correct], *("?" for _ in words[correct:])])


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    """A finished sweep with two rows and two seeds."""
    rows = {"fast": Row(SMALL), "slow": Row(SMALL_RNN)}
    sweep = plan_sweep(tmp_path_factory.mktemp("sweeps") / "recurrence", rows, 2)
    sweep = replace(sweep, origins=[Origin("transformer-jax sweep recurrence", "0123456789ab")])
    sweep.store()
    for run in sweep.runs:
        finish(run)
    return sweep


def test_the_duration_of_a_step_excludes_delays_by_other_programs(sweep: Sweep) -> None:
    durations = {row.model: row.step_seconds for row in read_rows(sweep)}
    assert durations == {NAMES[name]: seconds for name, seconds in STEP_SECONDS.items()}


def test_a_score_is_reached_at_the_first_step_whose_mean_over_seeds_is_as_high(
    sweep: Sweep,
) -> None:
    fast, slow = read_rows(sweep)
    assert [fast.steps_to(bleu) for bleu in (15, 15.1, 40, 40.1)] == [10, 20, 30, None]
    assert [slow.steps_to(bleu) for bleu in (20, 24.5, 24.6)] == [20, 30, None]
    assert fast.learning_curve.x == pytest.approx([10 / 120, 20 / 120, 30 / 120])


def test_bleu_by_length_is_that_of_the_sentences_in_the_bucket(sweep: Sweep) -> None:
    [run, _] = read_rows(sweep)[0].runs
    bleu = sacrebleu.BLEU(tokenize=bleu_tokenizer(SMALL.data), force=True)
    expected = {(1, 10): SENTENCES[:2], (11, 20): SENTENCES[2:4], (31, None): SENTENCES[4:]}
    assert run.by_length == {
        bucket: (
            2,
            bleu.corpus_score([translate(n) for _, n in members], [[REFERENCE] * 2]).score,
        )
        for bucket, members in expected.items()
    }


def test_evaluations_with_another_search_do_not_change_the_tables(tmp_path: Path) -> None:
    sweep = plan_sweep(tmp_path / "recurrence", {"fast": Row(SMALL)}, 1)
    sweep.store()
    [run] = sweep.runs
    finish(run)
    before = read_rows(sweep)
    greedy = run.path / "evaluations" / "test-step30-average1-beam1-alpha0.6"
    write_evaluation(greedy, replace(run.config.decode, beam_size=1), shift=1)
    assert read_rows(sweep) == before
    # A table for a single seed contains no standard deviations.
    table = to_markdown(before, 25, "")
    assert "±" not in table
    assert "- One random seed per row (0), so the table cannot rank models" in table


def test_the_figure_has_a_curve_for_each_row_in_both_panels(sweep: Sweep) -> None:
    by_time, by_length = draw_figure(read_rows(sweep)).figure.axes
    labels = [[line.get_label() for line in axes.lines] for axes in (by_time, by_length)]
    assert labels == [list(NAMES.values())] * 2


def test_the_command_writes_the_tables_and_the_figure(
    sweep: Sweep, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(sweep.path), "--out", str(tmp_path / "out"), "--bleu", "30"]) == 0
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert files == ["comparison.png", "comparison.svg", "curves.csv", "table.md"]
    table = (tmp_path / "out" / "table.md").read_text()
    assert table in capsys.readouterr().out
    fast, slow = (line.split(" | ") for line in table.splitlines()[2:4])
    curves = (tmp_path / "out" / "curves.csv").read_text().splitlines()
    assert curves[1:4] == [f'"Transformer",0,{n},{100 / n:.6g},{n}' for n in (10, 20, 30)]
    assert "- Random seeds: 0, 1; ± is the standard deviation over a row's seeds.\n" in table
    assert "- Corpus: " in table
    assert "- Search: " in table
    assert "- docs/statistics.md explains how to compare rows" in table
    assert "- Trained by: transformer-jax sweep recurrence (commit 0123456789ab)\n" in table
    assert table.rstrip().endswith(" --bleu 30")
    # After 20 half-second steps, BLEU is 20 for one seed and 40 for the other, so the mean is 30.
    assert fast[-3:] == ["500", "20", "0.2 |"]
    assert slow[-3:] == ["2000", "-", "- |"]


def test_a_control_has_another_name_than_the_row_that_it_copies(tmp_path: Path) -> None:
    rows = {"fast": Row(SMALL), "control": Row(SMALL, is_control=True)}
    sweep = plan_sweep(tmp_path / "recurrence", rows, 1)
    sweep.store()
    for run in sweep.runs:
        finish(replace(run, row="fast", seed=0))
    assert [row.model for row in read_rows(sweep)] == ["Transformer", "Transformer, control"]


def test_a_sweep_without_finished_runs_is_rejected_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan_sweep(tmp_path / "new", {"fast": Row(SMALL)}, 1).store()
    assert main([str(tmp_path / "new")]) == 2
    error = capsys.readouterr().err
    assert error.endswith("new has trained successfully, so there is nothing to compare\n")
    assert error.count("\n") == 1


def test_a_run_that_failed_to_train_is_excluded(sweep: Sweep, tmp_path: Path) -> None:
    copy = Sweep.open(Path(shutil.copytree(sweep.path, tmp_path / "copy")))
    run = copy.find("slow/seed-0")
    evaluation = run.path / "evaluations" / "dev-step30-average1-beam4-alpha0.6"
    write_evaluation(evaluation, run.config.decode)
    scores = json.loads((evaluation / "scores.json").read_text())
    (evaluation / "scores.json").write_text(json.dumps(scores | {"perplexity": math.inf}))
    finished = {"status": "done", "finished": ["train", "dev", "test"]}
    run.status_file.write_text(json.dumps(finished))
    assert [[run.seed for run in row.runs] for row in read_rows(copy)] == [[0, 1], [1]]


def test_a_row_is_described_by_its_architecture_and_attention() -> None:
    described = {name: describe(row.config.model) for name, row in load_rows("recurrence").items()}
    assert described == {
        "transformer": "Transformer",
        "none": "LSTM, no attention",
        "additive": "LSTM, additive attention",
        "general": "LSTM, general attention",
        "conv": "ConvS2S",
    }


def test_runs_without_bleu_scores_are_rejected_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = plan_sweep(tmp_path / "no-bleu", {"fast": Row(SMALL)}, 1)
    sweep.store()
    finish(sweep.runs[0])
    metrics = sweep.runs[0].path / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace("bleu", "other"))
    assert main([str(sweep.path)]) == 74
    assert capsys.readouterr().err.endswith("has no BLEU scores: train it with train.bleu_every\n")


def test_runs_with_too_few_reports_are_rejected_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = plan_sweep(tmp_path / "few-reports", {"fast": Row(SMALL)}, 1)
    sweep.store()
    finish(sweep.runs[0])
    metrics = sweep.runs[0].path / "metrics.jsonl"
    reports = [{"step": step, "split": "train", "time": step**3} for step in (1, 2, 3)]
    reports.append({"step": 3, "split": "dev", "bleu": 1, "perplexity": 2})
    metrics.write_text("".join(f"{json.dumps(report)}\n" for report in reports))
    assert main([str(sweep.path)]) == 74
    assert capsys.readouterr().err.endswith("train it with a lower train.log_every\n")
