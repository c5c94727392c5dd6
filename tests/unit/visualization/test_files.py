import errno
from pathlib import Path

import pytest

from transformer_jax.errors import StorageError, UsageError
from transformer_jax.visualization.files import (
    ATTENTION_SUFFIXES,
    FIGURE_SUFFIXES,
    check_suffix,
    write_file,
)


@pytest.mark.parametrize(
    ("suffixes", "endings"),
    [(ATTENTION_SUFFIXES, r"\.html, \.svg, or \.png"), (FIGURE_SUFFIXES, r"\.svg or \.png")],
)
def test_a_suffix_is_recognized_in_any_case_and_an_unknown_one_is_an_error(
    suffixes: tuple[str, ...], endings: str
) -> None:
    assert check_suffix(Path("a.b/x.SVG"), suffixes) == ".svg"
    for name in ("x.pdf", "x", ".svg", "x.svgz"):
        with pytest.raises(UsageError, match=f"must end in {endings}, got '{name}'"):
            check_suffix(Path(name), suffixes)


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be written: Is a directory"):
        write_file(tmp_path, b"")


def test_a_full_disk_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_part(path: Path, content: bytes) -> None:
        with path.open("wb") as file:
            file.write(content[:1])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", write_part)
    with pytest.raises(StorageError, match=r"x\.html cannot be written: No space left"):
        write_file(tmp_path / "x.html", b"page")
    assert list(tmp_path.iterdir()) == []
