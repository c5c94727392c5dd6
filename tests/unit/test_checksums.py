"""A list of files with their SHA-256: whatever is changed is noticed, and named."""

import os
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

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


def test_what_was_written_is_whole_and_other_programs_agree(folder: Path) -> None:
    checksums.check(folder)
    assert checksums.read(folder, "b/d.json") == (folder / "b/d.json").read_bytes()
    command = ["sha256sum", "--check", "--strict", checksums.NAME]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    assert done.stdout.count(": OK") == 5


def flip(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def append(path: Path, line: str) -> None:
    path.write_text(path.read_text() + line)


def swap(folder: Path) -> None:
    (folder / "a").rename(folder / "x")
    (folder / "g").rename(folder / "a")
    (folder / "x").rename(folder / "g")


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda f: os.truncate(f / "a", 999), "a is not what was written"),
    "emptied": (lambda f: (f / "b/c").write_bytes(b""), "b/c is not what was written"),
    "zeros": (lambda f: (f / "b/c").write_bytes(bytes(50)), "b/c is not what was written"),
    "deleted": (lambda f: (f / "b/e/f").unlink(), "b/e/f is missing"),
    "a folder deleted": (lambda f: shutil.rmtree(f / "b"), "b/c is missing"),
    "two swapped": (swap, "a is not what was written"),
    "one more": (lambda f: (f / "b/z").touch(), "b/z is not in its list"),
    "a link": (lambda f: (f / "z").symlink_to("/etc/passwd"), "z is no plain file"),
    "a file made a link": (
        lambda f: ((f / "a").rename(f.parent / "a"), (f / "a").symlink_to(f.parent / "a")),
        "a is no plain file",
    ),
    "a pipe": (lambda f: os.mkfifo(f / "z"), "z is no plain file"),
    "a name outside": (
        lambda f: append(f / checksums.NAME, f"{'0' * 64}  ../../etc/passwd\n"),
        "../../etc/passwd is missing",
    ),
    "an absolute name": (
        lambda f: append(f / checksums.NAME, f"{'0' * 64}  /etc/passwd\n"),
        "/etc/passwd is missing",
    ),
    "no list": (lambda f: (f / checksums.NAME).unlink(), "SHA256SUMS is missing"),
    "an empty list": (lambda f: (f / checksums.NAME).write_bytes(b""), "a is not in its list"),
    "a list cut off": (lambda f: os.truncate(f / checksums.NAME, 100), "SHA256SUMS is not what"),
    "a huge list": (
        lambda f: os.truncate(f / checksums.NAME, checksums.MAX_BYTES + 1),
        "SHA256SUMS is too long",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_noticed_and_named(folder: Path, name: str) -> None:
    damage, told = DAMAGES[name]
    damage(folder)
    with pytest.raises(CorruptionError) as caught:
        checksums.check(folder)
    assert str(caught.value).startswith(told)


def test_any_flipped_bit_is_noticed_in_any_file_and_in_the_list(folder: Path) -> None:
    rng = random.Random(0)
    for name in ["a", "b/c", "b/d.json", checksums.NAME] * 50:
        before = (folder / name).read_bytes()
        flip(folder / name, rng)
        with pytest.raises(CorruptionError):
            checksums.check(folder)
        (folder / name).write_bytes(before)
    checksums.check(folder)


def test_a_folder_that_is_a_link_is_refused(folder: Path) -> None:
    link = folder.with_name("link")
    link.symlink_to(folder)
    for refused in (lambda: checksums.check(link), lambda: checksums.read(link, "a")):
        with pytest.raises(CorruptionError, match="link is a link"):
            refused()


def test_one_file_is_read_only_if_it_is_whole(folder: Path) -> None:
    flip(folder / "b/d.json", random.Random(0))
    assert checksums.read(folder, "b/c")
    with pytest.raises(CorruptionError, match=r"b/d.json is not what was written"):
        checksums.read(folder, "b/d.json")
    with pytest.raises(CorruptionError, match="missing"):
        checksums.read(folder, "../step/a")
    # One that takes no room on disk, and all of memory.
    os.truncate(folder / "b/d.json", 30 << 30)
    with pytest.raises(CorruptionError, match=r"b/d.json is too long"):
        checksums.read(folder, "b/d.json")
