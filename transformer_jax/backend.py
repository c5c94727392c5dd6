"""Prepare JAX's backends, and count the programs that JAX compiles."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import jax

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
CACHE_EVENT = "/jax/compilation_cache/cache_hits"


def host_device() -> jax.Device:
    """Return the CPU of this process, or the default device if JAX does not use the CPU."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return jax.local_devices()[0]


@dataclass
class Compilations:
    """The programs that JAX has compiled, or loaded from its persistent cache."""

    names: list[str] = field(default_factory=list)
    """The name of each program, such as "jit(train_step)"."""
    cached: int = 0
    """The number of programs that JAX has loaded from its persistent cache."""
    seconds: float = 0.0

    def __str__(self) -> str:
        cached = f", {self.cached} of them loaded from the cache" if self.cached else ""
        return f"compilation: {len(self.names)} programs in {self.seconds:.1f} s{cached}"


@contextmanager
def count_compilations() -> Iterator[Compilations]:
    """Record the compilations in all threads until the context exits."""
    found = Compilations()

    def record_duration(event: str, duration_secs: float, **details: str | int) -> None:
        if event == COMPILE_EVENT:
            found.names.append(str(details.get("fun_name", "")))
            found.seconds += duration_secs

    def record_event(event: str, **_details: str | int) -> None:
        found.cached += event == CACHE_EVENT

    jax.monitoring.register_event_duration_secs_listener(record_duration)
    jax.monitoring.register_event_listener(record_event)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(record_duration)
        jax.monitoring.unregister_event_listener(record_event)
