import json
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.errors import StorageError, UsageError
from transformer_jax.runs import checksums
from transformer_jax.runs.array_store import on_device
from transformer_jax.runs.checkpoint_manager import CheckpointManager

IDENTITY = {"model.d_model": 2, "data": "f1a9"}
HERE = jax.sharding.SingleDeviceSharding(jax.devices()[0])


def params_of(step: int) -> dict[str, Any]:
    return {"layer": {"kernel": jnp.full((3, 2), float(step)), "bias": jnp.arange(2.0) + step}}


def arrays(params: Any) -> dict[str, Any]:
    return {"params": params, "optimizer": {"count": jnp.int32(7)}}


def save(folder: Path, steps: dict[int, float | None], keep: int = 3) -> None:
    """Write a checkpoint for each step, with its perplexity where it is scheduled."""
    with CheckpointManager(folder, IDENTITY, keep=keep) as checkpoints:
        for step, perplexity in steps.items():
            checkpoints.prepare_save(step, arrays(params_of(step)))
            checkpoints.save(step, arrays(params_of(step)), perplexity, {})


def kept(folder: Path) -> set[int]:
    return {int(path.name) for path in folder.iterdir()}


def test_what_is_saved_comes_back_bit_for_bit(tmp_path: Path) -> None:
    saved = {"w": jax.random.normal(jax.random.key(0), (64, 3)), "i": jnp.int32(7)}
    with CheckpointManager(tmp_path / "c", IDENTITY, keep=1) as checkpoints:
        checkpoints.save(5, arrays(saved), 1.5, {"unreported": [[0.1, 2.0]]})
    with CheckpointManager(tmp_path / "c", IDENTITY) as checkpoints:
        assert checkpoints.latest_valid() == 5
        assert checkpoints.metadata(5) == {"unreported": [[0.1, 2.0]]}
        found = checkpoints.restore(5, {"params": on_device(saved, HERE)})
    assert set(found) == {"params"}  # the optimizer was not read
    jax.tree.map(np.testing.assert_array_equal, found["params"], saved)


def test_arrays_may_be_given_away_as_soon_as_save_returns(tmp_path: Path) -> None:
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jnp.zeros(1_000_000)
    with CheckpointManager(tmp_path / "c", IDENTITY, keep=1) as checkpoints:
        checkpoints.save(1, arrays({"x": x}), None, {})
        for _ in range(20):
            x = add(x)
        found = checkpoints.restore(1, {"params": on_device({"x": x}, HERE)})
    assert float(jnp.abs(found["params"]["x"]).max()) == 0


def test_the_latest_the_best_and_the_last_few_scheduled_stay(tmp_path: Path) -> None:
    save(tmp_path / "c", {1: 2.0, 2: 9.0, 3: 8.0, 4: 7.0, 5: None, 6: 6.0, 7: None}, keep=2)
    # 1 is the best, 4 and 6 the last two scheduled, 7 the latest.
    assert kept(tmp_path / "c") == {1, 4, 6, 7}


def test_an_average_is_of_scheduled_checkpoints_only(tmp_path: Path) -> None:
    save(tmp_path / "c", {1: 9.0, 2: 8.0, 3: None, 4: 7.0, 5: None})
    target = on_device(params_of(0), HERE)
    with CheckpointManager(tmp_path / "c", IDENTITY) as checkpoints:
        assert sorted(checkpoints.scores) == [1, 2, 4]
        mean = checkpoints.mean_params(checkpoints.select_steps(2), target)
        np.testing.assert_allclose(mean["layer"]["kernel"], 3.0)
        np.testing.assert_allclose(mean["layer"]["bias"], [3.0, 4.0])
        with pytest.raises(UsageError, match=r"mean of 4 .* has 3"):
            checkpoints.select_steps(4)


def test_what_is_meant_ends_at_the_step_that_is_named(tmp_path: Path) -> None:
    save(tmp_path / "run" / "c", {1: 9.0, 2: 8.0, 3: None, 4: 7.0, 5: None}, keep=3)
    with CheckpointManager(tmp_path / "run" / "c", IDENTITY) as checkpoints:
        # An interruption's own checkpoint, of step 3, went when that of step 4 came.
        assert checkpoints.select_steps() == checkpoints.select_steps(step=5) == [5]
        assert checkpoints.select_steps(step=2) == [2]
        assert checkpoints.select_steps(2) == checkpoints.select_steps(2, step=4) == [2, 4]
        assert checkpoints.select_steps(2, step=2) == [1, 2]
        with pytest.raises(UsageError, match=r"run has no checkpoint of step 3; .*: 1, 2, 4, 5$"):
            checkpoints.select_steps(step=3)
        with pytest.raises(UsageError, match=r"no scheduled checkpoint of step 5; .*: 1, 2, 4$"):
            checkpoints.select_steps(2, step=5)
        with pytest.raises(UsageError, match=r"of 3 .* 2 scheduled ones in a row up to step 2"):
            checkpoints.select_steps(3, step=2)


def test_no_mean_is_taken_over_a_gap(tmp_path: Path) -> None:
    # 1 is kept as the best; 2 and 3 are gone.
    save(tmp_path / "c", {1: 1.0, 2: 8.0, 3: 7.0, 4: 6.0, 5: 5.0}, keep=2)
    assert kept(tmp_path / "c") == {1, 4, 5}
    with CheckpointManager(tmp_path / "c", IDENTITY) as checkpoints:
        assert checkpoints.select_steps(2) == [4, 5]
        for average, step in ((3, None), (2, 4)):
            with pytest.raises(UsageError, match=r"scheduled ones in a row"):
                checkpoints.select_steps(average, step)


def test_a_run_without_checkpoint_says_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no checkpoint yet"):
        CheckpointManager(tmp_path / "run" / "checkpoints", IDENTITY)


def test_reading_leaves_no_trace(tmp_path: Path) -> None:
    save(tmp_path / "c", {1: 9.0, 2: 8.0})
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "c").rglob("*")}
    with CheckpointManager(tmp_path / "c", IDENTITY) as checkpoints:
        checkpoints.restore(2, {"params": on_device(params_of(0), HERE)})
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "c").rglob("*")} == before


@pytest.mark.parametrize(
    "other",
    [
        {"layer": {"kernel": jnp.zeros((3, 9)), "bias": jnp.zeros(2)}},
        {"layer": {"kernel": jnp.zeros((3, 2))}, "more": jnp.zeros(1)},
        {"layer": {"kernel": jnp.zeros((3, 2), jnp.bfloat16), "bias": jnp.zeros(2)}},
    ],
    ids=["shape", "names", "dtype"],
)
def test_what_does_not_fit_is_refused_in_one_line(tmp_path: Path, other: dict[str, Any]) -> None:
    save(tmp_path / "c", {1: 9.0})
    with CheckpointManager(tmp_path / "c", IDENTITY) as checkpoints:
        with pytest.raises(StorageError, match="checkpoint 1") as caught:
            checkpoints.restore(1, {"params": on_device(other, HERE)})
        assert "\n" not in str(caught.value)


def open_for_writing(folder: Path, said: list[str]) -> CheckpointManager:
    return CheckpointManager(folder, IDENTITY, keep=3, say=said.append)


def first_value(checkpoints: CheckpointManager, step: int) -> float:
    found = checkpoints.restore(step, {"params": on_device(params_of(0), HERE)})
    return float(found["params"]["layer"]["kernel"][0, 0])


def flip(rng: random.Random, files: list[Path]) -> None:
    path = rng.choice([path for path in files if path.stat().st_size])
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def truncate(rng: random.Random, files: list[Path]) -> None:
    path = rng.choice([path for path in files if path.stat().st_size])
    os.truncate(path, rng.randrange(path.stat().st_size))


def delete(rng: random.Random, files: list[Path]) -> None:
    rng.choice(files).unlink()


def zero(rng: random.Random, files: list[Path]) -> None:
    path = rng.choice([path for path in files if any(path.read_bytes())])
    path.write_bytes(bytes(path.stat().st_size))


def swap(rng: random.Random, files: list[Path]) -> None:
    one, other = rng.choice([(a, b) for a in files for b in files if differ(a, b)])
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


def differ(a: Path, b: Path) -> bool:
    return a.read_bytes() != b.read_bytes()


def add(rng: random.Random, files: list[Path]) -> None:
    (rng.choice(files).parent / "one_more").write_bytes(rng.randbytes(9))


def another(rng: random.Random, files: list[Path]) -> None:
    """Let the checkpoint before stand under this one's name: all its files are as written."""
    del rng
    folder = next(path.parent for path in files if path.name == "SHA256SUMS")
    shutil.rmtree(folder)
    shutil.copytree(folder.with_name("1"), folder)


DAMAGES = [flip, flip, flip, truncate, delete, zero, swap, add, another]


@pytest.mark.parametrize("damages", [60, pytest.param(300, marks=pytest.mark.slow)])
def test_every_damage_is_noticed_and_the_checkpoint_before_is_used(
    tmp_path: Path, damages: int
) -> None:
    save(tmp_path / "whole", {1: 9.0, 2: 8.0})
    rng = random.Random(damages)
    for number in range(damages):
        copy = tmp_path / "copy"
        shutil.copytree(tmp_path / "whole", copy)
        files = sorted(path for path in (copy / "2").rglob("*") if path.is_file())
        rng.choice(DAMAGES)(rng, files)
        said: list[str] = []
        with open_for_writing(copy, said) as checkpoints:
            assert checkpoints.latest_valid() == 1, f"damage {number}"
            assert first_value(checkpoints, 1) == 1.0
        assert len(said) == 1
        assert said[0].startswith("checkpoint 2 is damaged and now called bad-2: ")
        assert said[0].endswith("; 1 is used instead")
        assert "\n" not in said[0]
        assert {path.name for path in copy.iterdir()} == {"1", "bad-2"}
        shutil.rmtree(copy)


def test_a_mean_has_no_part_that_is_damaged(tmp_path: Path) -> None:
    save(tmp_path / "run" / "c", {1: 9.0, 2: 8.0, 3: 7.0, 4: 6.0, 5: 5.0}, keep=9)

    def chosen(damaged: int, average: int, step: int | None = None) -> list[int]:
        copy = tmp_path / "copy"
        shutil.copytree(tmp_path / "run", copy)
        try:
            (copy / "c" / str(damaged) / "params" / "one_more").touch()
            with CheckpointManager(copy / "c", IDENTITY, say=lambda _: None) as checkpoints:
                return checkpoints.select_steps(average, step)
        finally:
            shutil.rmtree(copy)

    assert chosen(5, 2) == [3, 4]
    assert chosen(2, 3) == [3, 4, 5]
    with pytest.raises(
        UsageError, match="has 3 scheduled ones in a row: `--average-checkpoints 1`"
    ):
        chosen(2, 4)
    with pytest.raises(StorageError, match=r"checkpoint 4 of .* is damaged"):
        chosen(4, 2, step=4)


def test_a_reader_uses_the_one_before_and_moves_nothing(tmp_path: Path) -> None:
    save(tmp_path / "run" / "c", {1: 9.0, 2: 8.0, 3: None})
    (tmp_path / "run" / "c" / "3" / "checkpoint.json").unlink()
    said: list[str] = []
    with CheckpointManager(tmp_path / "run" / "c", IDENTITY, say=said.append) as checkpoints:
        assert checkpoints.select_steps() == [2]
        # What was asked for by name is given, or nothing.
        with pytest.raises(StorageError, match=r"checkpoint 3 of .* is damaged: checkpoint.json"):
            first_value(checkpoints, 3)
    assert said == ["checkpoint 3 is damaged: checkpoint.json is missing; 2 is used instead"]
    assert kept(tmp_path / "run" / "c") == {1, 2, 3}


def test_if_all_are_damaged_nothing_is_moved_or_deleted(tmp_path: Path) -> None:
    save(tmp_path / "run" / "c", {1: 9.0, 2: 8.0})
    for step in "12":
        (tmp_path / "run" / "c" / step / "SHA256SUMS").write_text("")
    before = sorted((tmp_path / "run" / "c").rglob("*"))
    with (
        open_for_writing(tmp_path / "run" / "c", []) as checkpoints,
        pytest.raises(StorageError, match=r"every checkpoint of .*run is damaged: 2: .*; 1: "),
    ):
        checkpoints.latest_valid()
    assert sorted((tmp_path / "run" / "c").rglob("*")) == before


def test_a_bad_one_stays_beside_another_bad_one_of_that_step(tmp_path: Path) -> None:
    for _ in range(2):
        save(tmp_path / "c", {1: 9.0, 2: 8.0})
        (tmp_path / "c" / "2" / "SHA256SUMS").unlink()
        with open_for_writing(tmp_path / "c", []) as checkpoints:
            checkpoints.latest_valid()
        shutil.rmtree(tmp_path / "c" / "1")
    assert {path.name for path in (tmp_path / "c").iterdir()} == {"bad-2", "bad-2-2"}


def test_a_checkpoint_of_another_run_is_refused_field_by_field(tmp_path: Path) -> None:
    save(tmp_path / "c", {1: 9.0})
    with pytest.raises(
        StorageError, match=r"of another run: data 'f1a9' -> '0', model.d_model 2 -> 3, seed None"
    ):
        CheckpointManager(tmp_path / "c", {"model.d_model": 3, "data": "0", "seed": 7})


def test_a_field_younger_than_a_checkpoint_had_its_default(tmp_path: Path) -> None:
    save(tmp_path / "c", {1: 9.0})
    with CheckpointManager(tmp_path / "c", {**IDENTITY, "model.dropout": 0.1}) as checkpoints:
        assert checkpoints.latest_valid() == 1
    with pytest.raises(StorageError, match=r"of another run: model.dropout 0.1 -> 0.3$"):
        CheckpointManager(tmp_path / "c", {**IDENTITY, "model.dropout": 0.3})


def test_a_claim_to_be_huge_is_refused_before_there_is_room_made(tmp_path: Path) -> None:
    save(tmp_path / "c", {1: 9.0})
    huge = {"params": on_device({"x": jax.ShapeDtypeStruct((10**6, 10**6), jnp.float32)}, HERE)}
    with (
        CheckpointManager(tmp_path / "c", IDENTITY) as checkpoints,
        pytest.raises(StorageError, match="its params would take 3814697 MiB, and it has 0"),
    ):
        checkpoints.restore(1, huge)


def test_links_are_refused_and_nothing_outside_is_touched(tmp_path: Path) -> None:
    save(tmp_path / "c", {1: 9.0, 2: 8.0})
    outside = tmp_path / "outside"
    (tmp_path / "c" / "2" / "params").rename(outside)
    (tmp_path / "c" / "2" / "params").symlink_to(outside)
    before = sorted(outside.rglob("*"))
    said: list[str] = []
    with open_for_writing(tmp_path / "c", said) as checkpoints:
        assert checkpoints.latest_valid() == 1
    assert "params is no plain file" in said[0]
    assert sorted(outside.rglob("*")) == before


def test_the_one_before_goes_only_when_the_new_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there: list[set[str]] = []
    write = checksums.write

    def watched(folder: Path) -> None:
        there.append({path.name for path in (tmp_path / "c").iterdir()})
        write(folder)

    monkeypatch.setattr(checksums, "write", watched)
    save(tmp_path / "c", {1: 9.0, 2: 8.0, 3: 7.0}, keep=1)
    assert there == [{".1"}, {"1", ".2"}, {"2", ".3"}]
    assert kept(tmp_path / "c") == {3}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of one megabyte, where this user may mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting is for the superuser")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def incompressible(step: int) -> dict[str, Any]:
    return {"w": jax.random.bits(jax.random.key(step), (100_000,), jnp.uint32)}


def test_a_full_disk_is_told_leaves_the_last_one_whole_and_nothing_half_written(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = small_disk / "c"
    target = {"params": on_device(incompressible(0), HERE)}
    with open_for_writing(folder, []) as checkpoints:
        checkpoints.save(1, arrays(incompressible(1)), None, {})
        checkpoints.wait()
        (small_disk / "other").write_bytes(bytes(300_000))
        with pytest.raises(StorageError, match=r"no room for checkpoint 2: it takes 0 MiB"):
            checkpoints.prepare_save(2, arrays(incompressible(2)))
        # Whoever else fills the disk after we looked.
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 0, 1 << 40))
            checkpoints.prepare_save(2, arrays(incompressible(2)))
            checkpoints.save(2, arrays(incompressible(2)), None, {})
            with pytest.raises(StorageError, match="checkpoint 2 could not be written: ") as told:
                checkpoints.wait()
        assert "\n" not in str(told.value)
        # No library adds pages of its own.
        assert capfd.readouterr().err == ""
        assert {path.name for path in folder.iterdir()} == {"1"}
        assert jnp.array_equal(
            checkpoints.restore(1, target)["params"]["w"], incompressible(1)["w"]
        )
        (small_disk / "other").unlink()
        checkpoints.save(3, arrays(incompressible(3)), None, {})
    assert kept(folder) == {3}
    with open_for_writing(folder, []) as checkpoints:
        assert jnp.array_equal(
            checkpoints.restore(3, target)["params"]["w"], incompressible(3)["w"]
        )


def write_nothing_more(*_: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("where", ["manifest", "description"])
def test_a_disk_that_fills_at_the_last_moment_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    save(tmp_path / "c", {1: 9.0})
    with open_for_writing(tmp_path / "c", []) as checkpoints:
        with monkeypatch.context() as patch:
            if where == "manifest":
                patch.setattr(os, "fsync", write_nothing_more)
            else:
                patch.setattr(Path, "write_text", write_nothing_more)
            checkpoints.save(2, arrays(params_of(2)), None, {})
            with pytest.raises(StorageError, match="could not be written: No space left"):
                checkpoints.wait()
        assert kept(tmp_path / "c") == {1}
        checkpoints.save(2, arrays(params_of(2)), None, {})
        checkpoints.wait()
        assert first_value(checkpoints, 2) == 2.0


def test_leftovers_of_a_process_that_was_killed_are_swept_by_who_may_write(tmp_path: Path) -> None:
    save(tmp_path / "c", {1: 9.0})
    for name in (".2", ".2.orbax-checkpoint-tmp", ".old-0"):
        shutil.copytree(tmp_path / "c" / "1", tmp_path / "c" / name)
    with CheckpointManager(tmp_path / "c", IDENTITY) as checkpoints:
        assert checkpoints.latest_valid() == 1
    assert len(list((tmp_path / "c").iterdir())) == 4
    with open_for_writing(tmp_path / "c", []) as checkpoints:
        assert checkpoints.latest_valid() == 1
    assert kept(tmp_path / "c") == {1}


def test_a_checkpoint_says_in_plain_json_whose_it_is(tmp_path: Path) -> None:
    save(tmp_path / "c", {1: 8.0, 4: 9.0})
    told = json.loads((tmp_path / "c" / "4" / "checkpoint.json").read_text())
    assert told == {
        "step": 4,
        "perplexity": 9.0,
        "after": 1,
        "notes": {},
        "run": IDENTITY,
    }
