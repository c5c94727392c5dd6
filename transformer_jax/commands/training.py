"""Training, and what comes before it: `prepare`, `train`, `resume`."""

import abc
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from tyro.conf import FlagCreatePairsOff

from transformer_jax.commands.base import (
    ConfigArgument,
    ConfigCommand,
    RunArgument,
    translate_command,
)
from transformer_jax.config import Config, DataConfig, Row, loading
from transformer_jax.console import progress_bar, shell_command, stderr, stdout
from transformer_jax.errors import UsageError

if TYPE_CHECKING:
    from transformer_jax.distributed.processes import ProcessGroup
    from transformer_jax.runs.run_directory import RunDirectory


@dataclass(frozen=True)
class Prepare(ConfigCommand):
    """Make a config's text ready: vocabulary and pieces, kept in the cache."""

    file: ConfigArgument = ""
    """A config file, FILE:ROW of a sweep, or the name of a shipped one, such as tiny."""

    def load_rows(self) -> dict[str, Row]:
        return {"": self.load_row(self.file)}

    def run(self, rows: dict[str, Row]) -> None:
        from transformer_jax.data.prepare import prepare
        from transformer_jax.data.splits import SPLITS

        config = rows[""].config
        with progress_bar() as progress:
            prepared = prepare(config.data, progress=progress)
        report = prepared.report
        stdout.print(f"corpus      {report['corpus']}")
        for name, part in prepared.vocabulary.tokenizers.items():
            stdout.print(f"{name:11} {len(part):,} pieces, sha256 {part.digest[:12]}")
        for split in (split for split in SPLITS if split in report):
            counts = dict(report[split])
            told = f"{counts.pop('pairs'):,} pairs, {counts.pop('kept'):,} kept"
            dropped = ", ".join(f"{count:,} {reason}" for reason, count in counts.items())
            stdout.print(f"{split:11} {told}" + (f"; dropped: {dropped}" if dropped else ""))
        batches = prepared.batches(config.data.batch_tokens, config.train.seed)
        stdout.print(f"batches     {batches.summary}")
        stdout.print(f"kept in     {prepared.folder}")


@dataclass(frozen=True)
class TrainingCommand(ConfigCommand):
    """Base of the verbs that train: alone or with other processes, watched or not."""

    supervise: FlagCreatePairsOff[bool] = False
    """Train in a process of its own and watch it: one that is stuck, or was killed, ends with one
    line and exit code 75. Of several processes that train together, each wants it."""
    step_timeout: float = 30.0
    """With --supervise: silence between steps, at least, until training is taken for stuck; more
    where twelve steps take longer."""
    phase_timeout: float = 1800.0
    """The same at the start, and while training compiles, scores or saves."""

    coordinator: str | None = None
    """HOST:PORT where the processes meet, on the machine of process 0. Slurm, Open MPI, Kubernetes
    and Cloud TPU say this, and the next two, themselves."""
    num_processes: int | None = None
    """How many there are; 1 for this one alone."""
    process_id: int | None = None
    """Which one this is, from 0."""

    @property
    @abc.abstractmethod
    def path(self) -> Path:
        """The run's folder, which may not be there yet."""

    def under_supervisor(self, arguments: Sequence[str]) -> int:
        """Carry out the command with these arguments under a supervisor; return its exit code."""
        for name, value in (("step", self.step_timeout), ("phase", self.phase_timeout)):
            # NaN is refused too.
            if not value > 0:
                raise UsageError(f"--{name}-timeout must be positive, got {value}")
        from transformer_jax.distributed.supervisor import supervise, train_command

        return supervise(
            train_command(arguments),
            self.path,
            step_timeout=self.step_timeout,
            phase_timeout=self.phase_timeout,
        )

    @contextlib.contextmanager
    def joined(self, config: Config) -> Iterator["ProcessGroup"]:
        """Meet the other processes, if there are any, that were given the same experiment."""
        from transformer_jax.distributed.processes import join_processes

        with join_processes(
            self.path, self.coordinator, self.num_processes, self.process_id
        ) as hosts:
            hosts.check_same(config)
            yield hosts


@dataclass(frozen=True)
class Train(TrainingCommand):
    """Train a model: config in, run folder out."""

    file: ConfigArgument = ""
    """A config file, FILE:ROW of a sweep, or the name of a shipped one, such as tiny."""
    out: Path | None = None
    """The run's folder; runs/NAME of the config where it is not said."""
    init_from: Path | None = None
    """A run whose newest parameters and vocabulary this one begins with."""

    @property
    def path(self) -> Path:
        return self.out or Path("runs") / loading.run_name(self.file)

    def load_rows(self) -> dict[str, Row]:
        return {"": self.load_row(self.file)}

    def run(self, rows: dict[str, Row]) -> None:
        from transformer_jax.runs.run_directory import RunDirectory, check_available

        with self.joined(rows[""].config) as hosts:
            # Before JAX is there, if it can be: whoever mistook the name hears of it at once.
            hosts.on_primary(lambda: check_available(self.path))
            if self.init_from is not None and hosts.count > 1:
                raise UsageError(
                    "--init-from begins a run in one process: let it do a first step, "
                    "--train.steps 1, and go on in several by `resume`"
                )

            def begin() -> None:
                from transformer_jax.training.create_run import create_run

                with progress_bar() as progress:
                    create_run(
                        rows[""].config,
                        self.path,
                        stderr,
                        init_from=self.init_from,
                        progress=progress,
                    )

            hosts.on_primary(begin)
            _train(hosts.on_all(lambda: RunDirectory.open(self.path)), hosts)


@dataclass(frozen=True)
class Resume(TrainingCommand):
    """Go on with a run from its newest checkpoint, also past its end with more --train.steps."""

    run_folder: RunArgument = ""
    """A run's folder."""
    argument_name = "a run"

    @property
    def path(self) -> Path:
        return Path(self.run_folder)

    def load_rows(self) -> dict[str, Row]:
        from transformer_jax.runs.run_directory import RunDirectory

        return self.with_sections({"": Row(RunDirectory.open(self.path).config)})

    def run(self, rows: dict[str, Row]) -> None:
        from transformer_jax.runs.run_directory import RunDirectory

        def ready() -> RunDirectory:
            folder, config = RunDirectory.open(self.path), rows[""].config
            with progress_bar() as progress:
                _check_text(folder, config.data, progress)
            return folder.with_config(config)

        with self.joined(rows[""].config) as hosts:
            _train(hosts.on_all(ready), hosts)


def _check_text(folder: Any, data: DataConfig, progress: Any) -> None:
    """Make sure that text which is named anew is the run's own, before its name is stored."""
    places = {key: getattr(data, key) for key in ("train", "dev", "test", "folder")}
    moved = replace(folder.config.data, **places)
    if moved != folder.config.data:
        from transformer_jax.data.prepare import prepare

        prepare(moved, folder.vocabulary, folder.fingerprint, verify_text=True, progress=progress)


def _train(folder: "RunDirectory", hosts: "ProcessGroup") -> None:
    """Train a run; the first of the processes tells how it goes."""
    from transformer_jax.training.loop import run_training

    scheduled = run_training(folder, stdout if hosts.is_primary else Console(quiet=True), hosts)
    if hosts.is_primary:
        _say_next(folder, scheduled)


def _say_next(folder: Any, scheduled: int) -> None:
    """Name the commands that come after training, as they will work."""
    option = (
        " --average-checkpoints 1" if scheduled < folder.config.decode.average_checkpoints else ""
    )
    stdout.print(f"run kept in {folder.path}")
    stdout.print(f"next: {shell_command('evaluate', folder.path)}{option}")
    stdout.print(f"      {translate_command(folder, option)}")
