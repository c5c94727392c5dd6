"""Check and apply settings, start JAX's backends, and describe what affects the results."""

import contextlib
import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import jax

from transformer_jax.cache import enable_compilation_cache
from transformer_jax.errors import BackendError, summarize_error
from transformer_jax.parallel import count_usable_cores
from transformer_jax.progress import note
from transformer_jax.xla_flags import GPU_FLAGS, add_flags

CHECKED_FLAGS = "TRANSFORMER_JAX_CHECKED_XLA_FLAGS"
"""The last valid value of XLA_FLAGS, which child processes inherit instead of checking it again."""
THREAD_VARIABLES = ("PJRT_NPROC", "NPROC")
SETTINGS = (
    *("jax_default_matmul_precision", "jax_disable_most_optimizations", "jax_optimization_level"),
    *("jax_random_seed_offset", "jax_threefry_partitionable"),
)
"""JAX's settings that change the results of a run."""

STANDARD_SETTINGS: dict[str, tuple[Callable[[Any], AbstractContextManager[None]], Any]] = {
    "jax_check_tracer_leaks": (jax.check_tracer_leaks, False),
    "jax_debug_infs": (jax.debug_infs, False),
    "jax_debug_nans": (jax.debug_nans, False),
    "jax_disable_jit": (jax.disable_jit, False),
    "jax_enable_x64": (jax.enable_x64, False),
    "jax_numpy_dtype_promotion": (jax.numpy_dtype_promotion, "standard"),
    "jax_transfer_guard_device_to_device": (jax.transfer_guard_device_to_device, "allow"),
    "jax_transfer_guard_device_to_host": (jax.transfer_guard_device_to_host, "allow"),
    "jax_transfer_guard_host_to_device": (jax.transfer_guard_host_to_device, "allow"),
}
"""The JAX settings that runs ignore, each with its default and the function that sets it in a
context."""

_environment: dict[str, str] = {}
_noted: set[str] = set()
_is_fork = Event()
# A fork does not have the threads of JAX, so it would wait for them forever.
os.register_at_fork(after_in_child=lambda: _is_fork.set() if _environment else None)


def start_backend(cpu_threads: int | None = None) -> None:
    """Start JAX's backends, unless they are already running, and enable the compilation cache.

    On a CPU, the rounding of a program can depend on the number of threads. `cpu_threads` is the
    number of threads of an existing run; the default is the number of cores that this process can
    use. The environment variables PJRT_NPROC and NPROC override both.

    Raises:
        BackendError: a backend cannot start, or this process is a fork of one that uses JAX.
    """
    _check_no_fork()
    enable_compilation_cache()
    if _environment:
        return
    is_running = _is_running()
    if not is_running:
        _set_gpu_flags()
        _check_flags()
    threads = _configured_threads() or (None if is_running else cpu_threads) or count_usable_cores()
    # Set the variable only temporarily, so that child processes do not inherit it.
    name, before = THREAD_VARIABLES[0], os.environ.get(THREAD_VARIABLES[0])
    os.environ[name] = str(threads)
    try:
        _start()
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before
    settings = {name: str(_setting(name)) for name in SETTINGS}
    _environment.update(settings, XLA_FLAGS=os.environ.get("XLA_FLAGS", ""))
    if jax.default_backend() == "cpu":
        _environment["cpu_threads"] = str(threads)


@contextmanager
def standard_settings(dtype: str = "float32") -> Iterator[None]:
    """Restore the defaults of `STANDARD_SETTINGS` in this thread until the context exits."""
    _check_no_fork()
    ignored = [k for k, (_, x) in STANDARD_SETTINGS.items() if _setting(k) not in (x, None)]
    if dtype == "float64":
        ignored = [name for name in ignored if name != "jax_enable_x64"]
    if names := ", ".join(name.upper() for name in ignored if name not in _noted):
        note(f"runs ignore {names}")
        _noted.update(ignored)
    with contextlib.ExitStack() as stack:
        for name in ignored:
            set_value, value = STANDARD_SETTINGS[name]
            stack.enter_context(set_value(value))
        yield


def _check_no_fork() -> None:
    if _is_fork.is_set():
        raise BackendError(
            "this process is a fork of a process that uses JAX, so JAX cannot run in it: start "
            "processes with multiprocessing.get_context('spawn'), and load runs in each process"
        )


def describe_environment() -> dict[str, str]:
    """Return the devices, number of CPU threads, and settings that affect the results of a run."""
    start_backend()
    return {"devices": describe_devices(), **_environment}


def describe_devices() -> str:
    """Return the number of devices and their model, such as "8 x NVIDIA H100 80GB HBM3"."""
    devices = jax.devices()
    kind = devices[0].device_kind
    if devices[0].platform == "cpu":
        with contextlib.suppress(OSError):
            model = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text("utf-8"))
            kind = model[1] if model else kind
    return f"{len(devices)} x {kind}"


def _setting(name: str) -> Any:  # noqa: ANN401 - the settings have different types
    # JAX offers some settings as attributes and others through `read`.
    return getattr(jax.config, name) if hasattr(jax.config, name) else jax.config.read(name)


def _is_running() -> bool:
    try:
        from jax._src.xla_bridge import backends_are_initialized
    except ImportError:
        return False
    return backends_are_initialized()


def _set_gpu_flags() -> None:
    """If JAX can use a GPU, add the missing `GPU_FLAGS` to XLA_FLAGS.

    XLA exits if it does not recognize a flag.
    """
    platforms = set((_setting("jax_platforms") or "gpu").split(","))
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    is_installed = any("cuda" in plugin.name or "rocm" in plugin.name for plugin in plugins)
    if is_installed and platforms & {"gpu", "cuda", "rocm"}:
        add_flags(GPU_FLAGS)


def _check_flags() -> None:
    """Check XLA_FLAGS in another process, because XLA aborts if it rejects a flag."""
    flags = os.environ.get("XLA_FLAGS", "")
    if not flags or flags == os.environ.get(CHECKED_FLAGS):
        return
    code = "from jaxlib import xla_client; xla_client.CompileOptions()"
    command = [sys.executable, "-c", code]
    child = subprocess.run(command, capture_output=True, check=False)  # noqa: S603
    if child.returncode:
        errors = child.stderr.decode(errors="replace")
        found = re.search(
            r"(Unknown flags? in XLA_FLAGS: [^\n]*|Couldn't interpret value [^\n]*)", errors
        )
        reason = found[0] if found else "XLA rejects a flag"
        raise BackendError(f"JAX cannot start: {reason} (XLA_FLAGS={flags!r}): correct XLA_FLAGS")
    os.environ[CHECKED_FLAGS] = flags


def _start() -> None:
    """Start the backends that JAX_PLATFORMS selects, and the CPU backend for initial values."""
    platforms = _setting("jax_platforms")
    needs_accelerator = bool(platforms) and "cpu" not in platforms.split(",")
    if needs_accelerator:
        jax.config.update("jax_platforms", f"{platforms},cpu")
    try:
        if jax.default_backend() == "cpu" and needs_accelerator:
            raise RuntimeError("there is no such device, or its plugin for JAX is not installed")
    except RuntimeError as error:
        jax.config.update("jax_platforms", platforms)
        raise BackendError(_describe_failure(platforms, error)) from error


def _describe_failure(platforms: str | None, error: BaseException) -> str:
    setting = f"JAX_PLATFORMS={platforms or ''}"
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    code = "import jax; print(*dict.fromkeys([jax.default_backend(), 'cpu']), sep=', ')"
    command = [sys.executable, "-c", code]
    child = subprocess.run(command, env=environment, capture_output=True, check=False)  # noqa: S603
    reason = summarize_error(error).partition(" (set JAX_PLATFORMS")[0].rstrip(".")
    if not (existing := child.stdout.decode().splitlines()[-1:]):
        # Another setting is the cause.
        settings = (f"{k}={v}" for k, v in environment.items() if re.match("JAX_|XLA_FLAGS", k))
        return f"JAX cannot start: {reason}; correct or unset one of {', '.join(settings)}"
    return (
        f"JAX cannot start with {setting}: {reason}; platforms on this machine: {existing[0]}; "
        "set JAX_PLATFORMS to one of them, or unset it"
    )


def _configured_threads() -> int | None:
    values = (os.environ.get(name, "") for name in THREAD_VARIABLES)
    return next((int(value) for value in values if value.isdecimal() and int(value)), None)


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
