"""Test the metrics, summaries, and comparisons of runs, none of which need parameters."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from finished_runs import HOSTILE
from oracles import floats
from small import SMALL
from untrained import write_untrained_run

import transformer_jax
from transformer_jax.cli import main
from transformer_jax.errors import UsageError
from transformer_jax.inference.comparison import Comparison
from transformer_jax.inference.history import metrics_table, stored_evaluations
from transformer_jax.inference.summary import summarize
from transformer_jax.runs.run_folder import Package, RunFolder

REPORTS: list[Any] = [
    {"step": 2, "split": "train", "loss": 4.0, "time": 1.0},
    {"step": 4, "split": "train", "loss": 3.0, "time": 2.0},
    {"step": 4, "split": "dev", "perplexity": 9.0, "bleu": 1.5},
    {"step": 8, "split": "dev", "perplexity": 8.0},
]
# Each of these reports has an unexpected type or contains an unexpected value.
INVALID: list[Any] = [
    {"step": "8", "split": "dev", "perplexity": 1.0},
    {"step": 8, "split": "dev", "bleu": "<b>", "exact": None, "flag": True},
    # Python's JSON parser accepts these numbers.
    *({"step": x, "split": "dev", "bleu": 1.0} for x in (math.nan, math.inf, True, 8.5, 10**400)),
    {"step": 8, "split": "dev", "bleu": 10**400, "exact": -(10**400)},
    [1],
    7,
]
SCORES: dict[str, Any] = {
    "split": "test",
    "step": 8,
    "average_checkpoints": 1,
    "decode": {"beam_size": 4, "beam_end": "any", "length_penalty_alpha": 0.6},
    "perplexity": 7.0,
    "bleu": 20.25,
    "chrf": 40.5,
}


def write_metrics(folder: RunFolder, reports: list[Any]) -> None:
    folder.metrics.write_text("".join(f"{json.dumps(x)}\n" for x in reports) + '{"step": 9')


def write_scores(folder: RunFolder, name: str, content: object) -> None:
    path = folder.path / "evaluations" / name / "scores.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(content))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run without checkpoints, whose metrics and scores contain invalid values."""
    path = tmp_path_factory.mktemp("runs") / "<b>run"
    folder = write_untrained_run(path, steps=())
    write_metrics(folder, [*REPORTS, *INVALID])
    write_scores(folder, "1", SCORES | {"step": 4, "bleu": 10.0})
    write_scores(folder, "2", SCORES)
    write_scores(folder, "3", SCORES | {"split": HOSTILE, "bleu": "much", "chrf": 10**400})
    decode = SCORES["decode"] | {"length_penalty_alpha": 10**400}
    steps = [SCORES | {"step": step} for step in ("x", math.nan, math.inf, 10**400)]
    for number, invalid in enumerate((None, 7, *steps, SCORES | {"decode": decode}), start=4):
        write_scores(folder, str(number), invalid)
    return folder


def copy_run(run: RunFolder, path: Path, reports: list[Any], **changes: Any) -> RunFolder:
    """Copy a run, and change the metrics and the config of the copy."""
    shutil.copytree(run.path, path)
    description = json.loads((path / "run.json").read_text())
    for section, fields in changes.items():
        description["config"][section] |= fields
    (path / "run.json").write_text(json.dumps(description))
    folder = RunFolder.open(path)
    write_metrics(folder, reports)
    return folder


def test_metrics_are_rows_of_numbers_by_step(run: RunFolder) -> None:
    assert metrics_table(run) == [
        {"step": 2, "train/loss": 4.0, "train/time": 1.0},
        {"step": 4, "train/loss": 3.0, "train/time": 2.0, "dev/perplexity": 9.0, "dev/bleu": 1.5},
        {"step": 8, "dev/perplexity": 8.0},
    ]


def test_a_run_without_metrics_has_an_empty_table(run: RunFolder, tmp_path: Path) -> None:
    folder = copy_run(run, tmp_path / "run", [])
    folder.metrics.unlink()
    assert metrics_table(folder) == []
    assert "no metrics" in summarize(folder, (4, 8), 10)
    with pytest.raises(UsageError, match=r"there are no metrics of run$"):
        transformer_jax.compare(folder.path).plot()


def test_the_step_of_a_package_is_that_of_its_parameters(run: RunFolder, tmp_path: Path) -> None:
    folder = copy_run(run, tmp_path / "package", [])
    package = replace(folder, package=Package((4, 8), "float32"))
    comparison = Comparison({"package": (package,)}, {package.path: []})
    assert comparison.table[0]["step"] == 8


def test_a_path_that_is_not_utf_8_is_escaped_in_html(run: RunFolder, tmp_path: Path) -> None:
    folder = copy_run(run, tmp_path / "a\udcff", REPORTS)
    comparison = transformer_jax.compare(folder.path)
    for text in (summarize(folder, (8,), 10), comparison._repr_html_(), repr(comparison)):
        assert r"a\udcff" in text.encode().decode()


def test_metrics_that_are_not_finite_are_drawn_as_gaps(run: RunFolder, tmp_path: Path) -> None:
    values = (4.0, math.nan, math.inf, 3.0)
    reports = [{"step": i, "split": "train", "loss": x} for i, x in enumerate(values)]
    folder = copy_run(run, tmp_path / "run", reports)
    assert "train/loss 3.000 at step 3" in summarize(folder, (8,), 10)
    comparison = transformer_jax.compare(folder.path)
    assert comparison.table[0]["step"] == 3
    picture = comparison.plot("train/loss")
    [line] = picture.figure.axes[0].lines
    np.testing.assert_array_equal(floats(line.get_ydata()), values)
    assert "<svg" in picture.svg


def test_stored_evaluations_are_ordered_and_invalid_ones_are_left_out(run: RunFolder) -> None:
    found = [(row["split"], row["step"], row.get("bleu")) for row in stored_evaluations(run)]
    assert found == [(HOSTILE, 8, None), ("test", 4, 10.0), ("test", 8, 20.25)]


def test_the_newest_scores_are_those_of_the_search_in_the_config(
    run: RunFolder, tmp_path: Path
) -> None:
    folder = copy_run(run, tmp_path / "run", REPORTS, decode={"average_checkpoints": 1})
    decode = folder.config.to_dict()["decode"]
    results = {
        "test-step9-average1": {"decode": decode, "bleu": 30.0},
        "test-step9-average9": {"decode": decode, "average_checkpoints": 9, "bleu": 10.0},
        "test-step9-beam-end-any": {"decode": decode | {"beam_end": "any"}, "bleu": 20.0},
    }
    for name, result in results.items():
        write_scores(folder, name, SCORES | {"step": 9} | result)
    [row] = transformer_jax.compare(folder.path).table
    assert row["evaluation/test/bleu"] == 30.0


def test_the_summary_shows_differences_scores_and_curves_as_escaped_text(
    run: RunFolder,
) -> None:
    page = summarize(run, (8,), 12_345)
    for part in ("step 8, 12,345 parameters", "model.d_model", ">512<", ">16<", "20.25", "40.50"):
        assert part in page
    assert page.count("<polyline") == 2
    assert "dev/perplexity 8.000 at step 8" in page
    assert "/<b>run" not in page
    assert "&lt;b&gt;&amp;%_$#" in page
    # The summary does not hard-code colors, so it inherits the notebook's colors.
    assert "#" not in page.replace("&#", "").replace("%_$#", "")
    assert "mean of 2 checkpoints" in summarize(run, (4, 8), 10)


def test_runs_that_differ_only_in_their_seed_are_one_line_with_a_band(
    run: RunFolder, tmp_path: Path
) -> None:
    faster = [x | {"perplexity": 4.0} if "perplexity" in x else x for x in REPORTS]
    seeds = copy_run(run, tmp_path / "row" / "seed-1", faster, train={"seed": 1})
    other = copy_run(run, tmp_path / "other", REPORTS, model={"num_heads": 1})
    comparison = transformer_jax.compare([run.path, seeds.path, str(other.path)])
    assert list(comparison.groups) == ["<b>run", "other"]
    [axes] = comparison.plot("dev/perplexity").figure.axes
    labels = [str(line.get_label()) for line in axes.lines]
    assert labels == ["<b>run (2 seeds)", "other"]
    expected = [[math.sqrt(9 * 4), math.sqrt(8 * 4)], [9.0, 8.0]]
    for line, values in zip(axes.lines, expected, strict=True):
        assert floats(line.get_ydata()).tolist() == pytest.approx(values)
    assert [axes.get_ylabel() for axes in comparison.plot().figure.axes] == [
        *("train/loss, in nats per token", "dev/perplexity", "dev/bleu")
    ]
    first, _, third = comparison.table
    assert first["group"] == "<b>run"
    assert (first["model.num_heads"], third["model.num_heads"]) == (2, 1)
    assert first["dev/bleu"] == 1.5
    assert first["evaluation/test/bleu"] == 20.25
    assert "train.seed" not in first
    assert "<b>run" not in comparison._repr_html_()
    named = transformer_jax.compare([seeds.path])
    assert list(named.groups) == ["row"]


def test_a_group_has_the_same_color_and_a_label_even_if_others_lack_the_metric(
    run: RunFolder, tmp_path: Path
) -> None:
    first = copy_run(run, tmp_path / "first", REPORTS[:1], model={"num_heads": 1})
    comparison = transformer_jax.compare([first.path, run.path])
    losses, perplexities = comparison.plot("train/loss", "dev/perplexity").figure.axes
    [line] = perplexities.lines
    assert line.get_color() == losses.lines[1].get_color() != losses.lines[0].get_color()
    legend = perplexities.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["<b>run"]


def test_no_two_groups_have_the_same_label(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_run(run, tmp_path / "first" / "name", REPORTS)
    copy_run(run, tmp_path / "name", REPORTS, model={"num_heads": 1})
    monkeypatch.chdir(tmp_path)
    # The second run's relative path is the first run's name.
    comparison = transformer_jax.compare(["first/name", "name"])
    assert list(comparison.groups) == ["name", str(tmp_path / "name")]
    assert [row["run"] for row in comparison.table] == ["first/name", "name"]


def test_runs_that_cannot_be_compared_are_errors(run: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no run to compare"):
        transformer_jax.compare([])
    with pytest.raises(UsageError, match="a run is listed twice"):
        transformer_jax.compare([run.path, str(run.path)])
    with pytest.raises(UsageError, match="nowhere is not a run"):
        transformer_jax.compare([run.path, tmp_path / "nowhere"])
    other = copy_run(run, tmp_path / "other", REPORTS)
    description = json.loads((other.path / "run.json").read_text())
    description["data"]["fingerprint"] = "0" * 64
    (other.path / "run.json").write_text(json.dumps(description))
    with pytest.raises(UsageError, match="trained on different text or with different vocabul"):
        transformer_jax.compare([run.path, other.path])
    hint = r"no metric 'dev/blue'; did you mean 'dev/bleu'\? \(there are dev/bleu, dev/perplexity"
    with pytest.raises(UsageError, match=hint):
        transformer_jax.compare([run.path]).plot("dev/blue")


@pytest.mark.parametrize("kind", ["curves", "schedule"])
def test_the_command_draws_what_needs_no_parameters(
    run: RunFolder, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "x.svg"
    assert main(["plot", str(run.path), "--kind", kind, "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"written to {out}\n"
    assert all(text in out.read_text() for text in ("train/loss",) * (kind == "curves"))
    assert out.read_text().count("<svg") == 1


def test_the_command_checks_the_file_before_it_draws_and_replaces_no_file(
    run: RunFolder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.svg").write_text("mine")
    (tmp_path / "x-2.svg").write_text("mine")
    long = f"{'x' * 300}.svg"
    for out, code, message in (
        ("x.svg", 2, "x.svg already exists: write another file with `--out x-3.svg`"),
        ("no/x.svg", 74, "no/x.svg cannot be written: no is not a folder"),
        ("x.svg/x.svg", 74, "x.svg/x.svg cannot be written: x.svg is not a folder"),
        (long, 2, f"{long} cannot be written: File name too long"),
    ):
        # The command also rejects the unknown metric, but only when it draws the plot.
        assert main(["plot", str(run.path), "--metrics", "no", "--out", out]) == code
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    monkeypatch.setattr("os.access", lambda *_: False)
    assert main(["plot", str(run.path), "--out", "y.svg"]) == 74
    assert "y.svg cannot be written: . is not writable" in capsys.readouterr().err
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "x.svg": "mine",
        "x-2.svg": "mine",
    }


def test_the_schedule_shows_the_config_and_its_peak() -> None:
    picture = transformer_jax.plot_schedule(SMALL.change(train={"steps": 100, "warmup_steps": 20}))
    widths, warmups = picture.figure.axes
    assert str(widths.lines[0].get_label()) == "d_model 16"
    assert [str(line.get_label()) for line in warmups.lines] == [
        *("warmup 20", "warmup 5", "warmup 10", "warmup 40")
    ]
    for axes in (widths, warmups):
        own = axes.lines[0]
        # The maximum is the peak of equation 3.
        assert floats(own.get_ydata()).max() == pytest.approx(16**-0.5 * 20**-0.5)
