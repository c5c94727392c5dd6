"""The resources that a sweep requests from Slurm."""

import re
from dataclasses import dataclass

from transformer_jax.errors import UsageError

TIME = re.compile(r"(\d+)|(?:(\d+)-)?(\d+):(\d\d):(\d\d)")


@dataclass(frozen=True)
class Resources:
    """Options for `--launcher slurm`. Slurm's defaults apply to options that are not set."""

    partition: str | None = None
    """Slurm partition."""
    time: str = "12:00:00"
    """Time limit: minutes, HOURS:MINUTES:SECONDS, or
    DAYS-HOURS:MINUTES:SECONDS. A run that reaches the limit saves its
    progress and requeues itself, so training can take longer than the limit."""
    max_parallel: int = 8
    """Maximum number of runs that train concurrently."""
    gpus: int = 1
    """Number of GPUs per run, or 0 to train on the CPU."""
    cpus: int | None = None
    """CPU cores per run."""
    memory_gb: float | None = None
    """Memory per run, in GiB."""
    account: str | None = None
    """Slurm account."""
    qos: str | None = None
    """Slurm quality of service."""

    def __post_init__(self) -> None:
        if not self.minutes:
            raise UsageError(
                f"slurm.time must be minutes, HOURS:MINUTES:SECONDS, or DAYS-HOURS:MINUTES:SECONDS "
                f"and not zero, got {self.time!r}"
            )
        for name, minimum in (("max_parallel", 1), ("gpus", 0), ("cpus", 1)):
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise UsageError(f"slurm.{name} must be at least {minimum}, got {value}")
        # This condition also rejects NaN.
        if self.memory_gb is not None and not 0 < self.memory_gb < float("inf"):
            raise UsageError(f"slurm.memory_gb must be positive, got {self.memory_gb}")

    @property
    def minutes(self) -> int:
        """The time limit in minutes, rounded up, or 0 if the limit is invalid."""
        match = TIME.fullmatch(self.time)
        if match is None:
            return 0
        only_minutes, days, hours, minutes, seconds = (int(group or 0) for group in match.groups())
        return only_minutes + 60 * (24 * days + hours) + minutes + (seconds > 0)
