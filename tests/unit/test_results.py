"""Test the scores that a sweep collects, and the differences between its rows."""

import json
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from finished_runs import HOSTILE, RESULTS, collect, make_finished_sweep, set_status
from small import SMALL

from transformer_jax.config import Row
from transformer_jax.errors import UsageError
from transformer_jax.sweeps.plan import Sweep, plan_sweep
from transformer_jax.sweeps.results import Results


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    """A sweep in which one run failed and the other runs are done. Tests must not change it."""
    sweep = make_finished_sweep(tmp_path_factory.mktemp("results") / "s")
    set_status(sweep.runs[-1], "failed", phase="train", note=HOSTILE)
    return sweep


@pytest.fixture(scope="module")
def results(sweep: Sweep) -> Results:
    return collect(sweep)


@pytest.fixture
def dev_sweep(tmp_path: Path) -> Sweep:
    """A sweep that a test may change. It has no test scores, which avoids the bootstrap."""
    return make_finished_sweep(tmp_path / "s", rows=["base", "worse"], splits=["dev"])


def test_scores_are_those_of_the_finished_runs(results: Results) -> None:
    for name, (perplexities, wrong, _) in RESULTS.items():
        done = perplexities[:2] if name == "other" else perplexities
        scores = results.rows[name].scores
        assert scores["perplexity"].values == tuple(done)
        assert scores["perplexity"].mean == pytest.approx(statistics.fmean(done))
        assert scores["perplexity"].deviation == pytest.approx(statistics.stdev(done))
        assert scores["bleu"].values == (90.0 - wrong,) * len(done)
        assert scores["test_bleu"].values == (90.5 - wrong,) * len(done)
    assert results.difference("better", "perplexity") == pytest.approx(-1.0)
    assert results.rows["better"].change == "d_ff 33"
    assert list(results.rows["other"].missing) == [f"other/seed-2: failed, train: {HOSTILE}"]


def test_a_difference_is_significant_if_it_exceeds_the_spread_over_seeds(results: Results) -> None:
    assert results.is_significant("better", "perplexity")
    assert not results.is_significant("same", "perplexity")


def test_signs_are_compared_with_the_paper_where_it_has_a_difference(results: Results) -> None:
    signs = {name: results.has_paper_sign(name, "perplexity") for name in RESULTS}
    expected = {"base": None, "better": True, "worse": True, "same": None, "other": False}
    assert signs == expected


def test_p_values_are_those_of_sacrebleus_own_command(sweep: Sweep, results: Results) -> None:
    runs = [sweep.find(f"{row}/seed-1") for row in ("base", "worse")]
    files = [next(run.path.glob("evaluations/test-*/hypothesis.txt")) for run in runs]
    references = str(files[0].with_name("reference.txt"))
    options = ("-m", "bleu", "--tokenize", "none", "--force", "--paired-bs", "-f", "text")
    sacrebleu = subprocess.run(
        [sys.executable, "-m", "sacrebleu", references, "-i", *map(str, files), *options],
        capture_output=True,
        text=True,
        check=True,
    )
    expected = re.findall(r"p = ([0-9.]+)", sacrebleu.stdout)[-1]
    assert float(expected) == pytest.approx(results.rows["worse"].p[1], abs=1e-4)
    # For identical translations, p is 1.
    assert results.rows["same"].p[0] == 1


def test_halves_of_compounds_count_as_words(results: Results) -> None:
    # sacreBLEU treats "well-known" as one token, but the paper's script treats it as three tokens.
    scores = results.rows["better"].scores
    assert scores["compound_bleu"].values != scores["test_bleu"].values
    assert all(0 < value <= 100 for value in scores["compound_bleu"].values)


def test_flops_are_counted_and_estimated_by_the_papers_method(results: Results) -> None:
    counted, at_peak = results.rows["better"].flops or (0, 0)
    assert counted == 4e9 + 8e9
    assert at_peak == pytest.approx(4e9 / 0.4 + 8e9 / 0.8)


def test_the_same_difference_of_fewer_seeds_is_not_significant(dev_sweep: Sweep) -> None:
    # These scores are 0.2 above the mean of the first row. The standard deviation of that row is
    # 0.1.
    for seed in range(3):
        run = dev_sweep.find(f"worse/seed-{seed}")
        for path in run.path.glob("evaluations/dev-*/scores.json"):
            path.write_text(json.dumps({**json.loads(path.read_text()), "perplexity": 5.3}))
    assert collect(dev_sweep).is_significant("worse", "perplexity")
    for seed in (1, 2):
        set_status(dev_sweep.find(f"worse/seed-{seed}"), "failed")
    results = collect(dev_sweep)
    assert results.rows["worse"].scores["perplexity"].values == (5.3,)
    assert not results.is_significant("worse", "perplexity")


def test_rows_with_one_seed_have_no_detectable_difference(dev_sweep: Sweep) -> None:
    single = plan_sweep(dev_sweep.path, dev_sweep.rows, 1)
    assert collect(single).minimum_detectable_difference("perplexity") is None
    assert not collect(single).is_significant("worse", "perplexity")


def test_perplexities_with_different_vocabularies_are_not_compared(dev_sweep: Sweep) -> None:
    for run in dev_sweep.runs:
        data = {"data": {"fingerprint": "b" if run.row == "worse" else "a"}}
        (run.path / "run.json").write_text(json.dumps(data))
    results = collect(dev_sweep)
    assert results.rows["worse"].has_own_text
    assert results.difference("worse", "perplexity") is None
    assert results.difference("worse", "bleu") == pytest.approx(-2)


def test_a_finished_run_without_scores_is_missing(dev_sweep: Sweep) -> None:
    shutil.rmtree(dev_sweep.find("base/seed-1").path)
    base = collect(dev_sweep).rows["base"]
    assert base.num_seeds == 2
    assert list(base.missing) == ["base/seed-1: has no scores"]


def test_a_sweep_without_a_finished_run_has_no_results(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no run of .* is done"):
        collect(plan_sweep(tmp_path / "s", {"base": Row(SMALL)}, 1))
