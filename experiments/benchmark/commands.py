"""Measure whole commands, from start to end: a run and its reproduction, and a sweep.

The commands run in separate processes, because they need the device's memory.
"""

import os
import re
import resource
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from experiments.benchmark.benchmarks import isolated_cache
from experiments.benchmark.measurements import Benchmark, Measurement
from experiments.benchmark.rounds import ROOT, Settings, WorkerFailedError
from experiments.benchmark.worker import Sample
from transformer_jax.config import Config
from transformer_jax.data.prepare import prepare_text
from transformer_jax.distributed.supervisor import module_command
from transformer_jax.errors import RunInterrupted
from transformer_jax.files import JsonObject, read_json, write_json
from transformer_jax.runs.metrics_file import read_metrics
from transformer_jax.runs.run_folder import RunFolder
from transformer_jax.sweeps.plan import Sweep
from transformer_jax.sweeps.status import read_status

# A command that is stopped needs part of its time limit to save its progress.
SAVE_SECONDS = 40.0


class Ended(NamedTuple):
    """A command that has ended."""

    code: int
    seconds: float
    cpu_seconds: float
    """The CPU time of all its processes."""
    output: str


def run_command(
    arguments: Sequence[str], seconds: float, environment: Mapping[str, str | None]
) -> Ended:
    """Run a command from this package. After `seconds` seconds, signal it to save and exit."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    values = {**os.environ, "PYTHONPATH": path, **environment}
    start, cpu = time.monotonic(), _cpu_seconds()
    process = subprocess.Popen(  # noqa: S603 - runs this package
        module_command(list(arguments)),
        env={k: v for k, v in values.items() if v is not None},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
    )
    try:
        output, _ = process.communicate(timeout=max(1.0, min(seconds, 1e6)))
    except subprocess.TimeoutExpired:
        process.terminate()
        output, _ = process.communicate()
    return Ended(process.returncode, time.monotonic() - start, _cpu_seconds() - cpu, output)


def run(name: str, config: Config, settings: Settings) -> Benchmark:
    """Train a run with an empty compilation cache, and reproduce it with a warm one.

    Raises:
        WorkerFailedError: training or its reproduction failed, or there was not enough time.
    """
    batches = prepare_text(config.data).batches(config)
    tokens = sum(int(batches.lengths(step)[1].sum()) for step in range(config.train.steps))
    with isolated_cache(settings) as (inside, folder):
        first, second = folder / "run", folder / "copy"
        arguments = ["train", _write_rows(folder, {"run": config}), "--out", str(first)]
        trained = run_command(arguments, _left(settings), inside.environment)
        if trained.code:
            raise WorkerFailedError(f"train ended with {trained.code}: {_last_line(trained)}")
        arguments = ["reproduce", str(first), "--out", str(second)]
        copied = run_command(arguments, _left(settings), inside.environment)
        if copied.code and "was not reproduced" not in copied.output:
            raise WorkerFailedError(f"reproduce ended with {copied.code}: {_last_line(copied)}")
        reports = _train_reports(second)
        facts = {"library": "jax " + RunFolder.open(first).versions["jax"]}
        facts["device"] = _describe_device(first)
    sample = Sample(copied.seconds, copied.cpu_seconds, tokens, reports[-1]["loss"], _peak_bytes())
    speed = statistics.median(x["tokens_per_second"] for x in reports)
    compiled = re.findall(r"^compilation: .*", trained.output, re.MULTILINE)
    notes = [
        f"With an empty cache, {config.train.steps} steps took {trained.seconds:.1f} s, and "
        f"{trained.cpu_seconds:.1f} s of CPU time. {' '.join(compiled)}.",
        f"`reproduce` with a warm cache took {copied.seconds:.1f} s. Its reports, which exclude "
        f"evaluations and compilations, state {speed:,.0f} target tokens per second (median).",
        f"Bit-identical: {'yes' if copied.code == 0 else f'no ({_last_line(copied)})'}.",
    ]
    work = {"steps": config.train.steps, "data.corpus": config.data.corpus}
    measurements = {"reproduce": Measurement(trained.seconds, facts, [sample])}
    return Benchmark(name, "target tokens", work, measurements, notes=notes)


def sweep(
    name: str, rows: Mapping[str, Config], seeds: int, settings: Settings, folder: Path
) -> Benchmark:
    """Train and score all rows in a sweep, whose first attempt starts with an empty cache.

    If time runs out, a later call with the same folder continues the sweep.

    Raises:
        WorkerFailedError: the sweep is not finished or has failed; the message states which.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file, spent = folder / "seconds.json", {"seconds": 0.0, "cpu_seconds": 0.0}
    with suppress(FileNotFoundError):
        spent |= read_json(file)
    environment = {
        **settings.environment,
        "JAX_COMPILATION_CACHE_DIR": str(folder / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    out = folder / "sweep"
    command = ["sweep", _write_rows(folder, rows), "--seeds", str(seeds), "--out", str(out)]
    ended = run_command(command, _left(settings) - SAVE_SECONDS, environment)
    spent = {name: value + getattr(ended, name) for name, value in spent.items()}
    write_json(file, spent)
    if not (out / "sweep.json").exists():
        raise WorkerFailedError(_last_line(ended))
    runs = Sweep.open(out).runs
    num_done = sum(read_status(one).status == "done" for one in runs)
    took = f"{num_done} of {len(runs)} runs took {spent['seconds']:.0f} s"
    if ended.code == RunInterrupted.exit_code:
        raise WorkerFailedError(f"{took}; --resume continues")
    if ended.code:
        raise WorkerFailedError(f"{took}, and the sweep ended with {ended.code}")
    tokens, losses = 0, list[float]()
    for one in runs:
        batches = prepare_text(one.config.data).batches(one.config)
        tokens += sum(int(batches.lengths(n)[1].sum()) for n in range(one.config.train.steps))
        losses.append(_train_reports(one.path)[-1]["loss"])
    first = runs[0]
    facts = {"library": "jax " + RunFolder.open(first.path).versions["jax"]}
    facts["device"] = _describe_device(first.path)
    group = max(RunFolder.open(one.path).group for one in runs)
    sample = Sample(**spent, units=tokens, value=statistics.mean(losses), peak_bytes=_peak_bytes())
    work = {"rows": len(rows), "seeds": seeds, "steps": first.config.train.steps}
    notes = [f"{took}, from an empty cache to scores, with up to {group} runs in one program."]
    measurements = {"sweep": Measurement(spent["seconds"], facts, [sample])}
    return Benchmark(name, "target tokens", work, measurements, notes=notes)


def _train_reports(run: Path) -> list[JsonObject]:
    return [x for x in read_metrics(run / "metrics.jsonl") if x["split"] == "train"]


def _left(settings: Settings) -> float:
    return settings.until - time.monotonic()


def _write_rows(folder: Path, rows: Mapping[str, Config]) -> str:
    """Write a config file, and return its path."""
    data = {name: config.to_dict() for name, config in rows.items()}
    configs = f"{{name: Config.from_dict(row) for name, row in {data!r}.items()}}"
    last = "SWEEP = ROWS" if len(rows) > 1 else "[CONFIG] = ROWS.values()"
    path = folder / "rows.py"
    path.write_text(f"from transformer_jax.config import Config\nROWS = {configs}\n{last}\n")
    return str(path)


def _describe_device(path: Path) -> str:
    count, _, kind = RunFolder.open(path).environment["devices"].partition(" x ")
    return f"{kind} x {count}"


def _last_line(ended: Ended) -> str:
    return next(filter(str.strip, reversed(ended.output.splitlines())), "no output")[:300]


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _peak_bytes() -> int:
    """Return the peak memory of the largest process so far, excluding the device's memory."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10
