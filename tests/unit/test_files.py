import itertools
import math
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import pytest

from transformer_jax.errors import StorageError, UsageError
from transformer_jax.files import (
    DIGEST,
    MAX_JSON_BYTES,
    check_available,
    exclusive,
    is_file,
    lock_folder,
    new_folder,
    read_json,
    read_json_if_valid,
    read_limited,
    write_bytes,
    write_json,
    write_text,
)
from transformer_jax.progress import Note


def test_a_full_disk_leaves_the_old_content_and_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_json(path, {"größe": 1})
    assert read_json(path) == {"größe": 1}

    def no_space(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space left on device"):
        write_text(path, "new")
    assert read_json(path) == {"größe": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_writers_of_one_file_do_not_interfere(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with ThreadPoolExecutor(4) as writers:
        # Calling `list` raises the first exception that occurs in a writer.
        list(writers.map(lambda number: write_json(path, {"numbers": [number] * 100}), range(100)))
    [number] = set(read_json(path)["numbers"])
    assert number in range(100)
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_with_the_longest_possible_name_is_written(tmp_path: Path) -> None:
    for name in ("x" * 255, "ü" * 127, "\U0001f600" * 63):
        write_text(tmp_path / name, name)
        assert (tmp_path / name).read_text("utf-8") == name


def test_the_contents_and_then_the_name_are_synced_to_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = list[int]()
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.fstat(handle).st_ino))
    write_text(tmp_path / "file", "new")
    assert synced == [(tmp_path / "file").stat().st_ino, tmp_path.stat().st_ino]


def test_a_file_that_does_not_need_to_be_durable_is_not_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "fsync")
    write_bytes(tmp_path / "file", b"new", durable=False)
    assert (tmp_path / "file").read_bytes() == b"new"


def test_a_file_at_the_limit_is_read_and_a_longer_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * (1 << 20))
    assert len(read_limited(path, 1 << 20)) == 1 << 20
    path.write_bytes(b"x" * ((1 << 20) + 1))
    with pytest.raises(StorageError, match="more than 1 MiB"):
        read_limited(path, 1 << 20)


def test_a_json_file_that_cannot_be_used_is_an_empty_object(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    assert read_json_if_valid(path) == {}
    for content in (b"[1]", b"{", b"\xff", b"[" * 100_000, b" " * MAX_JSON_BYTES + b"{}"):
        path.write_bytes(content)
        with pytest.warns(Note, match=r"file\.json .*; the file is ignored"):
            assert read_json_if_valid(path) == {}
    path.write_bytes(b'{"a": 1}')
    assert read_json_if_valid(path) == {"a": 1}


def test_no_flipped_bit_or_swapped_lines_change_what_a_json_file_says(tmp_path: Path) -> None:
    path, content = tmp_path / "file.json", {"a": {"b": "ü", "c": (1, 2.5, math.inf)}, "d": None}
    write_json(path, content)
    written, read = path.read_bytes(), read_json(path)
    assert read == {"a": {"b": "ü", "c": [1, 2.5, math.inf]}, "d": None}
    lines = written.splitlines(keepends=True)
    damaged = [
        written[:i] + bytes([written[i] ^ 1 << bit]) + written[i + 1 :]
        for i in range(len(written))
        for bit in range(8)
    ]
    for i, j in itertools.combinations(range(len(lines)), 2):
        swapped = list(lines)
        swapped[i], swapped[j] = lines[j], lines[i]
        damaged.append(b"".join(swapped))
    noticed = 0
    for content in damaged:
        path.write_bytes(content)
        try:
            # A flipped bit in whitespace or in the digest's name does not matter.
            assert {k: x for k, x in read_json(path).items() if k in "ad"} == read
        except StorageError:
            noticed += 1
    assert noticed > 0.8 * len(damaged)


def test_a_json_file_without_its_digest_can_be_edited(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    write_json(path, {"seed": 1})
    path.write_text(path.read_text().replace('"seed": 1', '"seed": 2'))
    with pytest.raises(StorageError, match=f"restore the file, or delete the line '{DIGEST}'"):
        read_json(path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join(line for line in lines if DIGEST not in line))
    assert read_json(path) == {"seed": 2}


def test_reading_a_pipe_fails_instead_of_waiting_for_a_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StorageError, match="is not a regular file"):
        read_limited(tmp_path / "pipe")
    with pytest.raises(StorageError, match="is not a regular file"):
        read_json(tmp_path / "pipe")


def test_a_path_that_cannot_be_checked_is_not_taken_for_a_missing_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert is_file(tmp_path / "file")
    for missing in ("none", "file/none", "x" * 300, "a\0b", "."):
        assert not is_file(tmp_path / missing)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(StorageError, match=r"loop cannot be read: Too many levels"):
        is_file(tmp_path / "loop")


def test_only_one_holder_at_a_time_has_a_lock(tmp_path: Path) -> None:
    events: SimpleQueue[str] = SimpleQueue()

    def hold_second() -> None:
        with exclusive(tmp_path / "lock", lambda: events.put("waiting")):
            events.put("second")

    with ThreadPoolExecutor(1) as pool:
        with exclusive(tmp_path / "lock", lambda: events.put("never")):
            second = pool.submit(hold_second)
            assert events.get(timeout=60) == "waiting"
            events.put("first")
        second.result(timeout=60)
    assert [events.get_nowait() for _ in range(events.qsize())] == ["first", "second"]


def test_a_new_folder_appears_only_once_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "folder"
    with pytest.raises(ZeroDivisionError), new_folder(path) as private:
        assert (private / "file").write_text("1") / 0
    assert list(path.parent.iterdir()) == []
    with new_folder(path) as private:
        (private / "file").write_text("1")
        assert not path.exists()
    assert [x.name for x in path.parent.rglob("*")] == ["folder", "file"]


def test_a_link_to_an_empty_folder_can_be_replaced_but_the_working_directory_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, link = tmp_path / "folder", tmp_path / "link"
    folder.mkdir()
    link.symlink_to(folder)
    with new_folder(link) as private:
        (private / "file").write_text("1")
    assert (folder / "file").read_text() == "1"
    assert {x.name for x in tmp_path.iterdir()} == {"folder", "link"}
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    for path in (Path(), Path("../empty")):
        with pytest.raises(UsageError, match="already exists: choose another"):
            check_available(path)


def test_a_folder_that_another_process_creates_meanwhile_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    path.mkdir()
    with pytest.raises(UsageError, match="already exists: choose another"), new_folder(path):
        write_text(path / "file", "other")
    assert (path / "file").read_text() == "other"


def test_a_folder_that_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    abandoned, other, fresh, locked = (
        tmp_path / f".run-{name}" for name in ("aaaaaaaa", "bbbbbbbb", "cccccccc", "dddddddd")
    )
    for folder in (abandoned, other, fresh, locked):
        (folder / "new").mkdir(parents=True)
        (folder / "new" / "file").touch()
        if folder != fresh:
            os.utime(folder, (0, 0))
    (other / "mine").touch()
    os.utime(other, (0, 0))
    with lock_folder(locked) as is_free, lock_folder(locked) as is_free_again:
        assert is_free
        assert not is_free_again
        with new_folder(tmp_path / "run"):
            pass
    assert {path.name for path in tmp_path.iterdir()} == {
        "run",
        other.name,
        fresh.name,
        locked.name,
    }
