import signal

from transformer_jax.distributed.supervisor import Heartbeats, signal_name


def test_real_time_signals_have_a_number_and_other_signals_a_name() -> None:
    assert signal_name(signal.SIGKILL) == "SIGKILL"
    assert signal_name(signal.SIGRTMIN + 1) == f"signal {signal.SIGRTMIN + 1}"


def test_a_phase_without_a_name_still_has_the_timeout_of_phases() -> None:
    heartbeats = Heartbeats(step_timeout=1, phase_timeout=9)
    for message, limit in (("step 3", 9), ("step 6", 4), ("busy ", 9), ("step 9", 4)):
        heartbeats.add_silence(1)
        heartbeats.receive(message)
        assert heartbeats.limit == limit, message
