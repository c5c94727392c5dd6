"""Test the positions study's tables and figures with evaluations of synthetic runs."""

import csv
import json
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sacrebleu
from example_configs import NUMBER_WORDS, SMALL
from pages import ROOT
from scipy import stats

from experiments.positions.__main__ import main
from experiments.positions.report import (
    COLORS,
    MARKERS,
    footnotes,
    significance_bands,
    to_csv,
    to_markdown,
)
from experiments.positions.study import (
    MIN_SENTENCES,
    Bucket,
    Study,
    read_scores,
    score_by_length,
    split_by_length,
)
from transformer_jax.config import Row
from transformer_jax.config.loading import load_rows
from transformer_jax.errors import StorageError, UsageError
from transformer_jax.sweeps.plan import Origin, Sweep, SweepRun, Tuning, plan_sweep

CONFIGS = Path(__file__).parents[2] / "experiments" / "positions"
LIMIT = 8
SCHEMES: dict[str, dict[str, Any]] = {
    "base": {},
    "clamped": {"positions": "learned", "max_positions": LIMIT, "out_of_range_positions": "clamp"},
    "none": {"positions": "none"},
}
TEXT = {
    "corpus": "text",
    **dict.fromkeys(("train", "dev", "test"), ("a", "b")),
    "bleu_tokenizer": "none",
}
# The source lengths in each split. Every fourth target is one token longer than its source.
LENGTHS = {"dev": [2 + i % 14 for i in range(90)], "test": [3 + i % 20 for i in range(120)]}

Sentence = tuple[int, int, float, str, str]
"""The source length, target length, negative log-likelihood, hypothesis, and reference."""


def synthesize(run: SweepRun, split: str) -> list[Sentence]:
    """Return synthetic sentences for a split. Longer sentences have worse translations."""
    rng = np.random.default_rng([run.seed, *run.row.encode(), *split.encode()])
    sentences: list[Sentence] = []
    for i, source in enumerate(LENGTHS[split]):
        target = source + (i % 4 == 0)
        reference = [f"word{(i * 7 + position) % 50}" for position in range(target)]
        hypothesis = ["?" if rng.random() < 0.01 * source else word for word in reference]
        nll = float(rng.random() * source**1.3)
        sentences.append((source, target, nll, " ".join(hypothesis), " ".join(reference)))
    return sentences


def finish(run: SweepRun) -> None:
    """Write the files of a finished run."""
    for split in LENGTHS:
        folder = run.path / "evaluations" / f"{split}-step8-average1-beam4-alpha0.6"
        folder.mkdir(parents=True)
        sentences = synthesize(run, split)
        header = "source_tokens,target_tokens,nll\n"
        rows = "".join(f"{s},{t},{nll!r}\n" for s, t, nll, *_ in sentences)
        (folder / "sentences.csv").write_text(header + rows)
        for kind, column in (("hypothesis", 3), ("reference", 4)):
            (folder / f"{kind}.txt").write_text("".join(f"{x[column]}\n" for x in sentences))
        decode = run.config.decode
        scores = {"split": split, "step": 8, "perplexity": 2.0, "decode": asdict(decode)}
        scores["average_checkpoints"] = decode.average_checkpoints
        (folder / "scores.json").write_text(json.dumps(scores))
    run.status_file.write_text(json.dumps({"status": "done", "finished": ["train", *LENGTHS]}))


def make_sweep(path: Path, data: dict[str, Any]) -> Sweep:
    """Create a sweep of three schemes with two seeds each, and mark one run as failed."""
    config = SMALL.change(data={**data, "max_length": LIMIT})
    rows = {name: Row(config.change(model=model)) for name, model in SCHEMES.items()}
    sweep = plan_sweep(path, rows, 2)
    sweep.store()
    for run in sweep.runs:
        finish(run)
    failed = sweep.runs[-1]
    failed.status_file.write_text(
        json.dumps({"status": "failed", "phase": "train", "note": "full disk"})
    )
    return sweep


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    return make_sweep(tmp_path / "numbers", NUMBER_WORDS)


def sentences_between(run: SweepRun, above: float, end: float) -> list[Sentence]:
    sentences = [sentence for split in LENGTHS for sentence in synthesize(run, split)]
    return [sentence for sentence in sentences if above < max(sentence[:2]) <= end]


def test_the_scores_of_a_bucket_are_those_of_its_sentences(sweep: Sweep) -> None:
    study = score_by_length(sweep)
    assert study.max_training_length == LIMIT
    for scheme in SCHEMES:
        runs = [run for run in sweep.runs if run.row == scheme and run != sweep.runs[-1]]
        for bucket, scores in zip(study.buckets, study.curves[scheme], strict=True):
            by_run = [sentences_between(run, bucket.above, bucket.end) for run in runs]
            assert {len(sentences) for sentences in by_run} == {len(bucket.indices)}
            expected = {
                "perplexity": [
                    math.exp(sum(x[2] for x in sentences) / sum(x[1] for x in sentences))
                    for sentences in by_run
                ],
                "exact": [
                    100 * statistics.fmean(x[3] == x[4] for x in sentences) for sentences in by_run
                ],
            }
            for name, found in scores.items():
                assert found == pytest.approx(expected[name], rel=1e-12)
    assert len({statistics.fmean(scores["exact"]) for scores in study.curves["base"]}) > 3


def test_a_tuned_sweep_is_scored_on_the_test_set_alone(sweep: Sweep) -> None:
    tuning = Tuning("train.learning_rate_scale", (0.5, 1.0), (10_000,))
    study = score_by_length(replace(sweep, tuning=tuning))
    lengths = [max(x[:2]) for x in synthesize(sweep.runs[0], "test")]
    for bucket in study.buckets:
        assert len(bucket.indices) == sum(bucket.above < x <= bucket.end for x in lengths)
    assert footnotes(study)[0].endswith("The buckets contain the sentences of the test set.")


def test_text_is_scored_by_sacrebleu_with_the_tokenizer_of_the_runs(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path / "text", TEXT)
    study = score_by_length(sweep)
    assert "tok:none" in study.bleu_signature
    bleu = sacrebleu.BLEU(tokenize="none", force=True)
    runs = [run for run in sweep.runs if run.row == "clamped"]
    for bucket, scores in zip(study.buckets, study.curves["clamped"], strict=True):
        for run, value in zip(runs, scores["bleu"], strict=True):
            sentences = sentences_between(run, bucket.above, bucket.end)
            expected = bleu.corpus_score([x[3] for x in sentences], [[x[4] for x in sentences]])
            assert value == expected.score
            assert 1 < value < 99


def test_each_sentence_is_in_one_bucket_and_no_bucket_extends_across_the_training_length() -> None:
    rng = np.random.default_rng(0)
    for limit, count in ((8, 1000), (30, 300), (14, 200), (7, 250)):
        lengths = rng.integers(2, 4 * limit + 5, count)
        buckets, _ = split_by_length(lengths, limit)
        edges = [(bucket.above, bucket.end) for bucket in buckets]
        assert edges == sorted(edges)
        assert all(end <= limit or above >= limit for above, end in edges)
        for bucket in buckets:
            within = (lengths > bucket.above) & (lengths <= bucket.end)
            np.testing.assert_array_equal(bucket.indices, np.flatnonzero(within))
            assert len(bucket.indices) >= MIN_SENTENCES
        assert sum(len(bucket.indices) for bucket in buckets) == np.sum(lengths <= 4 * limit)


def test_a_small_bucket_is_merged_with_a_neighbor_or_reported() -> None:
    counts = {3: 5, 7: 50, 11: 40, 15: 2, 19: 19, 31: 3, 40: 4}
    buckets, excluded = split_by_length(np.repeat(list(counts), list(counts.values())), 8)
    sizes = {bucket.name: len(bucket.indices) for bucket in buckets}
    assert sizes == {"(0, 8]": 55, "(8, 12]": 40, "(12, 32]": 24}
    assert excluded == ["longer than 32: 4 sentences, left out"]
    buckets, excluded = split_by_length(np.repeat([7, 9], [50, MIN_SENTENCES - 1]), 8)
    assert [bucket.name for bucket in buckets] == ["(0, 8]"]
    assert excluded == ["(8, 32]: 19 sentences, fewer than 20"]


def test_buckets_end_at_the_given_edges(sweep: Sweep) -> None:
    study = score_by_length(sweep, (16, 4))
    assert [bucket.name for bucket in study.buckets] == ["(0, 4]", "(4, 16]"]
    assert study.controls == {}
    first, *others = sweep.rows
    control = replace(sweep.rows[first], is_control=True)
    rows = {first: sweep.rows[first], **dict.fromkeys(others, control)}
    copies = score_by_length(replace(sweep, rows=rows), (16, 4))
    assert copies.controls == dict.fromkeys(others, first)
    assert study.missing[-1].startswith("Missing: longer than 16: ")
    assert main([str(sweep.path), "--edges", "4", "7"]) == 0
    folder = sweep.path / "by-length"
    assert "L = 8" not in (folder / "by-length.svg").read_text()
    assert (folder / "table.md").read_text().endswith(" --edges 4 7\n")
    assert main([str(folder / "table.csv"), "--out", str(sweep.path / "again")]) == 0
    redrawn = {path.name for path in (sweep.path / "again").iterdir()}
    assert redrawn == {"by-length.svg", "by-length.png"}
    for bucket, scores in zip(study.buckets, study.curves["base"], strict=True):
        sentences = sentences_between(sweep.runs[0], bucket.above, bucket.end)
        exact = 100 * statistics.fmean(x[3] == x[4] for x in sentences)
        assert scores["exact"][0] == pytest.approx(exact)


def test_the_differences_have_the_intervals_of_the_paired_t_test() -> None:
    rng = np.random.default_rng(0)
    base = rng.normal(0, 0.1, 5)
    other, equal = base + rng.normal(0.5, 0.02, 5), base + rng.normal(0, 0.001, 5)

    def describe(values: np.ndarray) -> str:
        perplexities = {"a": np.exp(base), "b": np.exp(values)}
        curves: dict[str, Any] = {
            k: [{"perplexity": list(x), "exact": list(100 * x)}] for k, x in perplexities.items()
        }
        seeds = {"a": range(5), "b": range(5)}
        bucket = Bucket(0, 8, np.arange(20))
        text = to_markdown(Study(["a", "b"], seeds, 8, [bucket], "exact", "", curves, []))
        table = text.split("\n\n")[2].splitlines()
        assert table[0] == "| ln perplexity minus a | (0, 8], 20 sentences |"
        return table[-1]

    low, high = stats.ttest_rel(other, base).confidence_interval()
    mean = np.mean(other - base)
    assert describe(other) == f"| b | {mean:+.3f} [{low:+.3f} {high:+.3f}] |"
    assert describe(equal).endswith("] = |")


def test_the_table_marks_significant_means(tmp_path: Path) -> None:
    perplexities = {"base": (5.0, 5.2, 5.4), "far": (9.9, 10.2, 11.0), "near": (5.2, 5.0, 5.5)}
    lines = ["row,max_training_length,above,end,sentences,score,seed,value"]
    for scheme, values in perplexities.items():
        for seed, value in enumerate(values):
            lines.append(f"{scheme},8,0,8,50,perplexity,{seed},{value}")
            lines.append(f"{scheme},8,0,8,50,exact,{seed},{value}")
    (tmp_path / "table.csv").write_text("\n".join(lines))
    table = to_markdown(read_scores(tmp_path / "table.csv"))
    assert "| base | 5.20 ± 0.20 |" in table
    assert "| far | 10.37 ± 0.57\\* |" in table
    assert "| near | 5.23 ± 0.25 |" in table
    assert table.count("\\*") == 2 + 1, "one cell for each score, and the footnote"


def test_the_notes_name_the_rows_to_which_the_bands_do_not_apply() -> None:
    values = {
        "base": (5.0, 5.2, 5.4),
        "near": (5.1, 5.2, 5.5),
        "far": (9.0, 9.2, 9.4),
        "wide": (1.0, 9.0, 20.0),
    }
    curves: dict[str, Any] = {
        name: [{"perplexity": [2.0, 2.0, 2.0], "exact": list(x)}] for name, x in values.items()
    }

    def to_text(schemes: Sequence[str]) -> str:
        seeds = {scheme: range(len(curves[scheme][0]["exact"])) for scheme in schemes}
        bucket = Bucket(0, 8, np.arange(20))
        chosen = {scheme: curves[scheme] for scheme in schemes}
        study = Study(schemes, seeds, 8, [bucket], "exact", "", chosen, [])
        [band] = significance_bands(study, "exact")
        assert band is not None
        for scheme in schemes[1:]:
            mean = statistics.fmean(curves[scheme][0]["exact"])
            assert (band[0] <= mean <= band[1]) == (scheme == "near")
        return to_markdown(study)

    text = to_text(["base", "near", "far"])
    assert "every mean outside its bucket's gray band differs significantly.\n" in text
    text = to_text(list(values))
    # The wide row's mean is outside the band, but does not differ significantly from base's mean.
    assert "| wide | 10.0 ± 9.5 |" in text
    assert "| far | 9.2 ± 0.2\\* |" in text
    assert "gray band differs significantly, except for rows that a note below names.\n" in text
    assert "times the typical one: wide in (0, 8] (lines exactly right)." in text
    # A row with a single seed has no confidence interval.
    curves["single"] = [{"perplexity": [2.0], "exact": [30.0]}]
    text = to_text(["base", "near", "single"])
    assert "| single | 30.0 |" in text
    assert "except for rows that a note below names.\n" in text
    assert "these rows, which have other seeds than base: single.\n" in text


@pytest.mark.parametrize("folder", ["short-numbers", "number-words", "multi30k"])
def test_the_published_tables_mark_the_differences_in_their_stored_scores(folder: str) -> None:
    path = ROOT / f"experiments/results/positions-{folder}"
    study, published = read_scores(path / "table.csv"), (path / "table.md").read_text("utf-8")

    def marked(text: str) -> list[list[bool]]:
        rows = [x for x in text.splitlines() if x.startswith("|")]
        return [["\\*" in cell for cell in row.split("|")] for row in rows]

    assert marked(to_markdown(study)) == marked(published)
    assert sum(map(sum, marked(published))) > 10


def test_all_buckets_of_a_score_are_one_family() -> None:
    rng = np.random.default_rng(0)
    base, other = rng.normal(30, 1, (2, 5))

    def band(num_buckets: int) -> tuple[float, float]:
        curves: dict[str, Any] = {
            k: [{"exact": list(x)}] * num_buckets for k, x in (("a", base), ("b", other))
        }
        buckets = [Bucket(0, 8, np.arange(20))] * num_buckets
        study = Study(
            ["a", "b"], dict.fromkeys("ab", range(5)), 8, buckets, "exact", "", curves, []
        )
        [*_, last] = significance_bands(study, "exact")
        assert last is not None
        return last

    # With two rows, Dunnett's method with seeds as blocks is equivalent to the paired t test.
    for num_buckets in (1, 3):
        edge = band(num_buckets)[1]
        p = stats.ttest_rel(base, other - other.mean() + edge).pvalue
        assert p == pytest.approx(0.05 / num_buckets, rel=0.01)


def test_a_control_is_described_but_does_not_change_the_comparisons() -> None:
    rng = np.random.default_rng(0)
    values = {"base": rng.normal(30, 1, 3), "other": rng.normal(35, 1, 3)}
    buckets = [Bucket(0, 8, np.arange(20)), Bucket(8, 16, np.arange(20))]

    def describe(**controls: np.ndarray) -> str:
        every = {**values, **controls}
        curves: dict[str, Any] = {
            k: [{"perplexity": list(x), "exact": list(x)}] * 2 for k, x in every.items()
        }
        seeds = {k: range(20_000, 20_003) if k == "again" else range(3) for k in every}
        study = Study(list(every), seeds, 8, buckets, "exact", "", curves, [], {"again": "base"})
        assert significance_bands(study, "exact") == significance_bands(
            replace(study, schemes=list(values), curves={k: curves[k] for k in values}), "exact"
        )
        return to_markdown(study)

    assert "copy" not in describe()
    same = describe(again=values["base"] + 0.1)
    assert "| again | " in same
    assert "again is a copy of base with other seeds. " in same
    assert "it seems to differ in 0 of 2 (perplexity per token) and 0 of 2 (lines exac" in same
    assert "gray bands do not apply" not in same
    far = describe(again=values["base"] + 20)
    assert "it seems to differ in 2 of 2 (perplexity per token) and 2 of 2 (lines exac" in far


def test_a_control_is_not_described_before_the_row_that_it_copies_has_runs() -> None:
    curves: dict[str, Any] = {"control": [{"perplexity": [2.0, 3.0], "exact": [50.0, 60.0]}]}
    seeds = {"base": [], "control": [20_000, 20_001]}
    buckets = [Bucket(0, 8, np.arange(20))]
    schemes, controls = ["base", "control"], {"control": "base"}
    text = to_markdown(Study(schemes, seeds, 8, buckets, "exact", "", curves, [], controls))
    assert "| control | " in text
    assert "copy" not in text


@pytest.mark.slow
def test_the_command_writes_the_same_figure_and_tables_each_time(
    sweep: Sweep, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(sweep.path)]) == 0
    folder = sweep.path / "extrapolation"
    output = capsys.readouterr().out
    text = (folder / "table.md").read_text()
    assert text.strip() in output
    assert "Missing: none/seed-1: failed, train: full disk" in text
    study = score_by_length(sweep)
    exact = study.curves["base"][0]["exact"]
    assert f"| {statistics.fmean(exact):.1f} ± {statistics.stdev(exact):.1f} |" in text
    assert text.count("| none |") == text.count("| clamped |") == 4
    with (folder / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    # Two schemes have two runs each, and the third has one run. Each run has two scores per bucket.
    assert len(rows) == 5 * 2 * len(study.buckets)
    value = next(r["value"] for r in rows if r["row"] == "base" and r["score"] == "exact")
    assert float(value) == pytest.approx(exact[0], rel=1e-5)
    assert (folder / "extrapolation.png").read_bytes().startswith(b"\x89PNG")
    drawing = (folder / "extrapolation.svg").read_text()
    assert drawing.count("<svg") == 1
    assert f"L = {LIMIT}" in drawing
    assert all(f">{name}<" in drawing for name in SCHEMES)
    assert main([str(sweep.path), "--out", str(tmp_path / "again")]) == 0
    for file in folder.iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.slow
def test_the_table_of_a_report_draws_its_figure_again(sweep: Sweep, tmp_path: Path) -> None:
    assert main([str(sweep.path)]) == 0
    folder = sweep.path / "extrapolation"
    text = (folder / "table.csv").read_text()
    study = read_scores(folder / "table.csv")
    assert to_csv(study) == text
    assert study.max_training_length == LIMIT
    assert main([str(folder / "table.csv"), "--out", str(tmp_path / "again")]) == 0
    figures = {"extrapolation.png", "extrapolation.svg"}
    assert {path.name for path in (tmp_path / "again").iterdir()} == figures
    for content in ("", text.replace("perplexity", "loss"), text.replace(",0,", ",x,")):
        (tmp_path / "table.csv").write_text(content)
        with pytest.raises(StorageError, match=r"table\.csv cannot be read"):
            read_scores(tmp_path / "table.csv")


@pytest.mark.parametrize("name", ["perplexity", "exact"])
def test_a_mean_at_the_edge_of_the_band_has_a_simultaneous_p_value_of_5_percent(name: Any) -> None:
    rng = np.random.default_rng(0)
    base, other = rng.normal(3, 0.1, (2, 4))

    def make_study(*rows: np.ndarray) -> Study:
        values = [np.exp(row) if name == "perplexity" else row for row in rows]
        curves = {str(number): [{name: row.tolist()}] for number, row in enumerate(values)}
        seeds = {scheme: range(4) for scheme in curves}
        bucket = Bucket(0, 8, np.arange(20))
        return Study(list(curves), seeds, 8, [bucket], "exact", "", curves, [])

    [band] = significance_bands(make_study(base, other), name)
    assert band is not None
    for edge in np.log(band) if name == "perplexity" else band:
        # With two rows, Dunnett's method with seeds as blocks is equivalent to the paired t-test.
        p = stats.ttest_rel(base, other - other.mean() + edge).pvalue
        assert p == pytest.approx(0.05, rel=0.01)
    # With more rows, the probability of any false positive is still 5%.
    rows = np.stack([base, other, rng.normal(3, 0.1, 4)])
    [joint] = significance_bands(make_study(*rows), name)
    assert joint is not None
    low, high = np.log(joint) if name == "perplexity" else joint
    residuals = rows - rows.mean(0) - rows.mean(1, keepdims=True) + rows.mean()
    error = np.sqrt(np.sum(residuals**2) / 6 * 2 / 4)
    critical = np.full(2, (high - low) / 2 / error)
    maximum = stats.multivariate_t(shape=np.eye(2) / 2 + 0.5, df=6)
    assert maximum.cdf(critical, lower_limit=-critical) == pytest.approx(0.95, abs=1e-3)
    equal = np.full(4, 2.0)
    assert significance_bands(make_study(equal, equal), name) == [None]


def test_a_run_that_failed_to_train_is_listed_and_excluded(
    sweep: Sweep, capsys: pytest.CaptureFixture[str]
) -> None:
    run = sweep.find("base/seed-1")
    [path] = run.path.glob("evaluations/dev-*/scores.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"perplexity": math.inf}))
    study = score_by_length(sweep)
    assert study.seeds["base"] == [0]
    assert all(len(values) == 1 for scores in study.curves["base"] for values in scores.values())
    assert main([str(sweep.path)]) == 0
    [note] = [x for x in capsys.readouterr().out.splitlines() if x.startswith("- Failed to train")]
    assert note.endswith(": base/seed-1 (inf).")


def test_a_scheme_without_a_finished_run_has_no_scores(sweep: Sweep) -> None:
    for run in sweep.runs:
        if run.row == "none":
            run.status_file.unlink()
            if run.seed == 1:
                run.config_file.unlink()
    assert main([str(sweep.path)]) == 0
    text = (sweep.path / "extrapolation" / "table.md").read_text()
    assert re.search(r"\| none( \| -)+ \|", text)
    assert "Missing: none/seed-0: queued" in text
    assert "Missing: none/seed-1: not planned" in text


def test_the_table_says_how_the_runs_were_trained(sweep: Sweep) -> None:
    origin = Origin("transformer-jax sweep numbers.py", "0123456789ab")
    replace(sweep, origins=[origin]).store()
    assert main([str(sweep.path)]) == 0
    text = (sweep.path / "extrapolation" / "table.md").read_text()
    notes = text.split("\n\n")[-1].splitlines()
    assert notes[0].endswith("The buckets contain the sentences of the development and test sets.")
    corpus, budget, search, analysis, trained, reported = notes[-6:]
    assert corpus.startswith("- Corpus: number words, 20,000 pairs, with 64 tokens")
    assert budget.startswith("- Budget: 8 steps of about 512 tokens each")
    assert search.startswith("- Search: beam\\_size 4")
    assert analysis == "- docs/statistics.md of transformer-jax describes this analysis."
    assert trained == f"- Trained by: {origin}"
    assert reported.startswith("- Reported by: python -m experiments.positions ")


def test_unreadable_input_is_reported_in_one_line(
    sweep: Sweep, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def report(path: Path, *options: str) -> tuple[int, str]:
        code = main([str(path), *options])
        output = capsys.readouterr()
        assert (output.out, output.err.count("\n")) == ("", 1)
        return code, output.err

    assert report(tmp_path)[0] == UsageError.exit_code
    (tmp_path / "file").touch()
    code, line = report(sweep.path, "--out", str(tmp_path / "file"))
    assert code == StorageError.exit_code
    assert "cannot be written" in line
    run = sweep.runs[0]
    file = next(run.path.glob("evaluations/test-*/sentences.csv"))
    longer = file.read_text() + "3,3,1.0\n"
    for content in (longer, "source_tokens,target_tokens,nll\n1,2,x\n", "", None):
        if content is None:
            file.unlink()
        else:
            file.write_text(content)
        code, line = report(sweep.path)
        assert code == StorageError.exit_code
        assert f"run `transformer-jax evaluate {run.path} --split test`" in line
    for run in sweep.runs:
        run.status_file.unlink()
    code, line = report(sweep.path)
    assert code == UsageError.exit_code
    assert "no run" in line
    with pytest.raises(UsageError, match=r"20 sentences: \(0, 1\]: 0 sentences, fewer than 20; "):
        score_by_length(make_sweep(tmp_path / "few", NUMBER_WORDS), (1,))
    for path, edge in ((sweep.path, "0"), (tmp_path / "table.csv", "8")):
        code, line = report(path, "--edges", edge)
        assert code == UsageError.exit_code
        assert f"--edges {edge}: " in line


def test_runs_with_different_references_are_not_compared(sweep: Sweep) -> None:
    file = next(sweep.runs[1].path.glob("evaluations/dev-*/reference.txt"))
    file.write_text(file.read_text().replace("word3", "word4", 1))
    with pytest.raises(UsageError, match="scored on different sentences"):
        score_by_length(sweep)


@pytest.mark.parametrize("name", ["number_words", "short_numbers", "multi30k"])
def test_the_rows_of_a_study_differ_in_positions_alone(name: str) -> None:
    rows = load_rows(str(CONFIGS / f"{name}.py"))
    base = next(iter(rows.values())).config
    limit = base.data.max_length
    assert base.model.positions == "sinusoidal"
    assert base.model.max_length == 4 * limit
    assert len(rows) <= min(len(COLORS), len(MARKERS))
    schemes = {}
    for scheme, row in rows.items():
        changes = {key: value for (_, key), (_, value) in base.differences(row.config).items()}
        assert changes.keys() <= {
            *("positions", "max_positions"),
            *("out_of_range_positions", "learned_positions_init"),
        }
        schemes[scheme] = changes
    assert schemes["clamped"] == {
        "positions": "learned",
        "max_positions": limit,
        "out_of_range_positions": "clamp",
    }
    assert schemes["learned"] == {"positions": "learned"}
    for scheme, init in (("scaled", "sinusoidal_scale"), ("from_sinusoids", "sinusoids")):
        assert schemes[scheme] == {"positions": "learned", "learned_positions_init": init}
    assert {changes.get("positions", "sinusoidal") for changes in schemes.values()} == {
        *("sinusoidal", "concatenated_sinusoidal", "learned", "none"),
        *("alibi", "rotary", "relative"),
    }
