"""Write made-up metrics and scores for a run, without training a model."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

from finished_runs import HOSTILE
from untrained import write_untrained_run

from transformer_jax.runs.run_folder import RunFolder

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
    description = json.loads((path / "run.json").read_text())
    for section, fields in changes.items():
        description["config"][section] |= fields
    (path / "run.json").write_text(json.dumps(description))
    folder = RunFolder.open(path)
    write_metrics(folder, reports)
    return folder
