"""Create the files of finished runs without training, to test reports."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from small import SMALL

from transformer_jax.config import Config, Paper, Row
from transformer_jax.data.prepare import prepare
from transformer_jax.reports.results import Results, collect_results
from transformer_jax.runs.run_folder import RunFolder
from transformer_jax.sweeps.plan import Sweep, SweepRun, plan_sweep
from transformer_jax.sweeps.status import read_status

REFERENCES = [f"the well-known man number {i} saw a dog and {i % 7} cats" for i in range(60)]
# Each row consists of a perplexity for each seed, a percentage of wrong words, and the paper's
# results.
RESULTS = {
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
# Each of these characters has a special meaning in Markdown, LaTeX, HTML, or spreadsheets.
HOSTILE = "<b>&%_$#{}~^\\ |=1+1\"'`"


def write_results(
    run: SweepRun, perplexity: float, wrong: int, splits: Sequence[str] = ("dev", "test")
) -> None:
    """Write a finished run's evaluations and metrics."""
    rng = np.random.default_rng([run.seed, wrong])
    hypotheses = [
        " ".join("?" if rng.integers(100) < wrong else word for word in line.split())
        for line in REFERENCES
    ]
    for split in splits:
        shift = 0.5 if split == "test" else 0.0
        folder = run.path / "evaluations" / f"{split}-step8-average1-beam4-alpha0.6"
        folder.mkdir(parents=True)
        for name, lines in (("hypothesis", hypotheses), ("reference", REFERENCES)):
            (folder / f"{name}.txt").write_text("".join(f"{line}\n" for line in lines))
        scores = {
            "split": split,
            "step": 8,
            "average_checkpoints": 1,
            "decode": dataclasses.asdict(run.config.decode),
            "perplexity": perplexity + shift,
            "bleu": 90 - wrong + shift,
            "compound_bleu": 91 - wrong,
        }
        (folder / "scores.json").write_text(json.dumps(scores))
    reports = [
        *({"step": s, "split": "dev", "perplexity": perplexity + 8 / s} for s in (2, 4, 8)),
        *({"step": s, "split": "train", "flops": 1e9 * s, "utilization": 0.1 * s} for s in (4, 8)),
    ]
    (run.path / "metrics.jsonl").write_text("".join(f"{json.dumps(x)}\n" for x in reports))


def set_status(run: SweepRun, status: str, **details: object) -> None:
    """Write the given contents to a run's status file."""
    run.status_file.write_text(json.dumps({"status": status, **details}))


def make_finished_sweep(
    path: Path, rows: Sequence[str] = tuple(RESULTS), splits: Sequence[str] = ("dev", "test")
) -> Sweep:
    """Create a sweep of finished runs with three seeds per row."""
    configs = {
        name: Row(SMALL.change(data=TEXT, model={"d_ff": 32 + i}), paper)
        for i, (name, (_, _, paper)) in enumerate(RESULTS.items())
    }
    sweep = plan_sweep(path, {name: configs[name] for name in rows}, 3)
    sweep.store()
    for run in sweep.runs:
        perplexities, wrong, _ = RESULTS[run.row]
        write_results(run, perplexities[run.seed], wrong, splits)
        set_status(run, "done", finished=["train", *splits])
    return sweep


def collect(sweep: Sweep) -> Results:
    """Collect a sweep's results the way the command line does."""
    return collect_results(
        sweep, [read_status(run) for run in sweep.runs], "transformer-jax report"
    )


def make_run(path: Path, config: Config = SMALL, perplexity: float | None = None) -> Path:
    """Create a run folder without training, and add scores if `perplexity` is given."""
    prepared = prepare(config.data)
    RunFolder.create(path, config, prepared.vocabulary, prepared.fingerprint)
    if perplexity is not None:
        run = SweepRun(path, path.name, path.name, config.train.seed, config)
        write_results(run, perplexity, 5, splits=["dev"])
    return path
