import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from transformer_jax.runs.atomic_files import write_json, write_text


def test_a_full_disk_leaves_the_old_content_and_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_json(path, {"größe": 1})
    assert json.loads(path.read_text("utf-8")) == {"größe": 1}

    def no_space(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space left on device"):
        write_text(path, "new")
    assert json.loads(path.read_text("utf-8")) == {"größe": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_writers_of_one_file_do_not_interfere(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with ThreadPoolExecutor(4) as writers:
        # Calling `list` raises the first exception that occurs in a writer.
        list(writers.map(lambda number: write_json(path, [number] * 100), range(100)))
    [number] = set(json.loads(path.read_text("utf-8")))
    assert number in range(100)
    assert list(tmp_path.iterdir()) == [path]


def test_the_contents_and_then_the_name_are_synced_to_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = list[int]()
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.fstat(handle).st_ino))
    write_text(tmp_path / "file", "new")
    assert synced == [(tmp_path / "file").stat().st_ino, tmp_path.stat().st_ino]
