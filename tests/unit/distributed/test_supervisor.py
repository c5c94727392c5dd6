import signal

from transformer_jax.distributed.supervisor import signal_name


def test_real_time_signals_have_a_number_and_other_signals_a_name() -> None:
    assert signal_name(signal.SIGKILL) == "SIGKILL"
    assert signal_name(signal.SIGRTMIN + 1) == f"signal {signal.SIGRTMIN + 1}"
