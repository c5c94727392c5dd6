"""Write the files of runs without training: checkpoints, metrics, evaluations, and sweeps."""

import dataclasses
import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from example_configs import SMALL
from rich.console import Console

from transformer_jax.baselines.build import build_model
from transformer_jax.config import Config, Paper, Row
from transformer_jax.data.prepare import prepare_text
from transformer_jax.files import read_json, write_json
from transformer_jax.model.encoder_decoder import init_params
from transformer_jax.reports.collect import collect_results
from transformer_jax.reports.results import Results
from transformer_jax.runs.array_store import on_device
from transformer_jax.runs.checkpoint_manager import CheckpointManager
from transformer_jax.runs.run_folder import RunFolder
from transformer_jax.sweeps.plan import Sweep, SweepRun, plan_sweep
from transformer_jax.sweeps.status import read_status
from transformer_jax.training.create_run import create_run


def write_untrained_run(
    path: Path, config: Config = SMALL, *, steps: tuple[int, ...] = (4, 8), scale: float = 1.0
) -> RunFolder:
    """Create a run whose scheduled checkpoints have different random parameters.

    Args:
        path: the path to the run.
        config: the run's config.
        steps: the step of each checkpoint.
        scale: a factor that multiplies all weight matrices. With a factor of 3, different lines
            get different translations.
    """
    run = create_run(config, path, Console(quiet=True))
    model = build_model(run.config.model, **run.vocabulary.sizes)
    with CheckpointManager(run.checkpoints, run.identity, keep=len(steps)) as checkpoints:
        for step in steps:
            params = init_params(model, jax.random.key(step))
            params = jax.tree.map(lambda x: x * scale if x.ndim > 1 else x, params)
            arrays = {"params": params}
            checkpoints.prepare_save(step, arrays)
            checkpoints.save(step, arrays, 10.0 / step, {})
    return run


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
    """Collect a sweep's results in the same way as the command line does."""
    return collect_results(
        sweep, [read_status(run) for run in sweep.runs], "transformer-jax report"
    )


def make_run(path: Path, config: Config = SMALL, perplexity: float | None = None) -> Path:
    """Create a run folder without training, and add scores if `perplexity` is given."""
    prepared = prepare_text(config.data)
    RunFolder.create(path, config, prepared.vocabulary, prepared.fingerprint)
    if perplexity is not None:
        run = SweepRun(path, path.name, path.name, config.train.seed, config)
        write_results(run, perplexity, 5, splits=["dev"])
    return path


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
    # Python's JSON parser accepts all of these values of x.
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


def write_recorded_run(path: Path) -> RunFolder:
    """Write a run that has no checkpoints, and whose metrics and scores contain invalid values."""
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
    """Copy a run, and change the copy's metrics and config."""
    shutil.copytree(run.path, path)
    description = read_json(path / "run.json")
    for section, fields in changes.items():
        description["config"][section] |= fields
    write_json(path / "run.json", description)
    folder = RunFolder.open(path)
    write_metrics(folder, reports)
    return folder


IDENTITY = {"model.d_model": 2, "data": "f1a9"}
SHARDING = jax.sharding.SingleDeviceSharding(jax.devices()[0])


def params_of(step: int) -> dict[str, Any]:
    """Return a small parameter tree whose values depend on the step."""
    return {"layer": {"kernel": jnp.full((3, 2), float(step)), "bias": jnp.arange(2.0) + step}}


def with_optimizer(params: Any) -> dict[str, Any]:
    """Return the contents of a checkpoint: the given parameters and an optimizer state."""
    return {"params": params, "optimizer": {"count": jnp.int32(7)}}


def target_like(params: Any) -> dict[str, Any]:
    """Return the parameters' shapes and dtypes, as `CheckpointManager.restore` expects them."""
    return {"params": on_device(params, SHARDING)}


def write_steps(folder: Path, perplexities: dict[int, float | None], keep: int = 3) -> None:
    """Write a checkpoint for each step.

    A checkpoint that has a recorded perplexity counts as scheduled.
    """
    with CheckpointManager(folder, IDENTITY, keep=keep) as checkpoints:
        for step, perplexity in perplexities.items():
            checkpoints.prepare_save(step, with_optimizer(params_of(step)))
            checkpoints.save(step, with_optimizer(params_of(step)), perplexity, {})


def steps_on_disk(folder: Path) -> set[int]:
    """Return the steps of all checkpoints in a directory; fail if it contains anything else."""
    return {int(path.name) for path in folder.iterdir()}


def open_writable(folder: Path) -> CheckpointManager:
    """Open a checkpoint folder for writing."""
    return CheckpointManager(folder, IDENTITY, keep=3)


def first_value(checkpoints: CheckpointManager, step: int) -> float:
    """Restore a checkpoint from `write_steps` and return its first value, which equals its step."""
    restored = checkpoints.restore(step, target_like(params_of(0)))
    return float(restored["params"]["layer"]["kernel"][0, 0])
