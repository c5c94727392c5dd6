"""Run a sweep here: one process on each accelerator, failures kept apart from one another."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from transformer_jax.config import Config
from transformer_jax.distributed.supervisor import train_command
from transformer_jax.errors import RunInterrupted, StorageError, UsageError
from transformer_jax.sweeps.plan import PlannedRun, Sweep
from transformer_jax.sweeps.status import CORES, SLOT, RunStatus, read_status, write_status

# What is asked of JAX, in a process of its own: in this one it would take the devices' memory.
DEVICES = "import jax, json; print(json.dumps([jax.default_backend(), jax.local_device_count()]))"
# Of memory, for each run on a CPU.
CPU_RUN_BYTES = 2 << 30
PAUSE_SECONDS = 0.2
# For estimates: the share of a device's peak that training reaches.
USUAL_UTILIZATION = 0.3
# For a trainer to save, when the sweep is to stop.
STOP_SECONDS = 120.0


@dataclass(frozen=True)
class Slot:
    """Where one run at a time goes."""

    name: str
    environment: Mapping[str, str] = field(default_factory=dict)
    cores: frozenset[int] | None = None
    """CPU cores that are this slot's own; None for any."""


def slots(devices: int | None = None) -> list[Slot]:
    """Return a place for each accelerator here; on a CPU as many as its cores and memory hold.

    Args:
        devices: at most so many; None for all.

    Raises:
        UsageError: there are not so many.
    """
    # Our own program, on Python itself.
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-c", DEVICES], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise StorageError(
            f"JAX found no device: {(done.stderr.strip().splitlines() or ['?'])[-1]}"
        )
    backend, count = json.loads(done.stdout.splitlines()[-1])
    found = _cpu_slots(devices) if backend == "cpu" else _accelerator_slots(backend, count)
    if devices is not None and not 1 <= devices <= len(found):
        raise UsageError(f"--devices must be from 1 to {len(found)}, or all, got {devices}")
    return found[:devices]


def _accelerator_slots(backend: str, count: int) -> list[Slot]:
    if backend == "tpu":
        # One chip, and a mesh of processes that is this one alone.
        alone = {"TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1", "TPU_PROCESS_BOUNDS": "1,1,1"}
        return [Slot(f"tpu {i}", {"TPU_VISIBLE_CHIPS": str(i), **alone}) for i in range(count)]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(i) for i in range(count)]
    return [Slot(f"{backend} {name}", {"CUDA_VISIBLE_DEVICES": name}) for name in names[:count]]


def _cpu_slots(devices: int | None) -> list[Slot]:
    if not hasattr(os, "sched_getaffinity"):
        return [Slot("cpu")]
    cores = sorted(os.sched_getaffinity(0))
    # How many are asked for, their user knows; otherwise what memory holds, the cache's included.
    most = devices or max(1, _available_bytes() // CPU_RUN_BYTES)
    count = max(1, min(most, len(cores)))
    return [Slot(f"cpu {i}", cores=frozenset(cores[i::count])) for i in range(count)]


def _available_bytes() -> int:
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text("utf-8").splitlines()
        return 1024 * int(next(x for x in lines if x.startswith("MemAvailable")).split()[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def launch(
    sweep: Sweep,
    places: Sequence[Slot],
    say: Callable[[str], None],
    *,
    retry_failed: bool = False,
    step_timeout: float = 60.0,
) -> list[RunStatus]:
    """Do what is unfinished of a sweep; return the state of every run.

    A run that fails, in whatever way, is noted, and the others go on. What is finished is not
    done again, nor what failed, unless it shall be retried.

    Raises:
        InterruptedRunError: a signal asked for an end; all that ran is saved.
        StorageError: the sweep's folder cannot be written.
    """
    waiting = [run for run in sweep.runs if _is_to_do(read_status(run), retry_failed)]
    busy = dict[PlannedRun, tuple[Slot, subprocess.Popen[bytes]]]()
    # What a launcher that was killed has left at work keeps its place.
    others = {
        run: slot
        for slot in places
        for run in sweep.runs
        if (state := read_status(run)).status == "running" and state.slot == slot.name
    }
    free = [slot for slot in places if slot not in others.values()]
    with _asked_to_stop() as asked:
        try:
            while (waiting and not asked) or busy:
                while waiting and free and not asked:
                    run = waiting.pop(0)
                    # Someone else may have begun it meanwhile.
                    if _is_to_do(read_status(run), retry_failed):
                        slot = free.pop(0)
                        busy[run] = slot, begin(run, slot, step_timeout)
                        say(f"{run.name}: on {slot.name}")
                time.sleep(PAUSE_SECONDS)
                if asked:
                    _stop([process for _, process in busy.values()])
                for run, (slot, process) in list(busy.items()):
                    if process.poll() is not None:
                        del busy[run]
                        free.append(slot)
                        say(f"{run.name}: {_ended(run, process.returncode, asked).summary}")
                for run, slot in list(others.items()):
                    if read_status(run).status != "running":
                        del others[run]
                        free.append(slot)
        finally:
            _stop([process for _, process in busy.values()])
    if asked:
        raise RunInterrupted(
            f"{signal.Signals(asked[0]).name}: all that ran is saved; the same command goes on"
        )
    return [read_status(run) for run in sweep.runs]


def _ended(run: PlannedRun, code: int, asked: Sequence[int]) -> RunStatus:
    """Return how a run stands whose worker has ended; one that could not say so has failed."""
    state = read_status(run)
    if state.status in ("done", "failed") or asked or code == 0:
        return state
    if state.status != "stopped" or "process is gone" in state.note:
        write_status(run, "failed", code=code, note=f"its process ended with {code}: see {run.log}")
    return read_status(run)


def _is_to_do(state: RunStatus, retry_failed: bool) -> bool:
    return state.status not in ("done", "running", "submitted") and (
        retry_failed or state.status != "failed"
    )


def begin(run: PlannedRun, slot: Slot, step_timeout: float) -> subprocess.Popen[bytes]:
    """Start what is left of a run, in a process of its own."""
    worker = train_command(
        [str(run.sweep), run.name, str(step_timeout)], "transformer_jax.sweeps.worker"
    )
    # Slurm says by SIGUSR2 that time is up, to every process: what is to be done, the launcher
    # says. A shell sees to it: Python between fork and exec is not safe beside JAX's threads.
    command = ["/bin/sh", "-c", 'trap \'\' USR2; exec "$0" "$@"', *worker]
    cores = {} if slot.cores is None else {CORES: ",".join(map(str, sorted(slot.cores)))}
    try:
        with run.log.open("ab") as log:
            return subprocess.Popen(  # noqa: S603
                command,
                env={**os.environ, **slot.environment, **cores, SLOT: slot.name},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
    except OSError as error:
        raise StorageError(f"{run.log} cannot be written: {error.strerror}") from error


def estimates(sweep: Sweep, at_a_time: int) -> dict[str, float]:
    """Return about how many seconds a run of each row takes, of so many at a time here.

    Of training, at a utilisation that is usual; preparing text and scoring come on top.
    """
    import jax

    from transformer_jax.training.flops import peak_flops, train_flops

    # Of accelerators each run has its own; runs on a CPU share it.
    share = at_a_time if jax.default_backend() == "cpu" else jax.local_device_count()
    peaks = {
        dtype: peak_flops(dtype) / share
        for dtype in {row.config.model.dtype for row in sweep.rows.values()}
    }
    return {
        name: train_flops(row.config) / (USUAL_UTILIZATION * peaks[row.config.model.dtype])
        for name, row in sweep.rows.items()
    }


def stored_bytes(config: Config) -> int:
    """Return about how many bytes a run keeps."""
    from transformer_jax.model.build import build_transformer
    from transformer_jax.model.inspect import parameter_counts

    model, data, train = config.model, config.data, config.train
    module = build_transformer(model, data.vocab_size, data.source_vocab_size)
    # Parameters and Adam's two moments, in float32; the latest and the best beside the rest.
    return 12 * parameter_counts(module)["total"] * (train.keep_checkpoints + 2)


@contextmanager
def _asked_to_stop() -> Iterator[list[int]]:
    """Yield a list that a signal is added to when it comes."""
    asked: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
    before = {n: signal.signal(n, lambda number, _: asked.append(number)) for n in numbers}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Let workers save, and wait until they have."""
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    until = time.monotonic() + STOP_SECONDS
    for process in processes:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
