"""Test that signals stop training after a step, and that a timer requests checkpoints."""

import signal
from types import SimpleNamespace

import pytest

from transformer_jax.distributed import preemption
from transformer_jax.distributed.preemption import CheckpointTimer, GracefulShutdown
from transformer_jax.errors import RunInterrupted
from transformer_jax.signals import STOP_SIGNALS


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_waits_for_the_step_once_training_has_begun(number: signal.Signals) -> None:
    handlers = [signal.getsignal(number) for number in STOP_SIGNALS]
    with GracefulShutdown("resume") as shutdown:
        shutdown.defers_signals = True
        shutdown.check()
        signal.raise_signal(number)
        assert shutdown.signal == number
        with pytest.raises(RunInterrupted):
            shutdown.check()
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == handlers


def test_a_signal_before_training_ends_the_run_at_once() -> None:
    with (
        pytest.raises(RunInterrupted, match=r"SIGTERM: .*; resume with X"),
        GracefulShutdown("resume with X"),
    ):
        signal.raise_signal(signal.SIGTERM)


def test_ctrl_c_after_another_signal_ends_the_run_at_once() -> None:
    with GracefulShutdown("resume") as shutdown:
        shutdown.defers_signals = True
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def save_times(monkeypatch: pytest.MonkeyPatch, *, minutes: float, until: int) -> list[int]:
    """Poll a timer every second, and return the seconds at which it requests a checkpoint."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(preemption, "time", SimpleNamespace(monotonic=lambda: clock.now))
    timer, times = CheckpointTimer(minutes), list[int]()
    for second in range(until):
        clock.now = 1000.0 + second
        if timer.is_due():
            timer.record_save()
            times.append(second)
    return times


def test_the_time_between_checkpoints_doubles_up_to_the_maximum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert save_times(monkeypatch, minutes=100, until=200) == [0, 5, 10, 20, 40, 80, 160]
    assert save_times(monkeypatch, minutes=0.5, until=140) == [0, 5, 10, 20, 40, 70, 100, 130]


def test_a_tiny_maximum_saves_after_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    assert save_times(monkeypatch, minutes=1e-6, until=5) == [0, 1, 2, 3, 4]
