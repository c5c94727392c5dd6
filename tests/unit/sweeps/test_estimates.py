"""Test the estimates of what a sweep needs."""

from pathlib import Path

import jax
import pytest
from example_configs import SMALL

from transformer_jax.baselines.build import build_model
from transformer_jax.compilation.targets import parse_target
from transformer_jax.config import Config, Row
from transformer_jax.errors import UsageError
from transformer_jax.progress import report_to
from transformer_jax.sweeps.estimates import count_devices_of_rows, describe_counts, estimate_bytes
from transformer_jax.sweeps.plan import Sweep
from transformer_jax.training.step import init_state


def test_neighboring_rows_with_the_same_number_are_one_part_of_the_line() -> None:
    counts = {"base": 1, "A1": 1, "E": 1, "big": 2}
    line = describe_counts(counts, parse_target("v5e:2x4"))
    assert line == "base to E fit one v5e chip each; big needs 2 v5e chips"
    counts = {"base": 1, "big": 4, "huge": 4, "giant": None}
    line = describe_counts(counts, parse_target("h100:4"))
    assert line == (
        "base fits one h100 GPU; big to huge need 4 h100 GPUs each; giant does not fit 4 h100 GPUs"
    )


def test_a_row_that_does_not_fit_the_only_device_is_named() -> None:
    line = describe_counts({"base": None, "big": None}, parse_target("v5e"))
    assert line == "base to big do not fit 1 v5e chip"


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


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_each_kept_checkpoint_has_the_size_of_the_whole_training_state(
    clip_norm: float | None,
) -> None:
    config = SMALL.change(train={"clip_norm": clip_norm, "keep_checkpoints": 5})
    state = init_state(build_model(config.model, config.data.vocab_size), config.train)
    size = sum(array.nbytes for array in jax.tree.leaves(state))
    assert estimate_bytes(config) == (5 + 2) * size
