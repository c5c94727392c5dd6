"""Parallel text in files: line n of one file is the translation of line n of the other.

Files are read as bytes, and only a newline ends a line, because text may contain U+2028 and other
Unicode line separators. A byte-order mark at the start of a file and a carriage return at the end
of a line are not part of the text.
"""

import bz2
import codecs
import contextlib
import gzip
import hashlib
import io
import itertools
import lzma
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from transformer_jax.data.splits import SPLITS, Split
from transformer_jax.errors import DataError, Setting, UsageError
from transformer_jax.files import parse_path
from transformer_jax.progress import note

# If a line is much longer than this limit, only its beginning is kept.
MAX_LINE_BYTES = 1 << 16
# The number of lines at the start of each file that are checked for common mistakes.
NUM_CHECKED_LINES = 1000
# Tags of the SGML and XML files in which test sets are distributed, the start of a JSON object, and
# the pointers that Git LFS leaves in place of files that it has not downloaded.
MARKUP = re.compile(
    r"\s*</?(\?xml|!doctype|(html|doc|seg|srcset|refset|tstset|tmx|tu|tuv)\b)"
    r'|\{"\w+": |version https://git-lfs',
    re.IGNORECASE,
)
# The formats of compressed files, keyed by the first bytes of a file.
MAGIC = {
    "gzip": b"\x1f\x8b",
    "xz": b"\xfd7zXZ\0",
    "bzip2": b"BZh[1-9](1AY&SY|\x17rE8P\x90)",
    "zstd": b"[\x22-\x28]\xb5\x2f\xfd",
    "zip": b"PK(\x03\x04|\x05\x06)",
    "7z": b"7z\xbc\xaf\x27\x1c",
    "rar": b"Rar!\x1a\x07",
    "lz4": b"\x04\x22\x4d\x18",
    "compress": b"\x1f\x9d",
    "lzma": b"\x5d\0\0",
    "lzip": b"LZIP\x01",
    "tar": b".{257}ustar",
}
MAGIC_BYTES = 262
MODULES: dict[str, Any] = {"gzip": gzip, "xz": lzma, "bzip2": bz2}
BROKEN = (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError)
SUFFIXES = {".gz": "gzip", ".bz2": "bzip2", ".zst": "zstd"}
SUFFIXES |= {f".{kind}": kind for kind in ("xz", "zip", "7z", "rar", "lz4", "tar")}


class FileCorpus:
    """A corpus stored in files. The files must not change, because they are read several times."""

    kind: ClassVar[str]
    """The prefix of `identity`."""

    def __init__(self, name: str, paths: Mapping[Split, Sequence[Path]]) -> None:
        """Record the files of each split, with their sizes and modification times."""
        # In the names of files and folders, escape any bytes that are not valid UTF-8, because
        # terminals cannot show them.
        self.name = name.encode(errors="backslashreplace").decode()
        self._paths, self._counts = dict(paths), dict[Split, int]()
        self._versions = {path: file_version(path) for x in paths.values() for path in x}

    @property
    def splits(self) -> tuple[Split, ...]:
        """The splits that have files."""
        return tuple(self._paths)

    @property
    def identity(self) -> str:
        """`kind`, and the SHA-256 of the names of the splits and the contents of their files."""
        digest = hashlib.sha256()
        for split, paths in self._paths.items():
            digest.update(split.encode())
            for path in paths:
                try:
                    with path.open("rb") as file:
                        digest.update(hashlib.file_digest(file, "sha256").digest())
                except OSError as error:
                    raise _read_error(path, error) from error
            self._check_unchanged(split)
        return f"{self.kind}, {digest.hexdigest()}"

    def _check_unchanged(self, split: Split) -> None:
        for path in self._paths[split]:
            if file_version(path) != self._versions[path]:
                raise DataError(
                    f"{path.name} was changed while it was read: try again when it is complete"
                )


class TextFiles(FileCorpus):
    """A corpus stored in pairs of files, which may be compressed with gzip, xz, or bzip2."""

    kind = "text files"

    def __init__(self, files: Mapping[Split, tuple[str, str] | None], folder: str | None) -> None:
        """Find the files of each split in `data_folder`. Train and dev are required."""
        for split in ("train", "dev"):
            if files.get(split) is None:
                raise UsageError(
                    f"data.{split} must name a source file and a target file, "
                    f"for example {split}.en {split}.de"
                )
        home = data_folder(folder)
        paths = {
            split: tuple(_check_regular_file(home / parse_path(name)) for name in pair)
            for split in SPLITS
            if (pair := files.get(split)) is not None
        }
        super().__init__(" + ".join(path.name for path in paths["train"]), paths)

    def note_mistakes(self) -> None:
        """Issue a note about each likely mistake at the start of the files.

        The mistakes are markup, sources that equal their targets, and splits that start with the
        same pairs.
        """
        heads = {
            split: [list(itertools.islice(read_lines(path), NUM_CHECKED_LINES)) for path in paths]
            for split, paths in self._paths.items()
        }
        for split, lines in heads.items():
            note_mistakes([path.name for path in self._paths[split]], lines, f"{split}: ")
        for one, other in itertools.combinations(heads, 2):
            # The splits may have different sizes. A single equal pair can be a coincidence.
            size = min(map(len, [*heads[one], *heads[other]]))
            starts = [[side[:size] for side in heads[split]] for split in (one, other)]
            if size > 1 and starts[0] == starts[1]:
                note(f"{one} and {other} start with the same {size} pairs")

    def count(self, split: Split) -> int:
        """Check all lines and return the number of pairs."""
        if split not in self._counts:
            first, second = self._paths[split]
            sources, targets = _count(first, split), _count(second, split)
            self._check_unchanged(split)
            if sources != targets:
                longer, shorter = (first, second) if sources > targets else (second, first)
                raise DataError(
                    f"{longer.name}, line {min(sources, targets) + 1}: no such line in "
                    f"{shorter.name}; {first.name} and {second.name} have {sources} and {targets} "
                    "lines"
                )
            if not sources:
                raise DataError(f"{first.name} has no lines")
            self._counts[split] = sources
        return self._counts[split]

    def read(self, split: Split, start: int = 0) -> Iterator[tuple[str, str]]:
        """Yield pairs of lines, starting at pair `start`; raise a DataError if a file changes."""
        # `count` raises a DataError if the two files have different numbers of lines.
        self.count(split)
        source, target = (read_lines(path) for path in self._paths[split])
        yield from itertools.islice(zip(source, target, strict=False), start, None)
        self._check_unchanged(split)


def note_mistakes(names: Sequence[str], sides: Sequence[list[str]], label: str = "") -> None:
    """Issue notes if the first lines of a source and a target are the same or contain markup."""
    (source, target), heads = names, [lines[:NUM_CHECKED_LINES] for lines in sides]
    num_same = sum(x == y for x, y in zip(*heads, strict=False))
    if 2 * num_same > len(heads[0]):
        same = f"in {num_same} of the first {len(heads[0])} lines"
        note(f"{label}{source} and {target} are the same {same}")
    for name, lines in zip(names, heads, strict=True):
        note_markup(f"{label}{name}", lines)


def note_markup(name: str, lines: Sequence[str]) -> None:
    """Issue a note if the first lines contain markup."""
    if tag := next(filter(MARKUP.match, lines[:NUM_CHECKED_LINES]), ""):
        note(f"{name} contains markup, which is read as text: {tag.strip()[:40]!r}")


def data_folder(folder: str | None) -> Path:
    """Return `folder`, which defaults to `$TRANSFORMER_JAX_DATA` or the working directory."""
    return parse_path(folder or os.environ.get("TRANSFORMER_JAX_DATA") or ".")


def is_too_long(line: str) -> bool:
    """Return whether a line is longer than `MAX_LINE_BYTES` in UTF-8."""
    return len(line) > MAX_LINE_BYTES // 4 and len(line.encode()) > MAX_LINE_BYTES


def _check_regular_file(path: Path) -> Path:
    """Return the path. Raise a DataError unless the file is regular, because pipes can block."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:
        raise DataError(
            f"there is no file {path}: to read relative paths from another folder, set "
            "TRANSFORMER_JAX_DATA or use ",
            Setting("data.folder", "FOLDER"),
        ) from error
    except OSError as error:
        raise _read_error(path, error) from error
    _check_mode(path, mode)
    return path


def _check_mode(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = "folder" if stat.S_ISDIR(mode) else "device or pipe"
        raise DataError(f"{path} is a {kind}, not a text file")


def _read_error(path: Path, error: OSError) -> DataError:
    return DataError(f"{path.name} cannot be read: {error.strerror or error}")


def file_version(path: Path) -> tuple[int, int] | None:
    """Return the size and modification time of a file, or None if it is inaccessible."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def _count(path: Path, split: Split) -> int:
    number = 0
    for number, line in enumerate(read_lines(path), start=1):
        if split != "train" and is_too_long(line):
            raise DataError(
                f"{path.name}, line {number}: more than {MAX_LINE_BYTES} bytes; {split} is scored "
                "as a whole, so remove or split this pair"
            )
    return number


def read_lines(path: Path) -> Iterator[str]:
    """Yield a file's lines without their line endings; truncate lines that are too long."""
    number = 0
    try:
        with _open(path) as file:
            # A truncated line may lose up to 6 bytes: a byte-order mark and an incomplete
            # character. Reading 8 extra bytes ensures that a truncated line still exceeds the
            # limit.
            while line := file.readline(MAX_LINE_BYTES + 8):
                number += 1
                is_truncated = len(line) == MAX_LINE_BYTES + 8 and not line.endswith(b"\n")
                if is_truncated:
                    while (rest := file.readline(1 << 20)) and not rest.endswith(b"\n"):
                        pass
                line = line.removesuffix(b"\n").removesuffix(b"\r")
                text, _ = codecs.utf_8_decode(line, "strict", not is_truncated)
                yield text.removeprefix("\ufeff") if number == 1 else text
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path.name}, line {number}: not UTF-8, byte {error.start + 1} is "
            f"0x{error.object[error.start]:02x}: convert the file, for example with iconv"
        ) from error
    except BROKEN as error:
        raise _broken(path, number, error) from error
    except OSError as error:
        # The exception for a broken bzip2 file has no error number.
        kind = _broken(path, number, error) if error.errno is None else _read_error(path, error)
        raise kind from error


def find_format(data: bytes) -> str:
    """Return the format of the compressed file or archive that starts with these bytes, or ""."""
    formats = (name for name, magic in MAGIC.items() if re.match(magic, data, re.DOTALL))
    return next(formats, "")


def choose_compression(path: Path) -> Callable[[bytes], bytes]:
    """Return the function that compresses the contents of a new file with this name."""
    kind = SUFFIXES.get(path.suffix.lower(), "")
    if kind and kind not in MODULES:
        raise UsageError(f"{path} cannot be a {kind} file: use another suffix, such as .txt or .gz")
    return MODULES[kind].compress if kind else bytes


def _open(path: Path) -> io.BufferedIOBase:
    """Open a file, and decompress it if its first bytes are those of a format in `MODULES`."""
    _check_mode(path, path.stat().st_mode)
    with path.open("rb") as file:
        kind = find_format(file.read(MAGIC_BYTES))
    expected = SUFFIXES.get(path.suffix.lower(), kind)
    if kind != expected:
        raise DataError(
            f"{path.name} is not a {expected} file, although its name ends in {path.suffix}"
        )
    if kind in MODULES:
        inner = ""
        # `read_lines` reports where the compressed data is broken.
        with contextlib.suppress(*BROKEN, OSError), MODULES[kind].open(path) as file:
            inner = find_format(file.read(MAGIC_BYTES))
        if not inner:
            return MODULES[kind].open(path)
        kind = inner
    if kind:
        raise DataError(f"{path.name} contains a {kind} file: unpack it first")
    return path.open("rb")


def _broken(path: Path, number: int, error: Exception) -> DataError:
    with path.open("rb") as file:
        kind = find_format(file.read(MAGIC_BYTES))
    return DataError(f"{path.name}, after line {number}: broken {kind}: {error}")
