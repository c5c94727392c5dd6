"""The platform that a program is traced for.

The platform determines which algorithms are fastest. All algorithms compute the same function, up
to rounding, so tracing for the wrong platform costs only time and memory.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

import jax

Platform = Literal["cpu", "gpu", "tpu"]
_PLATFORM = ContextVar[Platform | None]("platform", default=None)


@contextmanager
def tracing_for(platform: str) -> Iterator[None]:
    """Make `target_platform` return this platform, even if the machine has no such device.

    JAX caches the traces of each function object, so trace a new function object for each platform.
    """
    token = _PLATFORM.set(_to_platform(platform))
    try:
        yield
    finally:
        _PLATFORM.reset(token)


def target_platform() -> Platform:
    """Return the platform of the innermost `tracing_for` context, or JAX's default platform."""
    return _PLATFORM.get() or _to_platform(jax.default_backend())


def _to_platform(name: str) -> Platform:
    """Convert JAX's name for a platform, such as "cuda" or "gpu", to a `Platform`."""
    return name if name in ("cpu", "tpu") else "gpu"
