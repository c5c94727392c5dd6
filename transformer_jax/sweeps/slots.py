"""Divide this machine into slots, each of which executes one worker at a time."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from transformer_jax.errors import BackendError, Setting, UsageError
from transformer_jax.parallel import control_groups, count_usable_cores

# This program prints the backend, the number of devices, and the bytes that JAX can use on each
# device.
COUNT_DEVICES = """
import json, sys, jax
from transformer_jax.backend import start_backend
from transformer_jax.errors import BackendError
try:
    start_backend()
except BackendError as error:
    sys.exit(str(error))
devices = jax.local_devices()
size = (devices[0].memory_stats() or {}).get("bytes_limit")
backend, count = jax.default_backend(), len(devices)
if backend == "tpu":
    # Some chips have two devices, and a slot is a chip.
    count = len({tuple(x.coords) for x in devices})
print(json.dumps([backend, count, size]))
"""
MEMORY_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
# The default value of the variable above.
DEFAULT_FRACTION = 0.75
# Several processes on one GPU divide this fraction of its memory. The rest of the memory is for
# kernels.
SHARED_FRACTION = 0.9
# The assumed memory usage of a run on the CPU, in bytes.
CPU_RUN_BYTES = 2 << 30


@dataclass(frozen=True)
class Slot:
    """An accelerator, a share of one, or a set of CPU cores, for one worker at a time."""

    name: str
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that select the slot's device."""
    cores: frozenset[int] | None = None
    """The slot's CPU cores, or None for all cores."""
    memory: int | None = None
    """The number of bytes that JAX can use on the slot's accelerator, or None if unknown."""


def find_slots(limit: int | None = None, runs_per_device: int = 1) -> list[Slot]:
    """Return one slot per accelerator, or as many CPU slots as the cores and memory allow.

    If `limit` is set, use that many accelerators or CPU slots, regardless of the available memory.
    If there are several runs per device, each GPU has several slots, which divide its memory.
    """
    # Count the devices in a child process, so that JAX does not reserve their memory in this
    # process.
    command = [sys.executable, "-c", COUNT_DEVICES]
    child = subprocess.run(command, capture_output=True, check=False)  # noqa: S603
    errors = child.stderr.decode(errors="replace").strip()
    if child.returncode:
        reason = (errors.splitlines() or ["no message"])[-1]
        raise BackendError(reason)
    backend, num_devices, memory = json.loads(child.stdout.splitlines()[-1])
    slots = make_slots(backend, num_devices, limit)
    if backend != "cpu":
        slots = [replace(slot, memory=memory) for slot in slots]
    return slots if runs_per_device == 1 else share_slots(backend, slots, runs_per_device)


def share_slots(backend: str, slots: Sequence[Slot], count: int) -> list[Slot]:
    """Divide each GPU into `count` slots; raise UsageError if this is impossible."""
    if count < 1:
        raise UsageError(f"runs_per_device must be positive, got {count}")
    if backend != "gpu":
        raise UsageError(
            f"several runs can share a GPU, but not a {backend.upper()}: omit ",
            Setting("runs_per_device", count),
        )
    own = os.environ.get(MEMORY_FRACTION)
    before = float(own or DEFAULT_FRACTION)
    fraction = (before if own else SHARED_FRACTION) / count
    return [
        replace(
            slot,
            name=f"{slot.name} ({part} of {count})",
            environment={**slot.environment, MEMORY_FRACTION: f"{fraction:.3f}"},
            memory=None if slot.memory is None else int(slot.memory * fraction / before),
        )
        for part in range(1, count + 1)
        for slot in slots
    ]


def make_slots(backend: str, num_devices: int, limit: int | None = None) -> list[Slot]:
    """Return the slots for a JAX backend; see `find_slots`."""
    is_cpu = backend == "cpu"
    slots = _make_cpu_slots(limit) if is_cpu else _make_accelerator_slots(backend, num_devices)
    if limit is not None and not 1 <= limit <= len(slots):
        raise UsageError(f"devices must be from 1 to {len(slots)}, got {limit}")
    return slots[:limit]


def _make_accelerator_slots(backend: str, num_devices: int) -> list[Slot]:
    variable, others = "CUDA_VISIBLE_DEVICES", dict[str, str]()
    if backend == "tpu":
        # With these variables, a process sees only one chip and does not connect to other chips.
        variable = "TPU_VISIBLE_CHIPS"
        others = {"TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1", "TPU_PROCESS_BOUNDS": "1,1,1"}
    visible = os.environ.get(variable)
    devices = visible.split(",")[:num_devices] if visible else map(str, range(num_devices))
    return [Slot(f"{backend} {device}", {variable: device, **others}) for device in devices]


def _make_cpu_slots(limit: int | None) -> list[Slot]:
    if not hasattr(os, "sched_getaffinity"):
        return [Slot("cpu")]
    cores = sorted(os.sched_getaffinity(0))[: count_usable_cores()]
    if limit is None:
        # The available memory limits the number of slots.
        limit = max(1, available_bytes() // CPU_RUN_BYTES)
    # If the limit is not positive, return all slots, so that the error message states their number.
    count = min(limit, len(cores)) if limit > 0 else len(cores)
    return [Slot(f"cpu {i}", cores=frozenset(cores[i::count])) for i in range(count)]


def available_bytes(root: Path = Path("/")) -> int:
    """Return the memory that this process can use, including reclaimable disk cache.

    This function respects the memory limits of containers and Slurm jobs (control groups, version
    2). The folder `root` contains the folders `proc` and `sys`.
    """
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    # A file that does not exist, or that has a different format, does not set a limit.
    with contextlib.suppress(OSError, StopIteration):
        lines = (root / "proc/meminfo").read_text("utf-8").splitlines()
        available = 1024 * int(next(x for x in lines if x.startswith("MemAvailable")).split()[1])
    for folder in control_groups(root):
        # The root control group has no limit, and the limit of any other group can be "max".
        with contextlib.suppress(OSError, ValueError):
            limit = int((folder / "memory.max").read_text("utf-8"))
            used = int((folder / "memory.current").read_text("utf-8"))
            statistics = (folder / "memory.stat").read_text("utf-8").split()
            cache = int(statistics[statistics.index("inactive_file") + 1])
            available = min(available, limit - used + cache)
    return available
