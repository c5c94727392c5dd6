"""The resources that a sweep requests from Slurm or from another cluster."""

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
    constraint: str | None = None
    """Features that the nodes must have, such as "a100&ib"."""
    gres: str | None = None
    """Generic resources, such as "gpu:a100:1". Set --slurm.gpus 0 if these include
    the GPUs."""
    setup: str | None = None
    """A shell command that runs before each run, such as "module load cuda"."""

    def __post_init__(self) -> None:
        if not self.minutes:
            raise UsageError(
                f"slurm.time must be minutes, HOURS:MINUTES:SECONDS, or DAYS-HOURS:MINUTES:SECONDS "
                f"and not zero, got {self.time!r}"
            )
        _check(self, "slurm", max_parallel=1, gpus=0, cpus=1)

    @property
    def minutes(self) -> int:
        """The time limit in minutes, rounded up, or 0 if the limit is invalid."""
        match = TIME.fullmatch(self.time)
        if match is None:
            return 0
        only_minutes, days, hours, minutes, seconds = (int(group or 0) for group in match.groups())
        return only_minutes + 60 * (24 * days + hours) + minutes + (seconds > 0)


@dataclass(frozen=True)
class Cluster:
    """Options for `--launcher skypilot` and `--launcher kubernetes`."""

    accelerator: str | None = None
    """The accelerators of each run: for SkyPilot a name and a count, such as
    "H100:1"; for Kubernetes a resource and a count, such as "nvidia.com/gpu:1"."""
    cpus: int | None = None
    """CPU cores per run."""
    memory_gb: float | None = None
    """Memory per run, in GiB."""
    image: str | None = None
    """The container image, which contains this package (see the Dockerfile)."""
    setup: str | None = None
    """SkyPilot: a shell command that installs this package. Required without an image."""
    spot: bool = False
    """SkyPilot: use spot instances. A preempted run resumes on another instance."""
    max_parallel: int = 8
    """Kubernetes: maximum number of runs that train concurrently."""
    service_account: str | None = None
    """Kubernetes: the service account that can access the bucket."""
    node_selector: tuple[str, ...] = ()
    """Kubernetes: labels that the nodes must have, as KEY=VALUE."""

    def __post_init__(self) -> None:
        _check(self, "cluster", max_parallel=1, cpus=1)
        if self.accelerator is not None and not re.fullmatch(r"\S+:\d+", self.accelerator):
            raise UsageError(f"cluster.accelerator must be NAME:COUNT, got {self.accelerator!r}")
        for label in self.node_selector:
            if not all(label.partition("=")):
                raise UsageError(f"cluster.node_selector must be KEY=VALUE, got {label!r}")


def _check(resources: Resources | Cluster, section: str, **minimums: int) -> None:
    """Raise a UsageError if a number is less than its minimum, or if the memory is invalid."""
    for name, minimum in minimums.items():
        value = getattr(resources, name)
        if value is not None and value < minimum:
            raise UsageError(f"{section}.{name} must be at least {minimum}, got {value}")
    # This condition also rejects NaN.
    if resources.memory_gb is not None and not 0 < resources.memory_gb < float("inf"):
        raise UsageError(f"{section}.memory_gb must be positive, got {resources.memory_gb}")
