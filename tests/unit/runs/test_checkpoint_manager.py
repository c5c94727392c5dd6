import os
import random
import shutil
import subprocess
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from run_files import (
    IDENTITY,
    first_value,
    open_writable,
    params_of,
    steps_on_disk,
    target_like,
    with_optimizer,
    write_steps,
)

from transformer_jax.errors import StorageError, UsageError
from transformer_jax.progress import Note
from transformer_jax.runs import array_store, checkpoint_manager, checkpoint_metadata, checksums
from transformer_jax.runs.checkpoint_averaging import select_steps
from transformer_jax.runs.checkpoint_manager import CheckpointManager
from transformer_jax.runs.checkpoint_metadata import DevScores


def test_a_checkpoint_is_restored_bit_for_bit(tmp_path: Path) -> None:
    saved = {"w": jax.random.normal(jax.random.key(0), (64, 3)), "i": jnp.int32(7)}
    with CheckpointManager(tmp_path / "c", IDENTITY, keep=1) as checkpoints:
        checkpoints.save(5, with_optimizer(saved), 1.5, {"pending_metrics": [[0.1, 2.0]]})
    with CheckpointManager(tmp_path / "c", IDENTITY) as checkpoints:
        assert checkpoints.latest_valid() == 5
        assert checkpoints.metadata(5) == {"pending_metrics": [[0.1, 2.0]]}
        restored = checkpoints.restore(5, target_like(saved))
    # The restore target contains only parameters, so the optimizer state is not read.
    assert set(restored) == {"params"}
    jax.tree.map(np.testing.assert_array_equal, restored["params"], saved)


def test_a_run_whose_path_is_not_utf_8_has_to_be_renamed(tmp_path: Path) -> None:
    write_steps(tmp_path / "run" / "checkpoints", {1: 2.0})
    renamed = (tmp_path / "run").rename(tmp_path / os.fsdecode(b"run-\xff"))
    for keep in (None, 1):
        with pytest.raises(UsageError, match=r"run-\udcff is not UTF-8: rename the folder$"):
            CheckpointManager(renamed / "checkpoints", IDENTITY, keep=keep)


def test_arrays_may_be_donated_as_soon_as_save_returns(tmp_path: Path) -> None:
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jnp.zeros(1_000_000)
    with CheckpointManager(tmp_path / "c", IDENTITY, keep=1) as checkpoints:
        checkpoints.save(1, with_optimizer({"x": x}), None, {})
        for _ in range(20):
            x = add(x)
        restored = checkpoints.restore(1, target_like({"x": x}))
    assert float(jnp.abs(restored["params"]["x"]).max()) == 0


@pytest.mark.parametrize("end", ["record_score", "wait"])
def test_arrays_that_await_a_score_may_be_donated_once_it_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    x, evaluated = jnp.zeros(1_000_000), threading.Event()

    def save_after_evaluation(*arguments: Any) -> Any:
        evaluated.wait(30)
        return save_async(*arguments)

    save_async = array_store.save_async
    monkeypatch.setattr(array_store, "save_async", save_after_evaluation)
    with CheckpointManager(tmp_path / "c", IDENTITY, keep=1) as checkpoints:
        checkpoints.save(1, with_optimizer({"x": x}), None, {}, awaits_score=True)
        # The caller can evaluate the arrays while they are copied.
        assert float(x.sum()) == 0
        evaluated.set()
        if end == "record_score":
            checkpoints.record_score(1, DevScores(2.0, 1.0), {})
        else:
            checkpoints.wait()
        for _ in range(20):
            x = add(x)
        restored = checkpoints.restore(1, target_like({"x": x}))
    assert float(jnp.abs(restored["params"]["x"]).max()) == 0


def test_a_copy_that_fails_during_an_evaluation_is_reported_when_the_score_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(array_store, "save_async", no_space)
    with open_writable(tmp_path / "c") as checkpoints:
        checkpoints.save(1, with_optimizer(params_of(1)), None, {}, awaits_score=True)
        with pytest.raises(StorageError, match=r"checkpoint 1 could not be written: .*No space"):
            checkpoints.record_score(1, DevScores(2.0, 1.0), {})
        assert checkpoints.steps == []


def test_the_latest_the_best_and_the_last_scheduled_checkpoints_are_kept(tmp_path: Path) -> None:
    write_steps(tmp_path / "c", {1: 2.0, 2: 9.0, 3: 8.0, 4: 7.0, 5: None, 6: 6.0, 7: None}, keep=2)
    # Checkpoint 1 has the lowest perplexity, checkpoints 4 and 6 are the last two scheduled ones,
    # and checkpoint 7 is the latest.
    assert steps_on_disk(tmp_path / "c") == {1, 4, 6, 7}


def test_the_metric_selects_the_best_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    with CheckpointManager(folder, IDENTITY, keep=1, metric="smoothed_loss") as checkpoints:
        # The losses of checkpoints 2 and 3 are equal when rounded, so the first is the best.
        for step, (perplexity, loss) in enumerate(
            [(2.0, 1.5), (4.0, 1.20001), (3.0, 1.2), (5.0, 1.3)], start=1
        ):
            arrays = with_optimizer(params_of(step))
            checkpoints.prepare_save(step, arrays)
            checkpoints.save(step, arrays, perplexity, {}, loss)
        assert checkpoints.scores == {2: 1.731, 4: 1.876}
        assert checkpoints.perplexities == {2: 4.0, 4: 5.0}
    assert steps_on_disk(folder) == {2, 4}
    # A checkpoint without the metric keeps its perplexity, but it cannot be the best.
    with CheckpointManager(folder, IDENTITY, keep=1, metric="smoothed_loss") as checkpoints:
        checkpoints.prepare_save(5, with_optimizer(params_of(5)))
        checkpoints.save(5, with_optimizer(params_of(5)), 1.0, {})
        assert checkpoints.scores == {2: 1.731}
    assert steps_on_disk(folder) == {2, 5}


def test_no_checkpoint_is_deleted_until_the_score_is_recorded(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    write_steps(folder, {1: 5.0, 2: 9.0, 3: None}, keep=1)
    with CheckpointManager(folder, IDENTITY, keep=1) as checkpoints:
        checkpoints.save(4, with_optimizer(params_of(4)), None, {"a": 1}, awaits_score=True)
        checkpoints.wait()
        assert steps_on_disk(folder) == {1, 2, 3, 4}
        with CheckpointManager(folder, IDENTITY) as reader:
            assert reader.latest_valid() == 4
            assert list(reader.perplexities) == [1, 2]
        checkpoints.record_score(4, DevScores(7.0, 1.5), {"b": 2})
    assert steps_on_disk(folder) == {1, 4}
    with CheckpointManager(folder, IDENTITY) as reader:
        assert reader.latest_valid() == 4
        assert reader.perplexities == {1: 5.0, 4: 7.0}
        assert reader.metadata(4) == {"b": 2}
        assert first_value(reader, 4) == 4


def test_a_discarded_checkpoint_leaves_the_previous_one(tmp_path: Path) -> None:
    write_steps(tmp_path / "c", {1: 5.0})
    with CheckpointManager(tmp_path / "c", IDENTITY, keep=1) as checkpoints:
        checkpoints.save(2, with_optimizer(params_of(2)), None, {}, awaits_score=True)
        checkpoints.discard(2)
        assert checkpoints.latest_valid() == 1
    assert steps_on_disk(tmp_path / "c") == {1}


def test_a_score_that_cannot_be_recorded_is_an_error(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "c", IDENTITY, keep=1) as checkpoints:
        checkpoints.save(1, with_optimizer(params_of(1)), None, {}, awaits_score=True)
        checkpoints.wait()
        shutil.rmtree(tmp_path / "c" / "1")
        checkpoints.record_score(1, None, {})
        with pytest.raises(StorageError, match="score of checkpoint 1 could not be recorded: "):
            checkpoints.wait()


def test_a_user_may_delete_an_old_checkpoint_during_training(tmp_path: Path) -> None:
    write_steps(tmp_path / "c", {1: 9.0, 2: 8.0}, keep=2)
    with CheckpointManager(tmp_path / "c", IDENTITY, keep=2) as checkpoints:
        shutil.rmtree(tmp_path / "c" / "1")
        checkpoints.save(3, with_optimizer(params_of(3)), 7.0, {})
    assert steps_on_disk(tmp_path / "c") == {2, 3}


def test_a_checkpoint_that_training_deletes_during_a_check_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "c"
    write_steps(folder, {1: 9.0, 2: 8.0, 3: 7.0})
    check, read = checksums.check, checkpoint_metadata.CheckpointMetadata.read

    def delete_and(action: Callable[..., Any]) -> Callable[..., Any]:
        def delete_first(checkpoint: Path, *arguments: Any) -> Any:
            if checkpoint.name == "3":
                shutil.rmtree(checkpoint)
            return action(checkpoint, *arguments)

        return delete_first

    with CheckpointManager(folder, IDENTITY) as checkpoints:
        monkeypatch.setattr(checksums, "check", delete_and(check))
        with pytest.raises(StorageError, match=r"checkpoint 3 of .* has been deleted"):
            checkpoints.latest_valid()
    monkeypatch.undo()
    write_steps(folder, {3: 7.0})
    monkeypatch.setattr(checkpoint_metadata.CheckpointMetadata, "read", delete_and(read))
    with (
        warnings.catch_warnings(action="error"),
        CheckpointManager(folder, IDENTITY) as checkpoints,
    ):
        assert select_steps(checkpoints, 2) == [1, 2]


def test_a_run_without_checkpoints_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no checkpoint yet"):
        CheckpointManager(tmp_path / "run" / "checkpoints", IDENTITY)


def test_reading_a_checkpoint_changes_no_file(tmp_path: Path) -> None:
    write_steps(tmp_path / "c", {1: 9.0, 2: 8.0})
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "c").rglob("*")}
    with CheckpointManager(tmp_path / "c", IDENTITY) as checkpoints:
        checkpoints.restore(2, target_like(params_of(0)))
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "c").rglob("*")} == before


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
    contents = {path: path.read_bytes() for path in files}
    one, other = rng.choice([(a, b) for a in files for b in files if contents[a] != contents[b]])
    one.write_bytes(contents[other])
    other.write_bytes(contents[one])


def add(rng: random.Random, files: list[Path]) -> None:
    (rng.choice(files).parent / "one_more").write_bytes(rng.randbytes(9))


def replace_by_step_1(_rng: random.Random, files: list[Path]) -> None:
    """Copy checkpoint 1 over checkpoint 2. The digests match, but the step does not."""
    folder = next(path.parent for path in files if path.name == "SHA256SUMS")
    shutil.rmtree(folder)
    shutil.copytree(folder.with_name("1"), folder)


DAMAGES = [flip, truncate, delete, zero, swap, add, replace_by_step_1]


@pytest.mark.parametrize("count", [len(DAMAGES), pytest.param(100, marks=pytest.mark.exhaustive)])
@pytest.mark.trials("a damaged checkpoint", "count")
def test_any_damage_is_detected_and_the_previous_checkpoint_is_used(
    tmp_path: Path, count: int
) -> None:
    write_steps(tmp_path / "intact", {1: 9.0, 2: 8.0})
    rng = random.Random(count)
    for number in range(count):
        copy = tmp_path / "copy"
        shutil.copytree(tmp_path / "intact", copy)
        files = sorted(path for path in (copy / "2").rglob("*") if path.is_file())
        DAMAGES[number % len(DAMAGES)](rng, files)
        note = (
            r"^checkpoint 2 is damaged and was renamed to bad-2: .*; checkpoint 1 is used instead$"
        )
        with open_writable(copy) as checkpoints:
            with pytest.warns(Note, match=note):
                assert checkpoints.latest_valid() == 1, f"damage {number}"
            assert first_value(checkpoints, 1) == 1.0
        assert {path.name for path in copy.iterdir()} == {"1", "bad-2"}
        shutil.rmtree(copy)


def test_a_reader_uses_the_previous_checkpoint_and_renames_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "c"
    write_steps(folder, {1: 9.0, 2: 8.0, 3: None})
    (folder / "3" / "checkpoint.json").unlink()
    with CheckpointManager(folder, IDENTITY) as checkpoints:
        note = "^checkpoint 3 is damaged: checkpoint.json is missing; checkpoint 2 is used instead$"
        with pytest.warns(Note, match=note):
            assert select_steps(checkpoints) == [2]
        # If the caller requests a specific step, the manager must not substitute another
        # checkpoint.
        with pytest.raises(StorageError, match=r"checkpoint 3 of .* is damaged: checkpoint.json"):
            first_value(checkpoints, 3)
        with pytest.raises(StorageError, match=r"checkpoint 3 of .* is damaged: checkpoint.json"):
            checkpoints.metadata(3)
    assert steps_on_disk(folder) == {1, 2, 3}


def test_if_all_checkpoints_are_damaged_none_is_renamed_or_deleted(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "c"
    write_steps(folder, {1: 9.0, 2: 8.0})
    for step in "12":
        (folder / step / "SHA256SUMS").write_text("")
    before = sorted(folder.rglob("*"))
    with (
        open_writable(folder) as checkpoints,
        pytest.raises(StorageError, match=r"every checkpoint of .*run is damaged: 2: .*; 1: "),
    ):
        checkpoints.latest_valid()
    assert sorted(folder.rglob("*")) == before


def test_a_step_can_have_several_damaged_checkpoints(tmp_path: Path) -> None:
    for _ in range(2):
        write_steps(tmp_path / "c", {1: 9.0, 2: 8.0})
        (tmp_path / "c" / "2" / "SHA256SUMS").unlink()
        with open_writable(tmp_path / "c") as checkpoints:
            checkpoints.latest_valid()
        shutil.rmtree(tmp_path / "c" / "1")
    assert {path.name for path in (tmp_path / "c").iterdir()} == {"bad-2", "bad-2-2"}


def test_links_are_rejected_and_their_targets_stay_unchanged(tmp_path: Path) -> None:
    write_steps(tmp_path / "c", {1: 9.0, 2: 8.0})
    outside = tmp_path / "outside"
    (tmp_path / "c" / "2" / "params").rename(outside)
    (tmp_path / "c" / "2" / "params").symlink_to(outside)
    before = sorted(outside.rglob("*"))
    with (
        pytest.warns(Note, match="params is not a regular file"),
        open_writable(tmp_path / "c") as checkpoints,
    ):
        assert checkpoints.latest_valid() == 1
    assert sorted(outside.rglob("*")) == before


def test_the_previous_checkpoint_stays_until_the_next_one_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[set[str]] = []
    write = checksums.write

    def record_and_write(folder: Path) -> None:
        names.append({path.name for path in (tmp_path / "c").iterdir()})
        write(folder)

    monkeypatch.setattr(checksums, "write", record_and_write)
    write_steps(tmp_path / "c", {1: 9.0, 2: 8.0, 3: 7.0}, keep=1)
    assert names == [{".1"}, {"1", ".2"}, {"2", ".3"}]
    assert steps_on_disk(tmp_path / "c") == {3}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A one-megabyte file system. Tests are skipped if they lack permission to mount a file
    system."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a file system")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def incompressible(step: int) -> dict[str, Any]:
    return {"w": jax.random.bits(jax.random.key(step), (100_000,), jnp.uint32)}


def test_a_full_disk_leaves_the_last_checkpoint_intact_and_nothing_partial(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = small_disk / "c"
    target = target_like(incompressible(0))

    def restored(checkpoints: CheckpointManager, step: int) -> bool:
        w = checkpoints.restore(step, target)["params"]["w"]
        return bool(jnp.array_equal(w, incompressible(step)["w"]))

    with open_writable(folder) as checkpoints:
        checkpoints.save(1, with_optimizer(incompressible(1)), None, {})
        checkpoints.wait()
        (small_disk / "other").write_bytes(bytes(300_000))
        with pytest.raises(StorageError, match=r"no room for checkpoint 2: it needs 0 MiB"):
            checkpoints.prepare_save(2, with_optimizer(incompressible(2)))
        # Simulate another program that fills the disk after the check for free space.
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 0, 1 << 40))
            checkpoints.prepare_save(2, with_optimizer(incompressible(2)))
            checkpoints.save(2, with_optimizer(incompressible(2)), None, {})
            with pytest.raises(StorageError, match="checkpoint 2 could not be written: ") as caught:
                checkpoints.wait()
        assert "\n" not in str(caught.value)
        # Orbax must not log the error a second time.
        assert capfd.readouterr().err == ""
        assert {path.name for path in folder.iterdir()} == {"1"}
        assert restored(checkpoints, 1)
        (small_disk / "other").unlink()
        checkpoints.save(3, with_optimizer(incompressible(3)), None, {})
    assert steps_on_disk(folder) == {3}
    with open_writable(folder) as checkpoints:
        assert restored(checkpoints, 3)


def no_space(*_: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("file", ["SHA256SUMS", "checkpoint.json"])
def test_a_disk_that_fills_at_the_last_file_leaves_nothing_partial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    write_steps(tmp_path / "c", {1: 9.0})
    with open_writable(tmp_path / "c") as checkpoints:
        with monkeypatch.context() as patch:
            if file == "SHA256SUMS":
                patch.setattr(checksums, "write_text", no_space)
            else:
                patch.setattr(checkpoint_manager, "write_text", no_space)
            checkpoints.save(2, with_optimizer(params_of(2)), None, {})
            with pytest.raises(StorageError, match="could not be written: No space left"):
                checkpoints.wait()
        assert steps_on_disk(tmp_path / "c") == {1}
        checkpoints.save(2, with_optimizer(params_of(2)), None, {})
        checkpoints.wait()
        assert first_value(checkpoints, 2) == 2.0


def test_a_writer_removes_the_partial_files_of_a_killed_process(tmp_path: Path) -> None:
    write_steps(tmp_path / "c", {1: 9.0})
    for name in (".2", ".2.orbax-checkpoint-tmp", ".old-0"):
        shutil.copytree(tmp_path / "c" / "1", tmp_path / "c" / name)
    with CheckpointManager(tmp_path / "c", IDENTITY) as checkpoints:
        assert checkpoints.latest_valid() == 1
    assert len(list((tmp_path / "c").iterdir())) == 4
    with open_writable(tmp_path / "c") as checkpoints:
        assert checkpoints.latest_valid() == 1
    assert steps_on_disk(tmp_path / "c") == {1}
