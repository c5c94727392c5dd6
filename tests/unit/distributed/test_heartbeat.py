"""Test that a trainer sends a message every three steps and at the start of each phase."""

import os
from collections.abc import Callable, Iterator

import pytest

from transformer_jax.distributed import heartbeat


@pytest.fixture
def read_messages(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[str]]]:
    """A function that returns the messages sent since its last call."""
    ours, theirs = os.pipe()
    os.set_blocking(ours, False)
    os.set_blocking(theirs, False)
    monkeypatch.setattr(heartbeat, "_pipe", theirs)
    monkeypatch.setattr(heartbeat, "_beats", 0)

    def read() -> list[str]:
        try:
            return os.read(ours, 1 << 16).decode().splitlines()
        except BlockingIOError:
            return []

    yield read
    os.close(ours)
    os.close(theirs)


def beat(steps: range) -> None:
    for step in steps:
        heartbeat.beat(step)


def test_every_third_step_sends_a_message(read_messages: Callable[[], list[str]]) -> None:
    beat(range(1, 8))
    assert read_messages() == ["step 3", "step 6"]


def test_a_phase_lasts_until_a_later_step_is_done(read_messages: Callable[[], list[str]]) -> None:
    beat(range(1, 11))
    heartbeat.busy("scoring")
    assert read_messages()[-1] == "busy scoring"
    # The call for step 13 confirms that step 11, the first step after scoring, is done.
    beat(range(11, 13))
    assert read_messages() == []
    beat(range(13, 14))
    assert read_messages() == ["step 13"]


def test_a_phase_is_one_line_of_utf8(read_messages: Callable[[], list[str]]) -> None:
    heartbeat.busy("reading a\nb\udcff")
    assert read_messages() == ["busy reading a b?"]


def test_a_full_or_broken_pipe_does_not_disturb_training(
    read_messages: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(5000):
        heartbeat.busy("waiting for another process")
    assert read_messages()
    ours, theirs = os.pipe()
    os.close(ours)
    monkeypatch.setattr(heartbeat, "_pipe", theirs)
    heartbeat.busy("scoring")
    os.close(theirs)


def test_without_a_supervisor_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(heartbeat.VARIABLE, raising=False)
    monkeypatch.setattr(os, "write", None)
    assert not heartbeat.connect()
    beat(range(9))
    heartbeat.busy("scoring")
