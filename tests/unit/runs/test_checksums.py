import os
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from transformer_jax.files import MAX_JSON_BYTES
from transformer_jax.runs import checksums
from transformer_jax.runs.checksums import CorruptionError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = random.Random(0)
    for name, size in {"a": 1000, "b/c": 50, "b/d.json": 300, "b/e/f": 0, "g": 1000}.items():
        path = tmp_path / "step" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(rng.randbytes(size))
    checksums.write(tmp_path / "step")
    return tmp_path / "step"


def test_an_unchanged_folder_passes_and_sha256sum_agrees(folder: Path) -> None:
    checksums.check(folder)
    assert checksums.read(folder, "b/d.json") == (folder / "b/d.json").read_bytes()
    command = ["sha256sum", "--check", "--strict", checksums.NAME]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    assert result.stdout.count(": OK") == 5


def test_a_folder_is_intact_at_every_moment_of_a_replacement(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    intact = [0]
    rename = Path.replace

    def check_and_rename(path: Path, target: Path) -> Path:
        checksums.check(folder)
        intact[0] += 1
        return rename(path, target)

    monkeypatch.setattr(Path, "replace", check_and_rename)
    checksums.replace(folder, "b/d.json", "new")
    assert intact[0] >= 3
    assert checksums.read(folder, "b/d.json") == b"new"
    command = ["sha256sum", "--check", "--strict", checksums.NAME]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    assert result.stdout.count(": OK") == 5


@pytest.mark.parametrize("last", [2, 3])
def test_an_interrupted_replacement_can_be_finished(
    folder: Path, monkeypatch: pytest.MonkeyPatch, last: int
) -> None:
    before = (folder / "a").read_bytes()
    overwrite, calls = checksums._overwrite, iter(range(1, 10))

    def overwrite_or_fail(*arguments: Any) -> None:
        if next(calls) == last:
            raise KeyboardInterrupt
        overwrite(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(checksums, "_overwrite", overwrite_or_fail)
        with pytest.raises(KeyboardInterrupt):
            checksums.replace(folder, "a", "new")
    checksums.finish_replacement(folder)
    checksums.check(folder)
    assert (folder / checksums.NAME).read_text().count("  a\n") == 1
    assert (folder / "a").read_bytes() == (b"new" if last == 3 else before)
    (folder / "a").write_bytes(before if last == 3 else b"new")
    with pytest.raises(CorruptionError, match="a differs"):
        checksums.check(folder)


def test_a_reader_that_overlaps_with_a_replacement_reads_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = checksums._files
    replaced = iter([lambda: checksums.replace(folder, "a", "new")])

    def list_after_replacement(path: Path, *prefix: str) -> Any:
        # The reader has already read the digests.
        for replace in replaced:
            replace()
        return files(path, *prefix)

    monkeypatch.setattr(checksums, "_files", list_after_replacement)
    checksums.check(folder)


def flip(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def append(path: Path, line: str) -> None:
    path.write_text(path.read_text(encoding="utf-8") + line, encoding="utf-8")


def swap(folder: Path) -> None:
    (folder / "a").rename(folder / "x")
    (folder / "g").rename(folder / "a")
    (folder / "x").rename(folder / "g")


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda f: os.truncate(f / "a", 999), "a differs from what was written"),
    "emptied": (lambda f: (f / "b/c").write_bytes(b""), "b/c differs from what was written"),
    "zeros": (lambda f: (f / "b/c").write_bytes(bytes(50)), "b/c differs from what was written"),
    "deleted": (lambda f: (f / "b/e/f").unlink(), "b/e/f is missing"),
    "folder deleted": (lambda f: shutil.rmtree(f / "b"), "b/c is missing"),
    "two files swapped": (swap, "a differs from what was written"),
    "an additional file": (lambda f: (f / "b/z").touch(), "b/z is not listed"),
    "an additional link": (
        lambda f: (f / "z").symlink_to("/etc/passwd"),
        "z is not a regular file",
    ),
    "a file replaced by a link": (
        lambda f: ((f / "a").rename(f.parent / "a"), (f / "a").symlink_to(f.parent / "a")),
        "a is not a regular file",
    ),
    "a pipe": (lambda f: os.mkfifo(f / "z"), "z is not a regular file"),
    "a name outside the folder": (
        lambda f: append(f / checksums.NAME, f"{'0' * 64}  ../../etc/passwd\n"),
        "../../etc/passwd is missing",
    ),
    "an absolute name": (
        lambda f: append(f / checksums.NAME, f"{'0' * 64}  /etc/passwd\n"),
        "/etc/passwd is missing",
    ),
    "list deleted": (lambda f: (f / checksums.NAME).unlink(), "SHA256SUMS is missing"),
    "list emptied": (lambda f: (f / checksums.NAME).write_bytes(b""), "a is not listed"),
    "list truncated": (lambda f: os.truncate(f / checksums.NAME, 100), "SHA256SUMS differs"),
    "a huge list": (
        lambda f: os.truncate(f / checksums.NAME, MAX_JSON_BYTES + 1),
        "SHA256SUMS is too long",
    ),
}


STRAYS = (
    *(".DS_Store", "._c", "Thumbs.db", "desktop.ini", ".nfs00af", "c~", ".c.swp", "#c#", "~$c"),
    *("c (conflicted copy 2026-01-01)", "c (1)", "c.sync-conflict-20260101", "c.orig"),
    *("c.crdownload", "c.part", "c copy", "c copy 2.json"),
)
STRAY_FOLDERS = (".ipynb_checkpoints", "__pycache__", "lost+found", "@eaDir", ".Trash-1000")


def leave_strays(folder: Path) -> None:
    """Add files that operating systems, editors, and other tools leave in folders."""
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        path.with_name(f"{path.stem}-LAPTOP{path.suffix}").write_bytes(b"\0stray")
    for parent in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        for name in STRAYS:
            (parent / name).write_bytes(b"\0stray")
        for name in STRAY_FOLDERS:
            (parent / name).mkdir()
            (parent / name / "c").write_bytes(b"\0stray")


def test_what_other_programs_leave_behind_is_not_damage(folder: Path) -> None:
    written = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
    with checksums.listed_files(folder) as clean:
        assert clean == folder
    leave_strays(folder / "b")
    checksums.check(folder)
    with checksums.listed_files(folder) as clean:
        assert clean.name == folder.name
        paths = [path for path in clean.rglob("*") if path.is_file()]
        assert {path.relative_to(clean) for path in paths} == written - {Path(checksums.NAME)}
        assert (clean / "a").read_bytes() == (folder / "a").read_bytes()
    assert not clean.exists()


def test_what_other_programs_leave_behind_is_not_listed(folder: Path) -> None:
    before = (folder / checksums.NAME).read_text()
    (folder / ".DS_Store").touch()
    (folder / ".ipynb_checkpoints").mkdir()
    (folder / ".ipynb_checkpoints" / "a-checkpoint").touch()
    (folder / checksums.NAME).unlink()
    checksums.write(folder)
    assert (folder / checksums.NAME).read_text() == before


def test_windows_line_endings_are_named_as_the_damage(folder: Path) -> None:
    for name in (checksums.NAME, "b/d.json"):
        text = (folder / name).read_bytes()
        assert b"\n" in text
        (folder / name).write_bytes(text.replace(b"\n", b"\r\n"))
    with pytest.raises(
        CorruptionError, match=r"b/d.json has different line endings: clone .* `-c core"
    ):
        checksums.check(folder)


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_detected_and_its_file_is_named(folder: Path, name: str) -> None:
    damage, message = DAMAGES[name]
    damage(folder)
    with pytest.raises(CorruptionError) as caught:
        checksums.check(folder)
    assert str(caught.value).startswith(message)


def test_a_flipped_bit_is_detected_in_any_file_and_in_the_list(folder: Path) -> None:
    rng = random.Random(0)
    for name in ["a", "b/c", "b/d.json", checksums.NAME] * 50:
        before = (folder / name).read_bytes()
        flip(folder / name, rng)
        with pytest.raises(CorruptionError):
            checksums.check(folder)
        (folder / name).write_bytes(before)
    checksums.check(folder)


def test_a_folder_that_is_a_link_is_rejected(folder: Path) -> None:
    link = folder.with_name("link")
    link.symlink_to(folder)
    with pytest.raises(CorruptionError, match="link is a link"):
        checksums.check(link)
    with pytest.raises(CorruptionError, match="link is a link"):
        checksums.read(link, "a")


def test_a_single_file_is_read_only_if_its_digest_matches(folder: Path) -> None:
    flip(folder / "b/d.json", random.Random(0))
    assert checksums.read(folder, "b/c")
    with pytest.raises(CorruptionError, match=r"b/d.json differs from what was written"):
        checksums.read(folder, "b/d.json")
    with pytest.raises(CorruptionError, match="missing"):
        checksums.read(folder, "../step/a")
    # The file is sparse: it takes up no disk space, but reading it would require 30 GiB of memory.
    os.truncate(folder / "b/d.json", 30 << 30)
    with pytest.raises(CorruptionError, match=r"b/d.json is too long"):
        checksums.read(folder, "b/d.json")
