"""Test the comparison of runs by their metrics and scores."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from oracles import floats
from run_files import REPORTS, SCORES, copy_run, write_recorded_run, write_scores

import transformer_jax
from transformer_jax.analysis.comparison import Comparison
from transformer_jax.errors import UsageError
from transformer_jax.files import read_json, write_json
from transformer_jax.inference.summary import summarize
from transformer_jax.runs.run_folder import Package, RunFolder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return write_recorded_run(tmp_path_factory.mktemp("runs") / "<b>run")


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
    assert "train/loss" in summarize(folder, (8,), 10)
    comparison = transformer_jax.compare(folder.path)
    assert comparison.table[0]["step"] == 3
    picture = comparison.plot("train/loss")
    [line] = picture.figure.axes[0].lines
    np.testing.assert_array_equal(floats(line.get_ydata()), values)
    assert "<svg" in picture.svg


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
    # The second run's relative path equals the first run's name.
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
    description = read_json(other.path / "run.json")
    description["data"]["fingerprint"] = "0" * 64
    write_json(other.path / "run.json", description)
    with pytest.raises(UsageError, match="trained on different text or with different vocabul"):
        transformer_jax.compare([run.path, other.path])
    hint = r"no metric 'dev/blue'; did you mean 'dev/bleu'\? \(available: dev/bleu, dev/perplexity"
    with pytest.raises(UsageError, match=hint):
        transformer_jax.compare([run.path]).plot("dev/blue")
