"""TensorBoard and experiment trackers, which receive a run's metrics (`train.trackers`).

A tracker uses its own library, which is imported when a run starts. See `tracking` for how a run
uses its trackers.
"""

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformer_jax.config import Config
from transformer_jax.optional import import_optional
from transformer_jax.registry import Registry

# The name of the project or experiment for runs that do not belong to a sweep.
PROJECT = "transformer-jax"
# MLflow accepts this many parameters in one request.
MAX_PARAMS = 100
SAMPLES = "samples"


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker receives when a run starts or resumes."""

    path: Path
    name: str
    """The run's name, such as "base/seed-0" in a sweep."""
    group: str
    """The name of the run's sweep, or "" if the run does not belong to a sweep."""
    config: Config
    id: str
    """The ID that the tracker assigned to the run earlier, or "" if there is none."""


class Tracker:
    """Base class for trackers. A subclass is registered as a value of `train.trackers`.

    A single thread calls all methods. If a method raises an error, the run prints one note and no
    longer uses the tracker.
    """

    id: str = ""
    """The tracker's ID for the run. Without an ID, a resumed run sends all reports again."""

    def __init__(self, run: TrackedRun) -> None:
        """Start or continue the run."""

    def log(self, step: int, values: Mapping[str, float], seconds: float) -> None:
        """Receive metrics such as "train/loss". `seconds` is the Unix time of the report."""
        raise NotImplementedError

    def log_samples(self, step: int, text: str) -> None:
        """Receive translations of some sentences in the development set."""

    def finish(self, *, is_complete: bool) -> None:
        """End the run. If `is_complete` is false, an error or a signal ended it."""


TRACKERS: Registry[Callable[[TrackedRun], Tracker]] = Registry("train.trackers")


def _flatten(config: Config) -> dict[str, str | int | float | bool]:
    values = config.by_field().items()
    return {k: x if isinstance(x, str | int | float) else str(x) for k, x in values}


@TRACKERS.register("tensorboard")
class TensorBoard(Tracker):
    """Writes scalars, hyperparameters, and samples to RUN/tensorboard.

    The events are rebuilt from metrics.jsonl whenever a run resumes, because a killed process may
    have written events for steps that the resumed run repeats.
    """

    def __init__(self, run: TrackedRun) -> None:
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = run.path / "tensorboard"
        shutil.rmtree(folder, ignore_errors=True)
        self._writer = EventFileWriter(str(folder))
        trial = f"{run.group}/{run.name}" if run.group else run.name
        self._add(0, hparams_pb(_flatten(run.config), trial_id=trial), time.time())

    def log(self, step: int, values: Mapping[str, float], seconds: float) -> None:
        from tensorboard.plugins.scalar.summary_v2 import scalar_pb

        for name, value in values.items():
            self._add(step, scalar_pb(name, value), seconds)

    def log_samples(self, step: int, text: str) -> None:
        from tensorboard.plugins.text.summary_v2 import text_pb

        # TensorBoard renders Markdown, in which indented lines form a code block.
        verbatim = "\n".join(f"    {line}" for line in text.splitlines())
        self._add(step, text_pb(SAMPLES, verbatim), time.time())

    def finish(self, *, is_complete: bool) -> None:  # noqa: ARG002 (events have no status)
        self._writer.close()

    def _add(self, step: int, summary: Any, seconds: float) -> None:  # noqa: ANN401
        event = import_optional("tensorboard.compat.proto.event_pb2").Event
        self._writer.add_event(event(wall_time=seconds, step=step, summary=summary))


@TRACKERS.register("wandb")
class WeightsAndBiases(Tracker):
    """Sends reports to Weights & Biases. The runs of a sweep form a group."""

    def __init__(self, run: TrackedRun) -> None:
        wandb: Any = import_optional("wandb", "train.trackers wandb")
        is_offline = wandb.setup().settings.mode in ("offline", "disabled", "dryrun")
        # Without this check, the library prompts for the key in the terminal.
        if not is_offline and not wandb.login(prompt=False):
            raise ValueError("there is no API key: run `wandb login`, or set WANDB_MODE=offline")
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.name,
            group=run.group or None,
            config=run.config.to_dict(),
            id=run.id or None,
            resume="allow",
            # Several runs can be active in one process.
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off"),
        )
        self.id = self._run.id
        # wandb's own step must not decrease, but training and development reports can arrive in
        # any order.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float], seconds: float) -> None:  # noqa: ARG002
        self._run.log({"step": step, **values})

    def log_samples(self, step: int, text: str) -> None:
        html: Any = import_optional("wandb").Html
        escaped = text.replace("&", "&amp;").replace("<", "&lt;")
        self._run.log({"step": step, SAMPLES: html(f"<pre>{escaped}</pre>")})

    def finish(self, *, is_complete: bool) -> None:
        self._run.finish(exit_code=0 if is_complete else 1)


@TRACKERS.register("mlflow")
class MLflow(Tracker):
    """Sends reports to MLflow. The runs of a sweep form an experiment."""

    def __init__(self, run: TrackedRun) -> None:
        mlflow: Any = import_optional("mlflow", "train.trackers mlflow")
        self._entities, self._client = mlflow.entities, mlflow.MlflowClient()
        if run.id:
            self.id = run.id
            self._client.update_run(run.id, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or run.group or PROJECT
        experiment = self._find_experiment(name)
        self.id = self._client.create_run(experiment, run_name=run.name).info.run_id
        pairs = [self._entities.Param(k, str(v)) for k, v in _flatten(run.config).items()]
        for start in range(0, len(pairs), MAX_PARAMS):
            self._client.log_batch(self.id, params=pairs[start : start + MAX_PARAMS])

    def _find_experiment(self, name: str) -> str:
        with contextlib.suppress(import_optional("mlflow").exceptions.MlflowException):
            # Another run of the sweep may have created the experiment.
            return self._client.create_experiment(name)
        return self._client.get_experiment_by_name(name).experiment_id

    def log(self, step: int, values: Mapping[str, float], seconds: float) -> None:
        metric, milliseconds = self._entities.Metric, round(1000 * seconds)
        metrics = [metric(name, value, milliseconds, step) for name, value in values.items()]
        self._client.log_batch(self.id, metrics=metrics)

    def log_samples(self, step: int, text: str) -> None:
        self._client.log_text(self.id, text, f"{SAMPLES}/step-{step}.txt")

    def finish(self, *, is_complete: bool) -> None:
        self._client.set_terminated(self.id, "FINISHED" if is_complete else "KILLED")


@TRACKERS.register("aim")
class Aim(Tracker):
    """Sends reports to Aim. The runs of a sweep form an experiment."""

    def __init__(self, run: TrackedRun) -> None:
        self._aim: Any = import_optional("aim", "train.trackers aim")
        self._run: Any = self._aim.Run(
            run_hash=run.id or None,
            experiment=run.group or PROJECT,
            # By default, Aim also records system metrics and the terminal's output.
            system_tracking_interval=None,
            capture_terminal_logs=False,
        )
        self.id, self._run.name = self._run.hash, run.name
        self._run["config"] = run.config.to_dict()

    def log(self, step: int, values: Mapping[str, float], seconds: float) -> None:  # noqa: ARG002
        for name, value in values.items():
            split, _, metric = name.partition("/")
            self._run.track(value, name=metric, step=step, context={"subset": split})

    def log_samples(self, step: int, text: str) -> None:
        self._run.track(self._aim.Text(text), name=SAMPLES, step=step)

    def finish(self, *, is_complete: bool) -> None:  # noqa: ARG002 (Aim has no status)
        self._run.close()
