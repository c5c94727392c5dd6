"""Test the estimates of the resources that a sweep needs."""

from pathlib import Path

import pytest
from example_configs import SMALL

from transformer_jax.baselines.build import count_parameters
from transformer_jax.compilation.targets import parse_target
from transformer_jax.config import Config, Row
from transformer_jax.data.batches import Bucket
from transformer_jax.errors import UsageError
from transformer_jax.progress import report_to
from transformer_jax.sweeps.estimates import (
    count_devices_of_rows,
    describe_counts,
    estimate_bytes,
    estimate_memory,
)
from transformer_jax.sweeps.plan import Sweep


def test_neighboring_rows_with_the_same_number_are_one_part_of_the_line() -> None:
    counts = {"base": 1, "A1": 1, "E": 1, "big": 2}
    line = describe_counts(counts, parse_target("v5e:2x4"))
    assert line == "base to E: 1 v5e chip each; big: 2 v5e chips"
    counts = {"base": 1, "big": 4, "huge": 4, "giant": None}
    line = describe_counts(counts, parse_target("h100:4"))
    assert line == ("base: 1 h100 GPU; big to huge: 4 h100 GPUs each; giant: more than 4 h100 GPUs")


def test_a_row_that_does_not_fit_the_only_device_is_named() -> None:
    line = describe_counts({"base": None, "big": None}, parse_target("v5e"))
    assert line == "base to big: more than 1 v5e chip each"


def test_a_row_with_cudnn_is_rejected_for_tpus_before_any_row_is_compiled(tmp_path: Path) -> None:
    cudnn = Config().change(
        model={"attention_implementation": "cudnn", "dtype": "bfloat16", "attention_dropout": 0.0}
    )
    sweep = Sweep(tmp_path, {"base": Row(Config()), "cudnn": Row(cudnn)}, ())
    reports: list[str] = []
    with (
        report_to(lambda activity, *_: reports.append(activity)),
        pytest.raises(UsageError, match=r"cudnn needs NVIDIA GPUs, not v5e:2x2: use model\.att"),
    ):
        count_devices_of_rows(sweep, parse_target("v5e:2x2"))
    assert reports == []


@pytest.mark.slow
def test_the_memory_estimate_of_the_base_model_is_near_the_measured_peak() -> None:
    # On an H100, a step of the base model in bfloat16 with this batch needs 11.4 to 12.6 GiB.
    config = Config().change(model={"dtype": "bfloat16"})
    estimate = estimate_memory(config, [Bucket(512, 48, 48, 1)]) / 2**30
    assert 12.6 <= estimate <= 25
    halves = config.change(train={"gradient_accumulation_steps": 2})
    assert estimate_memory(halves, [Bucket(512, 48, 48, 1)]) / 2**30 < 0.7 * estimate


@pytest.mark.parametrize(
    ("train", "copies"),
    [
        # Adam stores two moments, and Lion stores one. The schedule-free optimizer stores its
        # average, its last iterate, and a second moment.
        ({}, 3),
        ({"clip_norm": 1.0}, 3),
        ({"optimizer": "lion"}, 2),
        ({"optimizer": "schedule_free", "schedule": "constant"}, 4),
        # An evaluated average is stored twice: in the optimizer's state and as the parameters.
        ({"ema_decay": 0.99}, 5),
    ],
)
def test_each_kept_checkpoint_has_the_size_of_the_parameters_and_of_the_optimizer(
    train: dict[str, object], copies: int
) -> None:
    config = SMALL.change(train={**train, "keep_checkpoints": 5})
    size = copies * 4 * count_parameters(config)["total"]
    assert size <= estimate_bytes(config) / (5 + 2) < size + 50
