import signal
import threading

import pytest

from transformer_jax.signals import STOP_SIGNALS, handle_signals


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_handler_is_active_until_the_end_of_the_block(number: signal.Signals) -> None:
    outer, inner = list[int](), list[int]()
    with handle_signals(lambda number, _: outer.append(number)):
        with handle_signals(lambda number, _: inner.append(number)):
            signal.raise_signal(number)
        signal.raise_signal(number)
    assert (outer, inner) == ([number], [number])


def test_an_error_restores_the_handlers() -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with pytest.raises(ZeroDivisionError), handle_signals(lambda *_: None):
        assert 1 / 0
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


def test_only_an_ignored_hangup_stays_ignored() -> None:
    received = list[int]()
    with (
        handle_signals(signal.SIG_IGN, [signal.SIGHUP, signal.SIGTERM]),
        handle_signals(lambda number, _: received.append(number)),
    ):
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGTERM)
    assert received == [signal.SIGTERM]


def test_another_thread_changes_no_handler() -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    during = list[object]()

    def work() -> None:
        with handle_signals(lambda *_: None):
            during.extend(signal.getsignal(number) for number in STOP_SIGNALS)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert during == before
