"""The study of lengths at toy size: it says what the runs' files say."""

import csv
import json
import math
import re
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sacrebleu
from small import SMALL

from experiments.positions.__main__ import main
from experiments.positions.report import COLOURS, MARKERS
from experiments.positions.study import FEWEST, buckets, study
from transformer_jax.config import Row
from transformer_jax.config.loading import load_rows
from transformer_jax.errors import StorageError, UsageError
from transformer_jax.sweeps.plan import Sweep, SweepRun, plan_sweep

CONFIGS = Path(__file__).parents[2] / "experiments" / "positions"
LIMIT = 8
ROWS: dict[str, dict[str, Any]] = {
    "base": {},
    "clamped": {"positions": "learned", "max_positions": LIMIT, "out_of_range_positions": "clamp"},
    "none": {"positions": "none"},
}
TEXT = {
    "corpus": "text",
    **dict.fromkeys(("train", "dev", "test"), ("a", "b")),
    "bleu_tokenizer": "none",
}
# Of sources; a target has one piece more for every fourth line, and so is the longer side.
LENGTHS = {"dev": [2 + i % 14 for i in range(90)], "test": [3 + i % 20 for i in range(120)]}


def sentences(run: SweepRun, name: str) -> list[tuple[int, int, float, str, str]]:
    """Return what a made-up run made of a set: the longer, the worse."""
    rng = np.random.default_rng([run.seed, *run.row.encode(), *name.encode()])
    found = []
    for i, source in enumerate(LENGTHS[name]):
        target = source + (i % 4 == 0)
        words = [f"word{(i * 7 + place) % 50}" for place in range(target)]
        said = ["?" if rng.random() < 0.01 * source else word for word in words]
        nll = float(rng.random() * source**1.3)
        found.append((source, target, nll, " ".join(said), " ".join(words)))
    return found


def finish(run: SweepRun) -> None:
    """Write what a run that is done has written."""
    for name in LENGTHS:
        folder = run.path / "evaluations" / f"{name}-step8-average1-beam4-alpha0.6"
        folder.mkdir(parents=True)
        found = sentences(run, name)
        head = "source_pieces,target_pieces,nll\n"
        rows = "".join(f"{s},{t},{nll!r}\n" for s, t, nll, *_ in found)
        (folder / "sentences.csv").write_text(head + rows)
        for kind, column in (("hypothesis", 3), ("reference", 4)):
            (folder / f"{kind}.txt").write_text("".join(f"{row[column]}\n" for row in found))
        (folder / "scores.json").write_text(json.dumps({"split": name, "perplexity": 2.0}))
    run.status_file.write_text(json.dumps({"status": "done", "finished": ["train", *LENGTHS]}))


def made(path: Path, data: dict[str, Any]) -> Sweep:
    """Make a sweep of three rows and two seeds, in which one run failed."""
    config = SMALL.change(data={**data, "max_length": LIMIT})
    sweep = plan_sweep(path, {name: Row(config.change(model=row)) for name, row in ROWS.items()}, 2)
    sweep.store()
    for run in sweep.runs:
        finish(run)
    failed = sweep.runs[-1]
    failed.status_file.write_text(json.dumps({"status": "failed", "phase": "train", "note": "full disk"}))
    return sweep


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    return made(tmp_path / "numbers", {})


def expected(run: SweepRun, above: float, end: float) -> list[tuple[int, int, float, str, str]]:
    both = [row for name in LENGTHS for row in sentences(run, name)]
    return [row for row in both if above < max(row[:2]) <= end]


def test_scores_of_a_bucket_are_those_of_its_sentences(sweep: Sweep) -> None:
    found = study(sweep)
    assert found.limit == LIMIT
    for name in ROWS:
        runs = [run for run in sweep.runs if run.row == name and run != sweep.runs[-1]]
        for bucket, scores in zip(found.buckets, found.scores[name], strict=True):
            rows = [expected(run, bucket.above, bucket.end) for run in runs]
            assert {len(some) for some in rows} == {len(bucket.places)}
            perplexities = [
                math.exp(sum(row[2] for row in some) / sum(row[1] for row in some)) for some in rows
            ]
            exact = [100 * statistics.fmean(row[3] == row[4] for row in some) for some in rows]
            for score, values in (("perplexity", perplexities), ("exact", exact)):
                assert scores[score].values == pytest.approx(values, rel=1e-12)
                assert scores[score].mean == pytest.approx(statistics.fmean(values))
    assert len({spread["exact"].mean for spread in found.scores["base"]}) > 3


def test_text_is_scored_by_sacrebleu_with_the_runs_tokenizer(tmp_path: Path) -> None:
    sweep = made(tmp_path / "text", TEXT)
    found = study(sweep)
    assert "tok:none" in found.signature
    bleu = sacrebleu.BLEU(tokenize="none", force=True)
    for bucket, scores in zip(found.buckets, found.scores["clamped"], strict=True):
        runs = [run for run in sweep.runs if run.row == "clamped"]
        for run, ours in zip(runs, scores["bleu"].values, strict=True):
            rows = expected(run, bucket.above, bucket.end)
            theirs = bleu.corpus_score([row[3] for row in rows], [[row[4] for row in rows]])
            assert ours == theirs.score
            assert 1 < ours < 99


def test_each_sentence_is_in_one_bucket_and_none_spans_the_longest_of_training() -> None:
    rng = np.random.default_rng(0)
    for limit, count in ((8, 1000), (30, 300), (14, 200), (7, 250)):
        lengths = rng.integers(2, 4 * limit + 5, count)
        found, _ = buckets(lengths, limit)
        edges = [(bucket.above, bucket.end) for bucket in found]
        assert edges == sorted(edges)
        assert all(end <= limit or above >= limit for above, end in edges)
        for bucket in found:
            within = (lengths > bucket.above) & (lengths <= bucket.end)
            np.testing.assert_array_equal(bucket.places, np.flatnonzero(within))
            assert len(bucket.places) >= FEWEST
        assert sum(len(bucket.places) for bucket in found) == np.sum(lengths <= 4 * limit)


def test_a_thin_bucket_is_joined_with_the_next_or_told() -> None:
    at = {3: 5, 7: 50, 11: 40, 15: 2, 19: 19, 31: 3, 40: 4}
    lengths = np.repeat(list(at), list(at.values()))
    found, why = buckets(lengths, 8)
    names = {bucket.name: len(bucket.places) for bucket in found}
    assert names == {"(0, 8]": 55, "(8, 12]": 40, "(12, 32]": 24}
    assert why == ["longer than 32: 4 sentences, left out"]
    short = np.repeat([7, 9], [50, FEWEST - 1])
    found, why = buckets(short, 8)
    assert [bucket.name for bucket in found] == ["(0, 8]"]
    assert why == ["(8, 32]: 19 sentences, fewer than 20"]


def test_the_command_writes_figure_and_tables_the_same_each_time(
    sweep: Sweep, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(sweep.path)]) == 0
    folder = sweep.path / "extrapolation"
    shown = capsys.readouterr().out
    text = (folder / "table.md").read_text()
    assert text.strip() in shown
    assert "Missing: none/seed-1: failed, train: full disk" in text
    found = study(sweep)
    spread = found.scores["base"][0]["exact"]
    assert f"| {spread.mean:.1f} ± {spread.deviation:.1f} |" in text
    assert text.count("| none |") == text.count("| clamped |") == 2
    with (folder / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    # Two runs of two rows, one of the third; two scores.
    assert len(rows) == 5 * 2 * len(found.buckets)
    value = next(r["value"] for r in rows if r["row"] == "base" and r["score"] == "exact")
    assert float(value) == pytest.approx(spread.values[0], rel=1e-5)
    assert (folder / "extrapolation.png").read_bytes().startswith(b"\x89PNG")
    drawing = (folder / "extrapolation.svg").read_text()
    assert drawing.count("<svg") == 1
    assert f"L = {LIMIT}" in drawing
    assert all(f">{name}<" in drawing for name in ROWS)
    assert main([str(sweep.path), "--out", str(tmp_path / "again")]) == 0
    for file in folder.iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()


def test_a_row_that_is_not_done_has_no_scores(sweep: Sweep) -> None:
    for run in sweep.runs:
        if run.row == "none":
            run.status_file.unlink()
    assert main([str(sweep.path)]) == 0
    text = (sweep.path / "extrapolation" / "table.md").read_text()
    assert re.search(r"\| none( \| -)+ \|", text)
    assert "Missing: none/seed-0: queued" in text


def test_what_cannot_be_read_is_told_in_one_line(
    sweep: Sweep, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(path: Path, *options: str) -> tuple[int, str]:
        code = main([str(path), *options])
        shown = capsys.readouterr()
        assert (shown.out, shown.err.count("\n")) == ("", 1)
        return code, shown.err

    code, line = told(tmp_path)
    assert code == UsageError.exit_code
    assert "is not a sweep" in line
    (tmp_path / "file").touch()
    code, line = told(sweep.path, "--out", str(tmp_path / "file"))
    assert code == StorageError.exit_code
    assert "cannot be written" in line
    run = sweep.runs[0]
    kept = next(run.path.glob("evaluations/test-*/sentences.csv"))
    longer = kept.read_text() + "3,3,1.0\n"
    for content in (longer, "source_pieces,target_pieces,nll\n1,2,x\n", "", None):
        if content is None:
            kept.unlink()
        else:
            kept.write_text(content)
        code, line = told(sweep.path)
        assert code == StorageError.exit_code
        assert f"run `transformer-jax evaluate {run.path} --split test`" in line
    for run in sweep.runs:
        run.status_file.unlink()
    code, line = told(sweep.path)
    assert code == UsageError.exit_code
    assert "no run" in line


def test_runs_of_other_sentences_are_not_compared(sweep: Sweep) -> None:
    file = next(sweep.runs[1].path.glob("evaluations/dev-*/reference.txt"))
    file.write_text(file.read_text().replace("word3", "word4", 1))
    with pytest.raises(UsageError, match="scored on other sentences"):
        study(sweep)


@pytest.mark.parametrize("name", ["number_words", "short_numbers", "multi30k"])
def test_the_studies_rows_differ_in_positions_alone(name: str) -> None:
    rows = load_rows(str(CONFIGS / f"{name}.py"))
    base = next(iter(rows.values())).config
    limit = base.data.max_length
    assert base.model.positions == "sinusoidal"
    assert base.model.max_length == 4 * limit
    assert len(rows) <= min(len(COLOURS), len(MARKERS))
    schemes = {}
    for row, found in rows.items():
        changes = {key: value for (_, key), (_, value) in base.differences(found.config).items()}
        assert changes.keys() <= {"positions", "max_positions", "out_of_range_positions"}
        schemes[row] = changes
    assert schemes["clamped"] == {
        "positions": "learned",
        "max_positions": limit,
        "out_of_range_positions": "clamp",
    }
    assert schemes["untrained"] == {"positions": "learned"}
    assert {changes.get("positions", "sinusoidal") for changes in schemes.values()} == {
        *("sinusoidal", "concatenated_sinusoidal", "learned", "none"),
        *("alibi", "rotary", "relative"),
    }
