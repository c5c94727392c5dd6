"""One run of a sweep, in a process of its own: it trains and scores what is not done yet.

python -m transformer_jax.sweeps.worker SWEEP ROW/seed-0 SECONDS
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

from transformer_jax.data.splits import Split
from transformer_jax.distributed.supervisor import supervise, train_command
from transformer_jax.errors import LostProcessError, StorageError, TransformerJaxError
from transformer_jax.sweeps.plan import PlannedRun, Sweep
from transformer_jax.sweeps.status import (
    CORES,
    newest_evaluation,
    read_status,
    slurm_job,
    write_status,
)

PHASE_TIMEOUT = 1800.0
SCORING_SECONDS = 4 * 3600.0
SAVED = 75
# Of the log's last line, for a table.
NOTE_LENGTH = 300


def run_worker(run: PlannedRun, step_timeout: float) -> int:
    """Do what is left of a run; return the exit code of what failed, or 0.

    Training that is silent for `hang_seconds` between two steps has failed.
    """
    state = read_status(run)
    # A job that Slurm has queued again is at work on its own run, whatever became of its node.
    is_ours = bool(state.job) and state.job == slurm_job()
    if state.status == "running" and not is_ours:
        # Another sweep's worker was quicker.
        return 0
    finished = list(state.finished)
    for doing in jobs(run):
        if doing in finished:
            continue
        write_status(run, "running", doing=doing, finished=finished)
        code, note = _train(run, step_timeout) if doing == "train" else _evaluate(run, doing)
        if code:
            # Where a signal ended it, it came from whoever launched it.
            name = "stopped" if received_signals else "failed"
            write_status(run, name, code=code, note=note or _last_line(run.log))
            return code
        finished.append(doing)
    write_status(run, "done", doing="", finished=finished)
    return 0


def jobs(run: PlannedRun) -> list[Split]:
    """Return what there is to do for a run: to train, and the sets to score."""
    data = run.config.data
    if data.corpus == "tfds":
        from transformer_jax.data.prepare import prepare

        has_test = "test" in prepare(data).report
    else:
        has_test = data.corpus != "text" or data.test is not None
    return ["train", "dev", *(["test"] if has_test else [])]


received_signals: list[int] = []


def _train(run: PlannedRun, step_timeout: float) -> tuple[int, str]:
    if (run.path / "run.json").exists():
        command = ["resume", str(run.path), "--train.steps", str(run.config.train.steps)]
    else:
        command = ["train", str(run.config_file), "--out", str(run.path)]
    try:
        code = supervise(
            train_command([*command, "--supervise"]),
            run.path,
            step_timeout=step_timeout,
            phase_timeout=PHASE_TIMEOUT,
            forwarded_signals=received_signals,
        )
    except LostProcessError as error:
        print(error, flush=True)  # noqa: T201 - into the log
        return SAVED, str(error)
    if code == SAVED and not received_signals:
        received_signals.append(signal.SIGTERM)
    return code, ""


def _evaluate(run: PlannedRun, split: Split) -> tuple[int, str]:
    command = train_command(["evaluate", str(run.path), "--split", split])
    # Our own program.
    with subprocess.Popen(command) as process:  # noqa: S603
        before = {
            number: signal.signal(
                number, lambda n, _: (received_signals.append(n), process.terminate())
            )
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            code = process.wait(SCORING_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            return SAVED, f"nothing came of it in {SCORING_SECONDS / 3600:.0f} hours"
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    if code == 0 and newest_evaluation(run, split) is None:
        # What cannot be kept is a note of evaluate's, for a person has seen the scores.
        return StorageError.exit_code, ""
    return (code, "") if code >= 0 else (SAVED, f"{signal.Signals(-code).name} ended it")


def _last_line(log: Path) -> str:
    lines = log.read_text("utf-8", "replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "")[-NOTE_LENGTH:]


def main(sweep: str, name: str, step_timeout: str) -> int:
    """Do what the module says."""
    if cores := os.environ.pop(CORES, ""):
        # Those that it starts stay on them too.
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    return run_worker(Sweep.open(Path(sweep)).run(name), float(step_timeout))


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:]))
    except TransformerJaxError as error:
        sys.exit(f"transformer-jax: {error}")
