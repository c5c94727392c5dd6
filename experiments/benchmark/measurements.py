"""Measurements and speed ratios of workers that ran the same workload."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from experiments.benchmark.rounds import Rounds, quartiles
from experiments.benchmark.worker import Sample


@dataclass(frozen=True)
class Measurement:
    """The results of one worker."""

    first_seconds: float
    """The duration of the first call, including compilation."""
    facts: dict[str, Any]
    """The library, device, number of parameters, and other details."""
    samples: list[Sample]
    """The samples, one per round."""
    second_start_seconds: float | None = None
    """The duration of the first call in a second process, with a warm compilation cache, or None if
    no second process was started."""

    @property
    def speeds(self) -> list[float]:
        """The speed in each round, in units of work per second."""
        return [sample.units / sample.seconds for sample in self.samples]

    @property
    def utilization(self) -> float | None:
        """The median model FLOP/s over rounds, divided by the peak FLOP/s, or None if unknown."""
        flops, peak = (self.facts.get(name) for name in ("flops_per_unit", "peak_flops"))
        if not flops or not peak:
            return None
        return quartiles(self.speeds).median * flops / peak


@dataclass(frozen=True)
class Benchmark:
    """The results of workers that ran the same workload in the same rounds."""

    name: str
    unit: str
    """The unit of work: target tokens or sentences."""
    work: dict[str, Any]
    """A description of the workload."""
    measurements: dict[str, Measurement]
    reference: str | None = None
    """The worker with which the others are compared, or None if there is no such worker."""
    skipped: dict[str, str] = field(default_factory=dict)
    """The workers that were skipped, and the reason for each."""
    notes: list[str] = field(default_factory=list)

    def ratios(self, name: str) -> list[float]:
        """Return a worker's speed relative to the reference in each round ([] if there is none)."""
        if self.reference is None:
            return []
        others = self.measurements[self.reference].speeds
        return [a / b for a, b in zip(self.measurements[name].speeds, others, strict=True)]

    def cpu_ratios(self, name: str) -> list[float]:
        """Return speed ratios by CPU time, which excludes waiting, for rounds that measured it."""
        if self.reference is None:
            return []
        mine, others = (self.measurements[n].samples for n in (name, self.reference))
        return [
            (a.units / a.cpu_seconds) / (b.units / b.cpu_seconds)
            for a, b in zip(mine, others, strict=True)
            if a.cpu_seconds and b.cpu_seconds
        ]


def read_benchmark(data: Mapping[str, Any]) -> Benchmark:
    """Reconstruct a benchmark from JSON data.

    Raises:
        KeyError, TypeError, ValueError: the data is not in the expected format.
    """
    measurements = {str(name): _read_measurement(one) for name, one in data["measurements"].items()}
    fields: dict[str, Any] = {**data, "measurements": measurements}
    part = Benchmark(**fields)
    if len({len(one.samples) for one in measurements.values()}) > 1:
        raise ValueError(f"workers of {part.name} have different numbers of rounds")
    if part.reference is not None and part.reference not in measurements:
        raise ValueError(f"{part.name} has no worker {part.reference!r}")
    return part


def _read_measurement(data: Mapping[str, Any]) -> Measurement:
    samples = [Sample(**sample) for sample in data["samples"]]
    if not samples:
        raise ValueError("a worker without samples")
    numbers = [x for sample in samples for x in (sample.seconds, sample.units, sample.peak_bytes)]
    second = data["second_start_seconds"]
    for number in (data["first_seconds"], *numbers, *([] if second is None else [second])):
        if isinstance(number, bool) or not isinstance(number, int | float) or not number > 0:
            raise ValueError(f"{number!r} is not a positive number")
        if not math.isfinite(number):
            raise ValueError(f"{number!r} is not a finite number")
    fields: dict[str, Any] = {**data, "samples": samples}
    return Measurement(**fields)


def summarize(
    rounds: Rounds,
    name: str,
    *,
    unit: str,
    work: Mapping[str, Any],
    references: Sequence[str] = (),
    flops: float | None = None,
    notes: Sequence[str] = (),
) -> Benchmark:
    """Summarize the results of all rounds.

    Args:
        rounds: the results of all rounds, from `run_rounds`.
        name: the name of the benchmark.
        unit: the unit of work, either "target tokens" or "sentences".
        work: the sizes and settings of the benchmark.
        references: candidates for the reference worker, in order of preference. If several workers
            ran, the first candidate among them becomes the reference.
        flops: FLOPs per unit of work, from `training.flops`.
        notes: explanations to print below the table.
    """
    measurements = {
        key: Measurement(worker.startup.first_seconds, worker.startup.facts, worker.samples)
        for key, worker in rounds.workers.items()
        if worker.samples
    }
    # Only this project's workers report the peak FLOP/s. The value applies to all workers, because
    # they use the same device.
    peaks = [one.facts["peak_flops"] for one in measurements.values() if "peak_flops" in one.facts]
    for one in measurements.values():
        if flops and peaks:
            one.facts.update(flops_per_unit=flops, peak_flops=peaks[0])
    late = {key: "no time for a round" for key in rounds.workers if key not in measurements}
    candidates = [key for key in references if key in measurements]
    return Benchmark(
        name,
        unit,
        dict(work),
        measurements,
        candidates[0] if candidates and len(measurements) > 1 else None,
        {**rounds.skipped, **late},
        list(notes),
    )
