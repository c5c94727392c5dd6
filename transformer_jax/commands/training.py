"""Commands that prepare text and train models: `prepare`, `train`, `resume`, and `reproduce`."""

import abc
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import FlagCreatePairsOff, arg

from transformer_jax.commands.arguments import as_option
from transformer_jax.commands.base import (
    ConfigCommand,
    FileCommand,
    PathCommand,
    RunArgument,
    translate_command,
)
from transformer_jax.config import Config, Row, loading
from transformer_jax.console import progress_bar, shell_command, stderr, stdout
from transformer_jax.data.splits import SPLITS
from transformer_jax.distributed.processes import ProcessGroup, join_processes
from transformer_jax.distributed.supervisor import module_command, supervise
from transformer_jax.errors import NotReproducedError, UsageError
from transformer_jax.remote.copies import find_url
from transformer_jax.runs.run_folder import RunFolder, check_available


@dataclass(frozen=True)
class Prepare(FileCommand):
    """Prepare a config's text: train the vocabulary, encode the text, and cache both."""

    def run(self, rows: dict[str, Row]) -> None:
        from transformer_jax.data.prepare import prepare_text

        config = rows[""].config
        with progress_bar():
            prepared = prepare_text(config.data)
        prepared.note_problems()
        report = prepared.report
        stdout.print(f"corpus      {report['corpus']}")
        for name, tokenizer in prepared.vocabulary.tokenizers.items():
            stdout.print(f"{name:11} {len(tokenizer):,} tokens, sha256 {tokenizer.digest[:12]}")
        for split in (split for split in SPLITS if split in report):
            counts = dict(report[split])
            line = f"{counts.pop('pairs'):,} pairs, {counts.pop('kept'):,} kept"
            dropped = ", ".join(f"{count:,} {reason}" for reason, count in counts.items())
            stdout.print(f"{split:11} {line}" + (f"; dropped: {dropped}" if dropped else ""))
        batches = prepared.batches(config)
        stdout.print(f"batches     {batches.summary}")
        if warning := batches.describe_repetition(config.train.steps):
            stderr.print(warning)
        stdout.print(f"cached in   {prepared.folder}")


@dataclass(frozen=True)
class TrainingCommand(ConfigCommand):
    """Base class for commands that train in one or more processes, with or without a supervisor."""

    supervise: FlagCreatePairsOff[bool] = False
    """Train in a child process and monitor it. If the child hangs or is killed, exit with a
    one-line message and code 75. In multi-process training, pass this option to every process."""
    step_timeout: float = 30.0
    """With --supervise: how many seconds training can go without a heartbeat before it is
    considered hung. Training sends a heartbeat after every three steps. If steps are slow, the
    timeout is at least the duration of 12 steps."""
    phase_timeout: float = 1800.0
    """With --supervise: timeout in seconds for startup, compilation, evaluation, and saving."""

    coordinator: str | None = None
    """Address of process 0, as HOST:PORT, to which all other processes connect. On Slurm, Open MPI,
    Kubernetes, and Cloud TPU, the values of --coordinator, --num-processes, and --process-id are
    detected automatically."""
    num_processes: int | None = None
    """Number of processes. If the number is 1, training ignores the cluster's environment
    variables."""
    process_id: int | None = None
    """Zero-based index of this process."""

    @property
    @abc.abstractmethod
    def path(self) -> Path:
        """The path to the run's folder, which may not exist yet."""

    def check_timeouts(self) -> None:
        """Raise a UsageError if a timeout is set without `--supervise` or is not positive."""
        for name in ("step_timeout", "phase_timeout"):
            option, seconds = as_option(name), getattr(self, name)
            if not self.supervise and seconds != getattr(type(self), name):
                raise UsageError(f"{option} needs --supervise")
            # The negated comparison also rejects NaN.
            if not seconds > 0:
                raise UsageError(f"{option} must be positive, got {seconds}")

    def under_supervisor(self, arguments: Sequence[str]) -> int:
        """Run this command with the given arguments under a supervisor; return the exit code."""
        timeouts = {"step_timeout": self.step_timeout, "phase_timeout": self.phase_timeout}
        return supervise(module_command(arguments), self.path, **timeouts)

    @contextlib.contextmanager
    def join_processes(self, config: Config) -> Iterator[ProcessGroup]:
        """Connect to the other processes, if any, and check that they all have the same config."""
        arguments = self.coordinator, self.num_processes, self.process_id
        with join_processes(self.path, *arguments) as group:
            group.check_same_config(config)
            yield group


@dataclass(frozen=True)
class Train(FileCommand, TrainingCommand):
    """Train a model from a config, and store it in a run's folder."""

    out: Annotated[Path | None, arg(metavar="RUN")] = None
    """The run's folder, which can be gs://BUCKET/NAME or s3://BUCKET/NAME. Default: runs/NAME,
    where NAME is the config's name."""
    init_from: Annotated[Path | None, arg(metavar="RUN")] = None
    """Start with the vocabulary and the latest parameters of this run."""
    resume: FlagCreatePairsOff[bool] = False
    """If the run already exists, continue it. A finished run does not change. Use this option in
    scripts that start the same command again after an interruption."""
    common = (
        *("out", "resume", "init_from", "data.batch_tokens", "model.dtype"),
        *("train.steps", "train.warmup_steps", "train.seed", "train.parallelism"),
        "train.gradient_accumulation_steps",
    )
    example = "train tiny --out runs/first --train.steps 200"

    @property
    def path(self) -> Path:
        return self.out or Path("runs") / loading.run_name(self.file)

    def run(self, rows: dict[str, Row]) -> None:
        config = rows[""].config
        with self.join_processes(config) as group:
            # Check the path before importing JAX, so that errors appear immediately.
            if group.is_primary and not self.resume:
                check_available(self.path)
            from transformer_jax.api import train_folder

            options = {"resume": self.resume, "init_from": self.init_from, "group": group}
            folder, _ = train_folder(config, self.path, **options)
            _print_next(folder, group)


@dataclass(frozen=True)
class Resume(TrainingCommand):
    """Resume a run from its latest checkpoint. A larger --train.steps extends a finished run."""

    run_folder: RunArgument = ""
    """A run's folder."""
    argument_name = "a run"

    @property
    def path(self) -> Path:
        return Path(self.run_folder)

    def load_rows(self) -> dict[str, Row]:
        return self.with_sections({"": Row(RunFolder.open(self.path).config)})

    def run(self, rows: dict[str, Row]) -> None:
        config = rows[""].config
        with self.join_processes(config) as group:
            RunFolder.open(self.path).with_config(config)
            from transformer_jax.api import train_folder

            folder, _ = train_folder(config, self.path, resume=True, group=group)
            _print_next(folder, group)


@dataclass(frozen=True)
class Reproduce(PathCommand):
    """Retrain a run's model from scratch, and check that the parameters are bit-identical.

    To resume an interrupted reproduction, run the same command again.
    """

    run_folder: RunArgument
    """A run's folder. The command does not change the folder."""
    out: Path | None = None
    """The new run's folder. Default: RUN-reproduced, in the working directory if RUN is in a
    bucket."""

    def run(self) -> None:
        original = RunFolder.open(Path(self.run_folder))
        if original.package is not None:
            raise UsageError(f"{original.path} is a package: reproduce the original run")
        if original.steps_done == 0:
            raise UsageError(f"{original.path} has no checkpoint after step 0 to reproduce")
        if original.init_from:
            raise UsageError(
                f"{original.path} cannot be reproduced, because it began with the parameters of "
                f"another run: {original.init_from}"
            )
        # Resolve paths such as "." and "..", because they have no name to append a suffix to.
        base = original.path if original.path.name not in ("", "..") else original.path.resolve()
        base = base if find_url(base) is None else Path(base.name)
        out = self.out or base.with_name(f"{base.name}-reproduced")
        is_started = (out / "run.json").exists() and out.resolve() != original.path.resolve()
        if not is_started or RunFolder.open(out).identity != original.identity:
            check_available(out)
        from transformer_jax.backend import describe_environment, start_backend
        from transformer_jax.training.loop import run_training

        start_backend(original.cpu_threads)
        config = original.config.change(train={"steps": original.steps_done})
        with progress_bar():
            original.find_text()
        if not is_started:
            text = original.vocabulary, original.fingerprint
            RunFolder.create(out, config, *text, describe_environment())
        copy = RunFolder.open(out).with_config(config)
        run_training(copy, stdout)
        _compare_parameters(original, copy)


def _compare_parameters(original: RunFolder, copy: RunFolder) -> None:
    """For each checkpoint that both runs have, print and compare the digests of the parameters."""
    from transformer_jax.inference.trained_run import read_params
    from transformer_jax.model.inspect import digest_params
    from transformer_jax.runs.checkpoint_manager import CheckpointManager
    from transformer_jax.training.checkpointing import describe_changes

    with (
        CheckpointManager(original.checkpoints, original.identity) as old,
        CheckpointManager(copy.checkpoints, copy.identity) as new,
    ):
        steps = sorted({*old.steps} & {*new.steps} - {0})
        if original.steps_done not in steps:
            raise NotReproducedError(
                f"{original.path} was not reproduced: training ended at step {copy.steps_done} "
                f"instead of {original.steps_done}"
            )
        differing: list[int] = []
        for step in steps:
            digests = {digest_params(read_params(r, [step])): r for r in (original, copy)}
            stdout.print(f"step {step}  sha256 {' -> '.join(digests)}")
            differing += [step] if len(digests) > 1 else []
        if not differing:
            stdout.print(f"{original.path} was reproduced: all parameters are bit-identical")
            return
        stored = (old.metadata(step).get("environment", {}) for step in steps)
        group = {"runs in the program": str(original.group)}
        recorded = [original.versions, original.environment, *stored, group]
        now = {**copy.versions, **new.metadata(steps[-1]).get("environment", {})}
        now["runs in the program"] = str(copy.group)
    changes = [change for before in recorded for change in describe_changes(before, now)]
    also = ", although the text and the recorded versions, devices, and settings are the same"
    if changes:
        also = f"; other differences: {', '.join(dict.fromkeys(changes))}"
    problem = f"was not reproduced: the parameters differ at step {differing[0]}"
    raise NotReproducedError(f"{original.path} {problem}{also}")


def _print_next(folder: RunFolder, group: ProcessGroup) -> None:
    if group.is_primary:
        stdout.print(f"run stored in {folder.path}")
        split = "" if "test" in folder.find_text().report else " --split dev"
        stdout.print(f"next: {shell_command('evaluate', folder.path)}{split}")
        stdout.print(f"      {translate_command(folder)}")
