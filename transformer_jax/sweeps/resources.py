"""What a sweep asks of Slurm for each of its runs."""

import re
from dataclasses import dataclass

from transformer_jax.errors import UsageError

TIME = re.compile(r"(\d+)|(?:(\d+)-)?(\d+):(\d\d):(\d\d)")


@dataclass(frozen=True)
class Resources:
    """Options of `--launcher slurm`; where one is not said, Slurm's own default holds.

    Raises:
        UsageError: a value that cannot be.
    """

    partition: str | None = None
    time: str = "12:00:00"
    """Minutes, HOURS:MINUTES:SECONDS or DAYS-HOURS:MINUTES:SECONDS, after which a run saves and
    queues again: it may be shorter than the run."""
    max_parallel: int = 8
    """How many runs at once, at most."""
    gpus: int = 1
    """Of each run; 0 for a CPU alone."""
    cpus: int | None = None
    """Of each run."""
    memory_gb: float | None = None
    """Of each run."""
    account: str | None = None
    qos: str | None = None

    def __post_init__(self) -> None:
        if not self.minutes:
            raise UsageError(
                f"--slurm.time must be minutes, HOURS:MINUTES:SECONDS or "
                f"DAYS-HOURS:MINUTES:SECONDS, got {self.time!r}"
            )
        for name, least in (("max_parallel", 1), ("gpus", 0), ("cpus", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UsageError(
                    f"--slurm.{name.replace('_', '-')} must be at least {least}, got {value}"
                )
        # NaN is refused too.
        if self.memory_gb is not None and not 0 < self.memory_gb < float("inf"):
            raise UsageError(f"--slurm.memory-gb must be positive, got {self.memory_gb}")

    @property
    def minutes(self) -> int:
        """The limit of time, rounded up; 0 where it is none."""
        match = TIME.fullmatch(self.time)
        if match is None:
            return 0
        minutes, *clock = (int(part or 0) for part in match.groups())
        days, hours, more, seconds = clock
        return minutes + 60 * (24 * days + hours) + more + (seconds > 0)
