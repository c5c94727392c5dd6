"""Test how far the host can run ahead of the device, and that totals survive interruptions."""

import math
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.model.losses import Loss
from transformer_jax.training.meter import Meter
from transformer_jax.training.step import StepMetrics

FLOPS = 7e6


def metrics(smoothed: float, nll: float, count: int, norm: float = 1.0) -> StepMetrics:
    loss = Loss(jnp.float32(smoothed), jnp.float32(nll), jnp.float32(count))
    return StepMetrics(loss, jnp.float32(norm), jnp.int32(0), jnp.int32(0))


STEPS = [metrics(30, 20, 8), metrics(0, 0, 0), metrics(50, 40, 8, norm=math.inf)]


class RecordingArray:
    """A fake scalar that records each read by the host."""

    def __init__(self, step: int, reads: list[int]) -> None:
        self._step, self._reads = step, reads

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        self._reads.append(self._step)
        return np.asarray(10 * self._step)


def test_the_meter_waits_only_for_the_step_two_steps_earlier() -> None:
    meter, reads = Meter(1e9, []), list[int]()
    for step in range(1, 6):
        array: Any = RecordingArray(step, reads)
        meter.add(StepMetrics(array, array, array, array), FLOPS)
        # At step n, the meter returns the number of steps skipped up to step n - 2.
        assert meter.wait_for_earlier_step() == (10 * (step - 2) if step > 2 else 0)
        assert sorted(set(reads)) == list(range(1, step - 1))


def test_a_report_leaves_the_later_steps_to_the_next_report_without_reading_them() -> None:
    late, apart, reads = Meter(1e9, []), Meter(1e9, []), list[int]()
    unfinished: Any = RecordingArray(4, reads)
    late.add(STEPS[0], FLOPS)
    late.add(STEPS[1], 2 * FLOPS)
    late.add(STEPS[2], 3 * FLOPS)
    late.add(StepMetrics(unfinished, unfinished, unfinished, unfinished), FLOPS)
    apart.add(STEPS[0], FLOPS)
    apart.add(STEPS[1], 2 * FLOPS)
    rates = {"tokens_per_second", "utilization"}
    values, expected = late.read(num_later=2), apart.read()
    assert {k: v for k, v in values.items() if k not in rates} == {
        k: v for k, v in expected.items() if k not in rates
    }
    assert late.last(1) is STEPS[2]
    assert reads == []
    assert late.read(num_later=1)["flops"] == 3 * FLOPS


def test_a_report_has_means_per_token_and_counts_skipped_steps() -> None:
    meter = Meter(1e9, [])
    for step in STEPS:
        meter.add(step, FLOPS)
    values = meter.read()
    assert values["loss"] == pytest.approx(80 / 16)
    assert values["perplexity"] == pytest.approx(math.exp(60 / 16))
    assert values["skipped"] == 1
    assert values["flops"] == 3 * FLOPS
    # The latest gradient norm is omitted, because it is infinite and JSON cannot represent
    # infinity.
    assert "gradient_norm" not in values
    meter.add(STEPS[0], FLOPS)
    again = meter.read()
    assert again["gradient_norm"] == 1
    assert "skipped" not in again


def test_a_report_after_an_interruption_is_the_same_apart_from_rates() -> None:
    whole, before = Meter(1e9, []), Meter(1e9, [])
    for step in STEPS:
        whole.add(step, FLOPS)
    for step in STEPS[:2]:
        before.add(step, FLOPS)
    after = Meter(1e9, before.pending_metrics(), 2 * FLOPS)
    after.add(STEPS[2], FLOPS)
    assert after.pending_metrics() == whole.pending_metrics()
    expected, values = whole.read(), after.read()
    for name in ("loss", "perplexity", "skipped", "flops"):
        assert values[name] == expected[name]
    assert after.pending_metrics() == []


def test_paused_time_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(
        "transformer_jax.training.meter.time", SimpleNamespace(perf_counter=lambda: clock.now)
    )
    meter = Meter(1e9, [])
    meter.add(STEPS[0], FLOPS)
    clock.now += 2
    with meter.paused():
        clock.now += 100
    values = meter.read()
    assert values["tokens_per_second"] == 8 / 2
    assert values["utilization"] == FLOPS / 2 / 1e9


def test_runs_in_one_program_share_the_time_equally(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(
        "transformer_jax.training.meter.time", SimpleNamespace(perf_counter=lambda: clock.now)
    )
    meter = Meter(1e9, [])
    clock.now += 100
    meter.start_clock()
    clock.now += 8
    meter.add(STEPS[0], FLOPS, num_runs=4)
    # Three of the four runs have ended.
    clock.now += 1
    meter.add(STEPS[0], FLOPS, num_runs=1)
    clock.now += 1
    values = meter.read()
    assert values["tokens_per_second"] == 16 / 10
    assert values["flops"] / values["utilization"] == pytest.approx((8 / 4 + 2) * 1e9)


def test_rates_leave_out_the_steps_of_an_interrupted_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(
        "transformer_jax.training.meter.time", SimpleNamespace(perf_counter=lambda: clock.now)
    )
    meter = Meter(1e9, [[30.0, 20.0, 8.0]], FLOPS)
    meter.add(STEPS[0], FLOPS)
    clock.now += 2
    values = meter.read()
    assert (values["flops"], values["utilization"]) == (2 * FLOPS, FLOPS / 2 / 1e9)
    assert values["tokens_per_second"] == 8 / 2
    # Sweep reports show FLOPs divided by utilization, which equals time multiplied by peak FLOP/s.
    assert values["flops"] / values["utilization"] == pytest.approx(4 * 1e9)
    meter.add(STEPS[0], FLOPS)
    clock.now += 2
    assert meter.read()["flops"] == FLOPS
