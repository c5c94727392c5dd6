"""Test that invalid Slurm resources raise an error that names the option."""

import pytest

from transformer_jax.errors import UsageError
from transformer_jax.sweeps.resources import Cluster, Resources


@pytest.mark.parametrize(
    ("time", "minutes"),
    [("90", 90), ("12:00:00", 720), ("0:00:30", 1), ("2-1:30:00", 2970), ("1:00:01", 61)],
)
def test_a_time_limit_has_the_meaning_that_sbatch_gives_it(time: str, minutes: int) -> None:
    assert Resources(time=time).minutes == minutes


@pytest.mark.parametrize("time", ["soon", "0", "30:00", "0:00:00"])
def test_an_invalid_time_limit_is_rejected(time: str) -> None:
    with pytest.raises(UsageError, match=r"slurm\.time must be minutes, HOURS:MINUTES:SECONDS, or"):
        Resources(time=time)


def test_a_value_out_of_range_is_rejected() -> None:
    with pytest.raises(UsageError, match=r"slurm\.max_parallel must be at least 1, got 0"):
        Resources(max_parallel=0)
    with pytest.raises(UsageError, match=r"slurm\.gpus must be at least 0, got -1"):
        Resources(gpus=-1)
    with pytest.raises(UsageError, match=r"slurm\.memory_gb must be positive, got nan"):
        Resources(memory_gb=float("nan"))


def test_an_invalid_option_of_a_cluster_is_rejected() -> None:
    with pytest.raises(UsageError, match=r"cluster\.accelerator must be NAME:COUNT, got 'H100'"):
        Cluster(accelerator="H100")
    with pytest.raises(UsageError, match=r"cluster\.node_selector must be KEY=VALUE, got 'a100'"):
        Cluster(node_selector=("a100",))
    with pytest.raises(UsageError, match=r"cluster\.cpus must be at least 1, got 0"):
        Cluster(cpus=0)
