"""Divide this machine into slots, each of which executes one run at a time."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from transformer_jax.errors import BackendError, UsageError

COUNT_DEVICES = """
import json, sys, jax
from transformer_jax.backend import start_backend
from transformer_jax.errors import BackendError
try:
    start_backend()
except BackendError as error:
    sys.exit(str(error))
print(json.dumps([jax.default_backend(), jax.local_device_count()]))
"""
# The assumed memory usage of a run on the CPU, in bytes.
CPU_RUN_BYTES = 2 << 30


@dataclass(frozen=True)
class Slot:
    """An accelerator or a set of CPU cores that executes one run at a time."""

    name: str
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that select the slot's device."""
    cores: frozenset[int] | None = None
    """The slot's CPU cores, or None for all cores."""


def find_slots(limit: int | None = None) -> list[Slot]:
    """Return one slot per accelerator, or as many CPU slots as the cores and memory allow.

    If `limit` is set, return that many slots, regardless of the available memory.

    Raises:
        UsageError: `limit` is not between 1 and the number of accelerators or CPU cores.
        BackendError: JAX cannot start.
    """
    # Count the devices in a child process, so that JAX does not reserve their memory in this one.
    command = [sys.executable, "-c", COUNT_DEVICES]
    child = subprocess.run(command, capture_output=True, check=False)  # noqa: S603
    errors = child.stderr.decode(errors="replace").strip()
    if child.returncode:
        reason = (errors.splitlines() or ["no message"])[-1]
        raise BackendError(reason)
    backend, num_devices = json.loads(child.stdout.splitlines()[-1])
    return make_slots(backend, num_devices, limit)


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
    cores = sorted(os.sched_getaffinity(0))
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
    # A file that does not exist, or that has another format, sets no limit.
    with contextlib.suppress(OSError, StopIteration):
        lines = (root / "proc/meminfo").read_text("utf-8").splitlines()
        available = 1024 * int(next(x for x in lines if x.startswith("MemAvailable")).split()[1])
    mount = group = root / "sys/fs/cgroup"
    with contextlib.suppress(OSError):
        groups = (root / "proc/self/cgroup").read_text("utf-8")
        group = mount / groups.rpartition("0::/")[2].strip()
    for folder in (group, *group.parents):
        # The root control group has no limit, and the limit of any other group can be "max".
        with contextlib.suppress(OSError, ValueError):
            limit = int((folder / "memory.max").read_text("utf-8"))
            used = int((folder / "memory.current").read_text("utf-8"))
            statistics = (folder / "memory.stat").read_text("utf-8").split()
            cache = int(statistics[statistics.index("inactive_file") + 1])
            available = min(available, limit - used + cache)
        if folder == mount:
            break
    return available
