"""Handlers for `parallel.map_in_order`, which other processes import."""

import os
import signal
import sys
from collections.abc import Callable


def open_numbers(setup: bytes) -> Callable[[bytes], bytes]:
    """Return a function that normalizes a number and puts `setup` before it."""
    return lambda request: setup + str(int(request)).encode()


def open_process(setup: bytes) -> Callable[[bytes], bytes]:  # noqa: ARG001
    """Return a function that describes or kills its process."""

    def answer(request: bytes) -> bytes:
        if request == b"die":
            os.kill(os.getpid(), signal.SIGKILL)
        return str("jax" in sys.modules if request == b"jax" else os.getpid()).encode()

    return answer
