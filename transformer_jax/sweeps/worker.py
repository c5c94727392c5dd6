"""Train and score runs in a sweep, in a process that a launcher starts.

The launcher runs `python -m transformer_jax.sweeps.worker SWEEP ROW/seed-0 STEP_TIMEOUT`. If the
command names several runs, separated by commas, the worker trains them in one program. If the sweep
is in a bucket, the worker downloads only what these runs need.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from transformer_jax import errors
from transformer_jax.config import Config
from transformer_jax.config.loading import import_inherited
from transformer_jax.data.splits import SPLITS, Split
from transformer_jax.distributed.supervisor import module_command, signal_name, supervise
from transformer_jax.files import lock_folder, read_json_if_valid
from transformer_jax.remote.copies import fetch, local_path
from transformer_jax.runs.run_folder import RunFolder
from transformer_jax.signals import handle_signals
from transformer_jax.sweeps.plan import NAME_SEPARATOR, Sweep, SweepRun
from transformer_jax.sweeps.status import (
    CORES_VARIABLE,
    JOB_VARIABLE,
    current_job,
    last_log_line,
    measure_progress,
    newest_evaluation,
    read_status,
    write_status,
)

PHASE_TIMEOUT = 1800.0
SCORING_TIMEOUT = 4 * 3600.0
# A job of a cluster fails after this many consecutive attempts without progress.
MAX_FRUITLESS_ATTEMPTS = 3


def run_worker(runs: Sequence[SweepRun], step_timeout: float) -> int:
    """Run the remaining phases of runs; return the exit code of a phase that failed, or 0.

    If other workers are already running all of the runs, return the code of `RunInterrupted`, so
    that a cluster starts this worker again later.

    The first phase, "train", trains all models in one program. The other phases score each run on
    the dev split and, unless the run is a trial or there is no test split, on the test split.
    """
    names = NAME_SEPARATOR.join(run.name for run in runs)
    runs = [run for run in runs if _claim(run)]
    if not runs:
        # Standard output goes to the run's log.
        print(f"{names}: already being trained or scored by another process", flush=True)  # noqa: T201
        return errors.RunInterrupted.exit_code
    signals: list[int] = []
    # During a phase, another handler also forwards the signal.
    with handle_signals(lambda number, _: signals.append(number)):
        codes = [_train_together(runs, step_timeout, signals)] if len(runs) > 1 else []
        # A run that failed, or that a signal stopped, has a final status.
        unfinished = [run for run in runs if len(runs) == 1 or read_status(run).status == "running"]
        codes += [_finish(run, step_timeout, signals) for run in unfinished]
    return next(filter(None, codes), 0)


def _claim(run: SweepRun) -> bool:
    """Mark a run as running; return False if a worker of another launcher is already running it."""
    with lock_folder(run.path.parent, waits=True):
        status = read_status(run)
        # A requeued job resumes its own run, even if the previous node left the run's status as
        # "running".
        is_own_job = bool(status.job) and status.job == current_job()
        if status.status == "running" and not is_own_job:
            return False
        write_status(run, "running")
    return True


def _finish(run: SweepRun, step_timeout: float, signals: list[int]) -> int:
    """Run the remaining phases of one run; return the exit code of the phase that failed, or 0."""
    finished, before = list(read_status(run).finished), measure_progress(run)
    for phase in SPLITS:
        if phase in finished or (phase == "test" and (run.is_trial or not _has_test_set(run))):
            continue
        if signals:
            write_status(run, "stopped", note="stopped before the next phase")
            return errors.RunInterrupted.exit_code
        write_status(run, "running", phase=phase, finished=finished)
        if phase == "train":
            code, note = _train(run, step_timeout, signals)
        else:
            code, note = _evaluate(run, phase, signals)
        if code:
            note, fruitless = note or last_log_line(run), 0
            is_retried = code == os.EX_TEMPFAIL and JOB_VARIABLE in os.environ
            if is_retried and not signals and measure_progress(run) <= before:
                fruitless = read_status(run).fruitless + 1
            if fruitless == MAX_FRUITLESS_ATTEMPTS:
                # SkyPilot would start the job again without limit.
                note, code, fruitless = f"{note} (no progress in {fruitless} attempts)", 1, 0
            status = "stopped" if signals else "failed"
            write_status(run, status, note=note, exit_code=code, fruitless=fruitless)
            return code
        finished.append(phase)
    write_status(run, "done", phase="", finished=finished)
    return 0


def _train_together(runs: Sequence[SweepRun], step_timeout: float, signals: list[int]) -> int:
    """Train runs, none of which has finished training, in one program; return the exit code.

    Afterward, the status of each run is "running" (if its training is complete), "failed", or
    "stopped". If the device does not have enough memory, train each half of the runs. After a
    signal, start nothing.
    """
    if signals:
        for run in runs:
            write_status(run, "stopped", note="stopped before training")
        return errors.RunInterrupted.exit_code
    for run in runs:
        write_status(run, "running", phase="train", finished=[])
    if len(runs) == 1:
        code, note = _train(runs[0], step_timeout, signals)
        if code == 0:
            write_status(runs[0], "running", phase="train", finished=["train"])
    else:
        names = NAME_SEPARATOR.join(run.name for run in runs)
        sweep = runs[0].path.parents[runs[0].name.count("/")]
        arguments = [str(sweep), names]
        command = module_command(arguments, "transformer_jax.sweeps.joint")
        code, note = _supervise(command, runs[0], step_timeout, signals)
    statuses = [status for status in map(read_status, runs) if status.status != "failed"]
    untrained = [status.run for status in statuses if "train" not in status.finished]
    is_too_large = code == errors.OutOfMemoryError.exit_code and len(runs) > 1
    if is_too_large and untrained and not signals:
        half = len(untrained) // 2
        parts = filter(None, (untrained[:half], untrained[half:]))
        return max(_train_together(part, step_timeout, signals) for part in parts)
    for run in untrained:
        status = "stopped" if signals else "failed"
        write_status(run, status, note=note or last_log_line(run), exit_code=code)
    return code


def _has_test_set(run: SweepRun) -> bool:
    return "test" in RunFolder.open(run.path).find_text().report


def _train(run: SweepRun, step_timeout: float, signals: list[int]) -> tuple[int, str]:
    """Train under a supervisor; return the exit code and a note, and add signals to `signals`."""
    if (run.path / "run.json").exists():
        arguments = ["resume", str(run.path), "--train.steps", str(run.config.train.steps)]
    else:
        config = None
        with contextlib.suppress(errors.ConfigError, KeyError, TypeError, AttributeError):
            config = Config.from_dict(read_json_if_valid(run.config_file))
        if config != run.config:
            # A report would state the config in the plan.
            problem = f"{run.config_file} is missing or differs from the config in sweep.json"
            note = f"{problem}: delete it, and repeat the sweep with --retry-failed"
            return errors.ConfigError.exit_code, note
        arguments = ["train", str(run.config_file), "--out", str(run.path)]
    # A worker's run is a single process. Without this option, a Kubernetes job or an MPI launcher
    # that started the worker would seem to have started the processes of one run.
    arguments += ["--num-processes", "1", "--supervise"]
    return _supervise(module_command(arguments), run, step_timeout, signals)


def _supervise(
    command: Sequence[str], run: SweepRun, step_timeout: float, signals: list[int]
) -> tuple[int, str]:
    try:
        code = supervise(
            command,
            run.path,
            step_timeout=step_timeout,
            phase_timeout=PHASE_TIMEOUT,
            forwarded_signals=signals,
        )
    except errors.LostProcessError as error:
        # Standard output goes to the run's log.
        print(error, flush=True)  # noqa: T201
        is_in_cluster = JOB_VARIABLE in os.environ
        again = "repeat the sweep with --retry-failed"
        advice = "the cluster restarts the run" if is_in_cluster else again
        return error.exit_code, f"{error.reason}; {advice}"
    if code == errors.RunInterrupted.exit_code and not signals:
        # The trainer received the signal directly.
        signals.append(signal.SIGTERM)
    return code, ""


def _evaluate(run: SweepRun, split: Split, signals: list[int]) -> tuple[int, str]:
    """Score a split; return the exit code and a note, and add signals to `signals`."""
    command = module_command(["evaluate", str(run.path), "--split", split])
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
            return errors.RunInterrupted.exit_code, note
    if code < 0:
        return errors.RunInterrupted.exit_code, f"killed by {signal_name(-code)}"
    if code == 0 and newest_evaluation(run, split) is None:
        # `evaluate` succeeds even if it prints the scores but cannot store them. A report needs the
        # stored scores, so treat this case as a failure.
        code = errors.StorageError.exit_code
    return code, ""


def main(sweep_path: str, run_names: str, step_timeout: str) -> int:
    """Run the worker with the given command-line arguments; return the exit code."""
    import_inherited()
    if cores := os.environ.pop(CORES_VARIABLE, ""):
        # Child processes inherit this CPU affinity.
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    names = run_names.split(NAME_SEPARATOR)
    files = [f"{name}{suffix}" for name in names for suffix in (".json", ".state")]
    sweep = Sweep.open(fetch(sweep_path, ["sweep.json", *files]))
    runs = [sweep.find(name) for name in names]
    for name in names:
        local_path(f"{sweep_path}/{name}")
    return run_worker(runs, float(step_timeout))


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:]))
    except errors.TransformerJaxError as error:
        sys.stderr.write(f"transformer-jax: {error}\n")
        # Clusters start a run again after some exit codes.
        sys.exit(error.exit_code)
