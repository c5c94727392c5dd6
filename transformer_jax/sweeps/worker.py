"""Train and score the model of one run of a sweep, in a process that a launcher starts.

The launcher runs `python -m transformer_jax.sweeps.worker SWEEP ROW/seed-0 STEP_TIMEOUT`.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

from transformer_jax.config.loading import import_inherited
from transformer_jax.data.splits import SPLITS, Split
from transformer_jax.distributed.supervisor import signal_name, supervise, train_command
from transformer_jax.errors import (
    LostProcessError,
    RunInterrupted,
    StorageError,
    TransformerJaxError,
)
from transformer_jax.runs.run_folder import RunFolder
from transformer_jax.signals import handle_signals
from transformer_jax.sweeps.plan import Sweep, SweepRun
from transformer_jax.sweeps.status import (
    CORES_VARIABLE,
    current_slurm_job,
    newest_evaluation,
    read_status,
    write_status,
)

PHASE_TIMEOUT = 1800.0
SCORING_TIMEOUT = 4 * 3600.0
# The maximum length, in characters, of a note that is copied from the log.
MAX_NOTE_LENGTH = 300


def run_worker(run: SweepRun, step_timeout: float) -> int:
    """Run the remaining phases of a run; return the exit code of the phase that failed, or 0.

    The first phase, "train", trains the model. The other phases score the dev split and, if there
    is one and the run is not a trial, the test split.
    """
    status = read_status(run)
    # A requeued Slurm job resumes its own run, even if the previous node left the run's status
    # as "running".
    is_own_job = bool(status.job) and status.job == current_slurm_job()
    if status.status == "running" and not is_own_job:
        # Another launcher has already started a worker for this run.
        return 0
    finished = list(status.finished)
    signals: list[int] = []
    for phase in SPLITS:
        if phase in finished or (phase == "test" and (run.is_trial or not _has_test_set(run))):
            continue
        write_status(run, "running", phase=phase, finished=finished)
        if phase == "train":
            code, note = _train(run, step_timeout, signals)
        else:
            code, note = _evaluate(run, phase, signals)
        if code:
            if not note:
                lines = run.log_file.read_text("utf-8", "replace").split("\n")
                note = next(filter(str.strip, reversed(lines)), "")[-MAX_NOTE_LENGTH:]
            write_status(run, "stopped" if signals else "failed", note=note, exit_code=code)
            return code
        finished.append(phase)
    write_status(run, "done", phase="", finished=finished)
    return 0


def _has_test_set(run: SweepRun) -> bool:
    """Return whether the text of an existing run has a test set."""
    from transformer_jax.data.prepare import find_prepared

    folder = RunFolder.open(run.path)
    prepared = find_prepared(folder.config.data, folder.vocabulary, folder.fingerprint)
    return "test" in prepared.report


def _train(run: SweepRun, step_timeout: float, signals: list[int]) -> tuple[int, str]:
    """Train under a supervisor; return the exit code and a note.

    Append to `signals` any signals that interrupt this phase.
    """
    if (run.path / "run.json").exists():
        arguments = ["resume", str(run.path), "--train.steps", str(run.config.train.steps)]
    else:
        arguments = ["train", str(run.config_file), "--out", str(run.path)]
    try:
        code = supervise(
            train_command([*arguments, "--supervise"]),
            run.path,
            step_timeout=step_timeout,
            phase_timeout=PHASE_TIMEOUT,
            forwarded_signals=signals,
        )
    except LostProcessError as error:
        # Standard output goes to the run's log.
        print(error, flush=True)  # noqa: T201
        return error.exit_code, str(error)
    if code == RunInterrupted.exit_code and not signals:
        # The trainer received the signal directly.
        signals.append(signal.SIGTERM)
    return code, ""


def _evaluate(run: SweepRun, split: Split, signals: list[int]) -> tuple[int, str]:
    """Score a split; return the exit code and a note.

    Append to `signals` any signals that interrupt this phase.
    """
    command = train_command(["evaluate", str(run.path), "--split", split])
    with subprocess.Popen(command) as process:  # noqa: S603 - runs this package

        def forward(number: int, _: object) -> None:
            signals.append(number)
            process.terminate()

        try:
            with handle_signals(forward):
                code = process.wait(SCORING_TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            note = f"scoring did not finish within {SCORING_TIMEOUT / 3600:.0f} hours"
            return RunInterrupted.exit_code, note
    if code < 0:
        return RunInterrupted.exit_code, f"killed by {signal_name(-code)}"
    if code == 0 and newest_evaluation(run, split) is None:
        # `evaluate` succeeds even if it prints the scores but cannot store them. A report needs the
        # stored scores, so treat this case as a failure.
        code = StorageError.exit_code
    return code, ""


def main(sweep_path: str, run_name: str, step_timeout: str) -> int:
    """Run the worker with the given command-line arguments; return the exit code."""
    import_inherited()
    if cores := os.environ.pop(CORES_VARIABLE, ""):
        # Child processes inherit this CPU affinity.
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    return run_worker(Sweep.open(Path(sweep_path)).find(run_name), float(step_timeout))


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:]))
    except TransformerJaxError as error:
        sys.exit(f"transformer-jax: {error}")
