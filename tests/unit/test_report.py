"""A report says what the runs' files say, and what can be concluded from them."""

import csv
import dataclasses
import json
import re
import shutil
import statistics
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from small import SMALL

from transformer_jax.cli import main
from transformer_jax.config import Paper, Row
from transformer_jax.data.prepare import prepare
from transformer_jax.errors import UsageError
from transformer_jax.runs.run_directory import RunDirectory
from transformer_jax.sweeps.adhoc import collect_runs
from transformer_jax.sweeps.plan import PlannedRun, Sweep, plan_sweep
from transformer_jax.sweeps.report import COLUMNS, write_report
from transformer_jax.sweeps.results import collect_results

REFERENCES = [f"the well-known man number {i} saw a dog and {i % 7} cats" for i in range(60)]
# By row: perplexity of each seed, and how many words in a hundred are wrong.
FOUND = {
    "base": ([5.0, 5.2, 5.1], 10, Paper(4.92, 25.8, 65)),
    "better": ([4.0, 4.1, 4.2], 4, Paper(4.66, 26.0, 168)),
    "worse": ([5.15, 5.3, 5.2], 12, Paper(5.29, 24.9)),
    "same": ([5.1, 5.2, 5.0], 10, Paper(4.92, 25.8)),
    "other": ([4.9, 5.0, 4.8], 10, Paper(5.01, 25.4)),
}
TEXT = {
    "corpus": "text",
    **dict.fromkeys(("train", "dev", "test"), ("a", "b")),
    "bleu_tokenizer": "none",
}
HOSTILE = "<b>&%_$#{}~^\\ |=1+1\"'`"


def finished(run: PlannedRun, perplexity: float, wrong: int, path: Path | None = None) -> None:
    """Write what a run that is done has written; of one made by hand, there."""
    made = path or run.path
    rng = np.random.default_rng([run.seed, wrong])
    lines = [
        " ".join("?" if rng.integers(100) < wrong else word for word in line.split())
        for line in REFERENCES
    ]
    for split, shift in (("dev", 0.0), ("test", 0.5)):
        folder = made / "evaluations" / f"{split}-step8-average1-beam4-alpha0.6"
        folder.mkdir(parents=True)
        for name, texts in (("hypothesis", lines), ("reference", REFERENCES)):
            (folder / f"{name}.txt").write_text("".join(f"{text}\n" for text in texts))
        scores = {
            "split": split,
            "step": 8,
            "average_checkpoints": 1,
            "decode": dataclasses.asdict(run.config.decode),
            "perplexity": perplexity + shift,
            "bleu": 90 - wrong + shift,
        }
        (folder / "scores.json").write_text(json.dumps(scores))
    reports = [
        *({"step": s, "split": "dev", "perplexity": perplexity + 8 / s} for s in (2, 4, 8)),
        *({"step": s, "split": "train", "flops": 1e9 * s, "utilization": 0.1 * s} for s in (4, 8)),
    ]
    (made / "metrics.jsonl").write_text("".join(f"{json.dumps(x)}\n" for x in reports))
    if path is None:
        run.state.write_text(json.dumps({"name": "done", "finished": ["train", "dev", "test"]}))


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    """A sweep whose runs are done but for one, which failed."""
    rows = {
        name: Row(SMALL.change(data=TEXT, model={"d_ff": 32 + i}), paper)
        for i, (name, (_, _, paper)) in enumerate(FOUND.items())
    }
    made = plan_sweep(tmp_path / "s", rows, 3)
    made.store()
    for run in made.runs:
        perplexities, wrong, _ = FOUND[run.row]
        finished(run, perplexities[run.seed], wrong)
    failed = made.runs[-1]
    failed.state.write_text(json.dumps({"name": "failed", "doing": "train", "note": HOSTILE}))
    return made


def test_figures_are_those_of_the_runs(sweep: Sweep) -> None:
    found = collect_results(sweep)
    for name, (perplexities, wrong, _) in FOUND.items():
        done = perplexities[:2] if name == "other" else perplexities
        spread = found.rows[name].scores["perplexity"]
        assert spread.values == tuple(done)
        assert spread.mean == pytest.approx(sum(done) / len(done))
        assert spread.deviation == pytest.approx(statistics.stdev(done))
        assert found.rows[name].scores["bleu"].values == (90.0 - wrong,) * len(done)
        assert found.rows[name].scores["test_bleu"].values == (90.5 - wrong,) * len(done)
    assert found.difference("better", "perplexity") == pytest.approx(-1.0)
    assert found.rows["better"].change == "d_ff 33"


def test_the_smallest_difference_is_that_of_a_t_test_with_pooled_deviation(sweep: Sweep) -> None:
    found = collect_results(sweep)
    groups = [p[:2] if name == "other" else p for name, (p, _, _) in FOUND.items()]
    freedom = sum(len(g) - 1 for g in groups)
    pooled = sum(np.var(g, ddof=1) * (len(g) - 1) for g in groups) / freedom
    least = stats.t.ppf(0.975, freedom) * np.sqrt(2 / 3 * pooled)
    assert found.minimum_detectable_difference("perplexity") == pytest.approx(least)
    assert found.is_significant("better", "perplexity")
    assert not found.is_significant("same", "perplexity")


def test_fewer_seeds_prove_less(sweep: Sweep) -> None:
    # 0.2 above the mean of the first row's three seeds, whose deviation is 0.1.
    for seed, perplexity in enumerate((5.3, 5.3, 5.3)):
        run = next(x for x in sweep.runs if (x.row, x.seed) == ("worse", seed))
        for path in run.path.glob("evaluations/dev-*/scores.json"):
            path.write_text(json.dumps({**json.loads(path.read_text()), "perplexity": perplexity}))
    assert collect_results(sweep).is_significant("worse", "perplexity")
    for seed in (1, 2):
        state = sweep.path / "worse" / f"seed-{seed}.state"
        state.write_text(json.dumps({"name": "failed"}))
    found = collect_results(sweep)
    assert found.rows["worse"].scores["perplexity"].values == (5.3,)
    assert not found.is_significant("worse", "perplexity")


def test_a_score_by_another_search_is_none_of_the_sweeps(sweep: Sweep) -> None:
    before = collect_results(sweep).rows["base"].scores
    for split in ("dev", "test"):
        [made] = (sweep.path / "base" / "seed-0").glob(f"evaluations/{split}-*")
        other = made.with_name(f"{split}-step8-average1-beam1-alpha0.6")
        shutil.copytree(made, other)
        scores = json.loads((made / "scores.json").read_text())
        scores["decode"]["beam_size"], scores["bleu"], scores["perplexity"] = 1, 3.0, 99.0
        (other / "scores.json").write_text(json.dumps(scores))
    assert collect_results(sweep).rows["base"].scores == before


def test_perplexities_of_other_vocabularies_are_not_compared(sweep: Sweep) -> None:
    for run in sweep.runs:
        text = {"data": {"fingerprint": "b" if run.row == "worse" else "a"}}
        (run.path / "run.json").write_text(json.dumps(text))
    found = collect_results(sweep)
    assert found.difference("worse", "perplexity") is None
    assert found.difference("worse", "test_bleu") == pytest.approx(-2)
    assert found.difference("better", "perplexity") is not None
    assert (
        "or another vocabulary, than base: worse" in (write_report(found) / "table.md").read_text()
    )


def test_a_run_that_lost_its_scores_is_missing(sweep: Sweep) -> None:
    shutil.rmtree(sweep.path / "base" / "seed-1")
    found = collect_results(sweep)
    assert len(found.rows["base"].scores["perplexity"].values) == 2
    assert "Missing: base/seed-1: has no scores" in (
        (write_report(found) / "table.md").read_text().replace("\\", "")
    )


def test_signs_are_compared_with_the_papers_where_it_has_one(sweep: Sweep) -> None:
    found = collect_results(sweep)
    agree = {name: found.agrees(name, "perplexity") for name in FOUND}
    expected = {"base": None, "better": True, "worse": True, "same": None, "other": False}
    assert agree == expected
    text = (write_report(found) / "table.md").read_text()
    assert "in 1 of 1 rows whose difference is significant, and in 1 of 2 whose" in text
    assert text.count("Missing: ") == 1


def test_p_values_are_those_of_sacrebleus_own_command(sweep: Sweep) -> None:
    found = collect_results(sweep)
    for seed in (0, 1):
        runs = [run for run in sweep.runs if run.seed == seed and run.row in ("base", "worse")]
        files = [next(run.path.glob("evaluations/test-*/hypothesis.txt")) for run in runs]
        references = str(files[0].with_name("reference.txt"))
        how = ("-m", "bleu", "--tokenize", "none", "--force", "--paired-bs", "-f", "text")
        done = subprocess.run(
            [sys.executable, "-m", "sacrebleu", references, "-i", *map(str, files), *how],
            capture_output=True,
            text=True,
            check=True,
        )
        theirs = re.findall(r"p = ([0-9.]+)", done.stdout)
        assert float(theirs[-1]) == pytest.approx(found.rows["worse"].p[seed], abs=1e-4)
    # What are the same translations cannot differ by anything but chance.
    assert found.rows["same"].p[0] == 1


def test_compounds_count_as_their_parts(sweep: Sweep) -> None:
    # "well-known" is one token to sacreBLEU and three to the paper's script.
    score = collect_results(sweep).rows["better"].scores
    assert score["compound_bleu"].values != score["test_bleu"].values
    assert all(0 < value <= 100 for value in score["compound_bleu"].values)


def test_a_missing_cell_says_why_and_single_seeds_prove_nothing(sweep: Sweep) -> None:
    text = (write_report(collect_results(sweep)) / "table.md").read_text()
    assert "Missing: other/seed-2: failed, train:" in text
    single = Sweep(sweep.path, sweep.rows, [0])
    assert collect_results(single).minimum_detectable_difference("perplexity") is None
    text = (write_report(collect_results(single)) / "table.md").read_text()
    assert "proves nothing" in text


def test_arithmetic_is_counted_and_told_as_the_paper_tells_it_too(sweep: Sweep) -> None:
    counted, possible = collect_results(sweep).rows["better"].flops or (0, 0)
    assert counted == 4e9 + 8e9
    assert possible == pytest.approx(4e9 / 0.4 + 8e9 / 0.8)


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags, self.links, self.text = list[str](), list[str](), ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value for key, value in attrs if key == "href" and value]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_names_and_reasons_are_text_in_every_form(sweep: Sweep) -> None:
    folder = write_report(collect_results(sweep))
    page = Page()
    text = (folder / "index.html").read_text()
    page.feed(text)
    assert HOSTILE in page.text
    assert "b" not in page.tags
    assert "script" not in page.tags
    written = (text, *((folder / name).read_text() for name in ("table.tex", "table.md")))
    assert not any(HOSTILE in raw for raw in written)
    assert "<b>" not in "".join(written)
    with (folder / "runs.csv").open() as file:
        # What is missing is nothing, and no quote.
        assert list(csv.DictReader(file))[-1]["dev_bleu"] in ("", "80.0")
    # To its row's first run, and each run by itself.
    assert len(page.links) == len(FOUND) + 3 * len(FOUND)
    assert all((folder / link).resolve().is_relative_to(sweep.path) for link in page.links)
    assert (folder / "../better/seed-2").exists()
    assert "../better/seed-2" in page.links
    with (folder / "table.csv").open() as file:
        rows = list(csv.reader(file))
    assert [len(row) for row in rows] == [len(COLUMNS)] * (len(FOUND) + 1)
    assert [row[0] for row in rows[1:]] == list(FOUND)


def test_the_table_has_a_line_for_each_row_in_every_form(sweep: Sweep) -> None:
    folder = write_report(collect_results(sweep))
    latex = (folder / "table.tex").read_text()
    assert latex.count(r" \\") == len(FOUND) + 1
    assert r"d\_ff 33" in latex
    assert r"4.10 $\pm$ 0.10" in latex
    markdown = (folder / "table.md").read_text().splitlines()
    assert all(line.count(" | ") == len(COLUMNS) - 1 for line in markdown[: len(FOUND) + 2])
    for figure in ("curves.svg", "ratios.svg"):
        text = (folder / figure).read_text()
        assert text.count("<svg") == 1
        assert all(f">{name}" in text for name in FOUND)


def test_the_same_runs_give_the_same_report(sweep: Sweep) -> None:
    folder = write_report(collect_results(sweep))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    write_report(collect_results(sweep))
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_command_shows_the_table_and_names_its_files(
    sweep: Sweep, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(sweep.path)]) == 0
    out = capsys.readouterr().out
    assert "better" in out
    assert "kept in" in out


def test_runs_have_their_own_figures_unrounded(sweep: Sweep) -> None:
    with (write_report(collect_results(sweep)) / "runs.csv").open() as file:
        rows = {row["run"]: row for row in csv.DictReader(file)}
    assert len(rows) == 3 * len(FOUND)
    for run in sweep.runs[:-1]:
        scores = json.loads(next(run.path.glob("evaluations/dev-*/scores.json")).read_text())
        assert float(rows[run.name]["dev_perplexity"]) == scores["perplexity"]
        assert float(rows[run.name]["dev_bleu"]) == scores["bleu"]
    assert rows["base/seed-0"]["command"].startswith("transformer-jax evaluate ")
    assert rows["other/seed-2"]["state"] == "failed"


def made_by_hand(folder: Path, seed: int, d_ff: int, perplexity: float) -> Path:
    """Make a run and its scores without training one."""
    config = SMALL.change(train={"seed": seed}, model={"d_ff": d_ff})
    prepared = prepare(config.data)
    made = RunDirectory.create(folder, config, prepared.vocabulary, prepared.fingerprint)
    finished(PlannedRun(folder.parent, folder.name, seed, config), perplexity, 5, folder)
    return made.path


def test_runs_made_by_hand_are_rows_and_those_that_differ_by_seed_are_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [
        made_by_hand(tmp_path / "narrow", 0, 32, 5.0),
        made_by_hand(tmp_path / "wide", 0, 48, 4.0),
        made_by_hand(tmp_path / "narrow-again", 7, 32, 5.5),
    ]
    out = tmp_path / "hand"
    assert main(["report", *map(str, runs), "--out", str(out)]) == 0
    assert "paper to base" not in (out / "report" / "table.md").read_text()
    with (out / "report" / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["row"], row["seeds"], row["change"]) for row in rows] == [
        ("narrow", "2", "base"),
        ("wide", "1", "d_ff 48"),
    ]
    assert rows[0]["dev perplexity"] == "5.25 ± 0.35"
    assert "Of one seed, which proves nothing by itself: wide." in capsys.readouterr().out
    # Once more over the report that is there; over anything else never.
    assert main(["report", *map(str, runs), "--out", str(out)]) == 0
    (tmp_path / "mine").mkdir()
    assert main(["report", *map(str, runs), "--out", str(tmp_path / "mine")]) == 74
    assert main(["report", *map(str, runs)]) == 2
    assert main(["report", "--out", str(out)]) == 2
    shutil.copytree(runs[0], tmp_path / "copy")
    assert main(["report", *map(str, [*runs, tmp_path / "copy"]), "--out", str(out)]) == 2
    assert "from the same seed" in capsys.readouterr().err
    assert main(["report", str(runs[0]), str(runs[0]), "--out", str(out)]) == 2
    assert main(["report", str(runs[0]), str(tmp_path), "--out", str(out)]) == 2
    shutil.rmtree(runs[1] / "evaluations")
    assert main(["report", *map(str, runs), "--out", str(out)]) == 0
    assert "not scored: transformer-jax evaluate" in capsys.readouterr().out


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    runs = [
        made_by_hand(tmp_path / folder / "demo", 0, 32 + number, 5.0)
        for number, folder in enumerate(("a", "b", "c"))
    ]
    assert len(collect_runs(runs, tmp_path / "out").rows) == 3


def test_runs_of_other_text_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = made_by_hand(tmp_path / "a", 0, 32, 5.0)
    config = SMALL.change(data={"num_pairs": 150})
    prepared = prepare(config.data)
    RunDirectory.create(tmp_path / "b", config, prepared.vocabulary, prepared.fingerprint)
    assert main(["report", str(first), str(tmp_path / "b"), "--out", str(tmp_path / "c")]) == 2
    assert "was trained on other text than" in capsys.readouterr().err


def test_without_a_finished_run_there_is_nothing_to_report(tmp_path: Path) -> None:
    made = plan_sweep(tmp_path / "s", {"base": Row(SMALL)}, 1)
    made.store()
    with pytest.raises(UsageError, match=r"no run of .* is done"):
        collect_results(made)
