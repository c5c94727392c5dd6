"""Test the scores that a sweep collects and the differences between its rows."""

import hashlib
import json
import math
import re
import shutil
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from example_configs import SMALL
from run_files import HOSTILE, RESULTS, collect, make_finished_sweep, make_run, set_status

from transformer_jax.config import Paper, Row
from transformer_jax.data.prepare import prepare_text
from transformer_jax.data.splits import Split
from transformer_jax.errors import UsageError
from transformer_jax.files import JsonObject, read_json, write_json
from transformer_jax.reports.collect import (
    _collect_scores,
    collect_results,
    collect_runs,
    read_adhoc_status,
)
from transformer_jax.reports.footnotes import list_footnotes
from transformer_jax.reports.results import MARGINS, Results
from transformer_jax.reports.seed_statistics import sign_agreement
from transformer_jax.sweeps.plan import Sweep, SweepRun, plan_sweep
from transformer_jax.sweeps.status import read_status


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    """A sweep in which one run failed and all others are done. Tests must not modify this sweep."""
    sweep = make_finished_sweep(tmp_path_factory.mktemp("results") / "s")
    set_status(sweep.runs[-1], "failed", phase="train", note=HOSTILE)
    return sweep


@pytest.fixture(scope="module")
def results(sweep: Sweep) -> Results:
    return collect(sweep)


@pytest.fixture
def dev_sweep(tmp_path: Path) -> Sweep:
    """A sweep that tests may modify. Without test scores, reports do not test sentences."""
    return make_finished_sweep(tmp_path / "s", rows=["base", "worse"], splits=["dev"])


def change_perplexity(run: SweepRun, perplexity: float) -> None:
    for path in run.path.glob("evaluations/dev-*/scores.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "perplexity": perplexity}))


def test_scores_are_those_of_the_finished_runs(results: Results) -> None:
    for name, (perplexities, wrong, _) in RESULTS.items():
        done = perplexities[:2] if name == "other" else perplexities
        row = results.rows[name]
        assert row.scores["perplexity"] == dict(enumerate(done))
        assert row.scores["bleu"] == dict.fromkeys(range(len(done)), 90.0 - wrong)
        assert row.scores["test_bleu"] == dict.fromkeys(range(len(done)), 90.5 - wrong)
        assert row.scores["compound_bleu"] == dict.fromkeys(range(len(done)), 91.0 - wrong)
    assert results.rows["better"].change == "d_ff 33"
    assert results.rows["other"].missing == {"other/seed-2": f"failed, train: {HOSTILE}"}


def test_rows_are_compared_by_the_logarithm_of_perplexity(results: Results) -> None:
    better, base = (map(math.log, RESULTS[name][0]) for name in ("better", "base"))
    expected = statistics.fmean(x - y for x, y in zip(better, base, strict=True))
    assert results.compare("better", "perplexity").difference == pytest.approx(expected)
    assert results.paper_difference("better", "perplexity") == pytest.approx(math.log(4.66 / 4.92))
    assert results.paper_difference("better", "bleu") == pytest.approx(0.2)
    # 24.9 - 25.1 is less than -0.2, but the paper's difference is exactly the margin.
    scores = {"base": 25.1, "better": 24.9}
    rows = {
        name: replace(results.rows[name], paper=replace(results.rows[name].paper, bleu=bleu))
        for name, bleu in scores.items()
    }
    assert replace(results, rows=rows).paper_difference("better", "bleu") == -0.2
    assert results.compare("base", "perplexity").difference == 0


def test_verdicts_include_rows_for_which_the_paper_finds_no_difference(results: Results) -> None:
    verdicts = {name: results.verdict(name, "perplexity") for name in RESULTS}
    assert verdicts == {
        "base": None,
        "better": "as in the paper",
        "worse": "inconclusive",
        # In the paper, this row has the same perplexity as the base row. The interval is too wide
        # for any difference to show that the perplexities are equal.
        "same": "out of reach",
        "other": "inconclusive",
    }


def test_rows_that_differ_although_the_papers_rows_are_equal_are_refuted(
    dev_sweep: Sweep,
) -> None:
    rows = {name: replace(row, paper=Paper(4.92, 25.8)) for name, row in dev_sweep.rows.items()}
    for run in dev_sweep.runs[1::2]:
        change_perplexity(run, 3.0 + run.seed / 10)
    assert collect(replace(dev_sweep, rows=rows)).verdict("worse", "perplexity") == "differs"
    for run in dev_sweep.runs[1::2]:
        change_perplexity(run, RESULTS["base"][0][run.seed] + 0.001)
    results = collect(replace(dev_sweep, rows=rows))
    assert results.verdict("worse", "perplexity") == "as in the paper"


def test_signs_are_compared_with_those_of_the_paper(results: Results) -> None:
    # In the paper, the difference for row "same" is 0, and the difference for row "other" has the
    # opposite sign of that in the sweep.
    differences, margin = results.differences("perplexity"), MARGINS["perplexity"]
    same, _, rows = sign_agreement(differences, margin, lower_is_better=True)
    assert (same, rows) == (2, 3)


def test_p_values_are_those_of_sacrebleus_own_command(sweep: Sweep, results: Results) -> None:
    runs = [sweep.find(f"{row}/seed-1") for row in ("base", "worse")]
    files = [next(run.path.glob("evaluations/test-*/hypothesis.txt")) for run in runs]
    references = str(files[0].with_name("reference.txt"))
    options = ("-m", "bleu", "--tokenize", "none", "--force", "--paired-ar", "-f", "text")
    options += ("--paired-ar-n", "1000")
    sacrebleu = subprocess.run(
        [sys.executable, "-m", "sacrebleu", references, "-i", *map(str, files), *options],
        capture_output=True,
        text=True,
        check=True,
    )
    expected = re.findall(r"p = ([0-9.]+)", sacrebleu.stdout)[-1]
    worse, same = (results.test_differences[name] for name in ("worse", "same"))
    assert float(expected) == pytest.approx(worse[1].p, abs=1e-4)
    assert worse[1].bleu < 0 < results.test_differences["better"][1].bleu
    # For identical translations, p is 1.
    assert same[0] == (0, 1)


def test_flops_are_counted_and_estimated_by_the_papers_method(results: Results) -> None:
    counted, at_peak = results.rows["better"].flops or (0, 0)
    assert counted == 4e9 + 8e9
    assert at_peak == pytest.approx(4e9 / 0.4 + 8e9 / 0.8)


def test_a_row_with_one_seed_has_no_interval(dev_sweep: Sweep) -> None:
    assert collect(dev_sweep).compare("worse", "perplexity").interval is not None
    for seed in (1, 2):
        set_status(dev_sweep.find(f"worse/seed-{seed}"), "failed")
    results = collect(dev_sweep)
    assert results.rows["worse"].scores["perplexity"] == {0: 5.15}
    assert results.compare("worse", "perplexity").interval is None
    assert results.verdict("worse", "perplexity") == "inconclusive"


@pytest.mark.parametrize(
    ("part", "is_compared"),
    [
        ("data", True),  # the training text, for example because of BPE-dropout
        ("vocabulary", False),
        ("source_vocabulary", False),
        ("source.txt", False),
        ("reference.txt", False),
    ],
)
def test_perplexities_are_compared_if_the_tokens_of_the_scored_sets_are_equal(
    dev_sweep: Sweep, part: str, is_compared: bool
) -> None:
    for run in dev_sweep.runs:
        description = {"data": {"fingerprint": "a"}, "vocabulary": {"sha256": "a"}}
        [folder] = run.path.glob("evaluations/dev-*")
        texts = [folder / name for name in ("source.txt", "reference.txt")]
        texts[0].write_text(texts[1].read_text())
        if run.row == "worse" and part.endswith(".txt"):
            (folder / part).write_text(texts[1].read_text().replace("dog", "cat"))
        elif run.row == "worse":
            description[part] = {"fingerprint" if part == "data" else "sha256": "b"}
        files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in texts}
        write_json(run.path / "run.json", description)
        write_json(folder / "scores.json", read_json(folder / "scores.json") | {"files": files})
    results = collect(dev_sweep)
    assert results.rows["worse"].has_other_text is not is_compared
    assert (results.compare("worse", "perplexity").difference is not None) is is_compared
    assert results.compare("worse", "bleu").difference == pytest.approx(-2)


def test_perplexities_with_unknown_tokens_are_compared(dev_sweep: Sweep) -> None:
    # Before the first row has a run, its vocabulary is unknown.
    for run in dev_sweep.runs:
        if run.row == "worse":
            write_json(run.path / "run.json", {"vocabulary": {"sha256": "a"}})
    assert not collect(dev_sweep).rows["worse"].has_other_text


def test_runs_no_better_than_a_unigram_model_are_not_averaged(tmp_path: Path) -> None:
    paths = [
        make_run(tmp_path / f"run-{seed}", SMALL.change(train={"seed": seed}), perplexity)
        for seed, perplexity in enumerate([5.0, 5.5, 900.0])
    ]
    prepared = prepare_text(SMALL.data)
    lines = prepared.lines("dev")[1]
    for path in paths:
        for text in path.glob("evaluations/dev-*/*.txt"):
            text.write_text("".join(f"{line}\n" for line in lines))
    sweep = collect_runs(paths, tmp_path / "out")
    results = collect_results(sweep, list(map(read_adhoc_status, sweep.runs)), "")
    tokens = [token for line in prepared.vocabulary.target.encode(lines) for token in line]
    entropy = -statistics.fmean(math.log(tokens.count(x) / len(tokens)) for x in tokens)
    assert results.base.unigram == pytest.approx(math.exp(entropy))
    assert 5.5 < math.exp(entropy) < 900
    assert results.base.failed == {2: 900.0}
    assert results.base.scores["perplexity"] == {0: 5.0, 1: 5.5}
    assert results.base.missing == {}
    [note] = [note for note in list_footnotes(results) if note.startswith("Failed to train")]
    assert "run-0/seed-2 (900; a unigram model has " in note


@pytest.mark.parametrize(
    "task", ["f1", {"main_score": "f1"}, {"main_score": []}, {"main_score": "f1", "f1": "high"}]
)
def test_scores_of_unexpected_types_are_ignored(dev_sweep: Sweep, task: object) -> None:
    run = dev_sweep.find("base/seed-1")
    [path] = run.path.glob("evaluations/dev-*/scores.json")
    stored = json.loads(path.read_text())
    scores: dict[Split, JsonObject] = {
        "dev": stored | {"bleu": None},
        "test": {"task": task},
    }
    status = replace(read_status(run), scores=scores)
    assert _collect_scores([status]) == {"perplexity": {1: stored["perplexity"]}}


def test_a_finished_run_without_scores_is_missing(dev_sweep: Sweep) -> None:
    shutil.rmtree(dev_sweep.find("base/seed-1").path / "evaluations")
    base = collect(dev_sweep).rows["base"]
    assert len(base.scores["perplexity"]) == 2
    assert base.missing == {"base/seed-1": "queued: its scores were deleted"}


def test_a_sweep_without_a_finished_run_has_no_results(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no run in .* has finished"):
        collect(plan_sweep(tmp_path / "s", {"base": Row(SMALL)}, 1))
