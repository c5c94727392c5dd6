"""Test that slots do not share accelerators or CPU cores."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from transformer_jax.errors import UsageError
from transformer_jax.sweeps.slots import (
    MEMORY_FRACTION,
    available_bytes,
    find_slots,
    make_slots,
    share_slots,
)


def test_cpu_slots_share_all_cores_without_overlap() -> None:
    cores = [slot.cores for slot in make_slots("cpu", 1) if slot.cores is not None]
    assert sum(map(len, cores)) == len(frozenset().union(*cores)) > 0
    [slot] = make_slots("cpu", 1, limit=1)
    assert slot.cores == frozenset().union(*cores) == os.sched_getaffinity(0)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, 64 << 30),
        ({"job": "max"}, 64 << 30),
        ({"job": "8"}, 6),
        ({"": "9", "job/task": "5"}, 3),
    ],
)
def test_the_available_memory_respects_the_limits_of_containers_and_jobs(
    tmp_path: Path, limits: dict[str, str], expected: int
) -> None:
    """Each limited cgroup uses 3 bytes, one of which is disk cache that can be reclaimed."""
    process = tmp_path / "proc" / "self"
    process.mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text(f"MemTotal: 0 kB\nMemAvailable: {64 << 20} kB\n")
    (process / "cgroup").write_text("1:cpu:/\n0::/job/task\n")
    for group, limit in limits.items():
        folder = tmp_path / "sys" / "fs" / "cgroup" / group
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text("3\n")
        (folder / "memory.stat").write_text("anon 2\ninactive_file 1\nactive_file 0\n")
    assert available_bytes(tmp_path) == expected


def test_each_accelerator_slot_sees_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("CUDA_VISIBLE_DEVICES", "TPU_VISIBLE_CHIPS"):
        monkeypatch.delenv(variable, raising=False)
    gpus = make_slots("gpu", 2)
    assert [slot.environment["CUDA_VISIBLE_DEVICES"] for slot in gpus] == ["0", "1"]
    tpus = make_slots("tpu", 2, limit=1)
    assert [slot.environment["TPU_VISIBLE_CHIPS"] for slot in tpus] == ["0"]
    for backend, variable in (("gpu", "CUDA_VISIBLE_DEVICES"), ("tpu", "TPU_VISIBLE_CHIPS")):
        monkeypatch.setenv(variable, "3,5")
        slots = make_slots(backend, 2)
        assert [slot.environment[variable] for slot in slots] == ["3", "5"]


def test_runs_that_share_a_gpu_divide_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv(MEMORY_FRACTION, raising=False)
    gpus = [replace(slot, memory=75) for slot in make_slots("gpu", 2)]
    slots = share_slots("gpu", gpus, 3)
    names = [f"gpu {gpu} ({part} of 3)" for part in (1, 2, 3) for gpu in (0, 1)]
    assert [slot.name for slot in slots] == names
    assert [slot.environment["CUDA_VISIBLE_DEVICES"] for slot in slots] == ["0", "1"] * 3
    assert {(slot.environment[MEMORY_FRACTION], slot.memory) for slot in slots} == {("0.300", 30)}
    # If the user has set a fraction, that fraction is divided instead.
    monkeypatch.setenv(MEMORY_FRACTION, "0.6")
    [slot, _] = share_slots("gpu", gpus[:1], 2)
    assert slot.environment[MEMORY_FRACTION] == "0.300"


def test_only_gpus_can_be_shared() -> None:
    for backend in ("cpu", "tpu"):
        with pytest.raises(UsageError, match=f"share a GPU, but not a {backend.upper()}: omit"):
            share_slots(backend, [], 2)
    with pytest.raises(UsageError, match="runs_per_device must be positive, got 0"):
        find_slots(1, 0)


def test_the_number_of_slots_is_limited_by_the_devices() -> None:
    for limit in (-1, 0, 3):
        with pytest.raises(UsageError, match=f"devices must be from 1 to 2, got {limit}"):
            make_slots("gpu", 2, limit)
    cores = len(os.sched_getaffinity(0))
    for limit in (-1, 0, cores + 1):
        with pytest.raises(UsageError, match=f"devices must be from 1 to {cores}, got {limit}"):
            make_slots("cpu", 1, limit)


def test_a_child_process_counts_the_devices() -> None:
    [slot] = find_slots(1)
    assert slot.name
