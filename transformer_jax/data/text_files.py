"""Parallel text in files: line n of one file belongs to line n of the other.

Bytes are read, and only a newline ends a line: text may hold U+2028 and its like. A byte-order
mark at the beginning of a file, and a carriage return at the end of a line, are no text.
"""

import codecs
import gzip
import hashlib
import io
import itertools
import os
import stat
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from transformer_jax.data.splits import SPLITS, Split
from transformer_jax.errors import DataError, UsageError

# Of a line much longer than this only the beginning is read: it is too long for any use.
MAX_LINE_BYTES = 1 << 16
GZIP_MAGIC = b"\x1f\x8b"


class TextFiles:
    """Files of sources and of targets, plain or gzip."""

    def __init__(self, files: Mapping[Split, tuple[str, str] | None], folder: str | None) -> None:
        """Find the files.

        Args:
            files: for each split the file of its sources and that of its targets.
            folder: where relative names begin; `$TRANSFORMER_JAX_DATA` if it is None.

        Raises:
            UsageError: no files are named to train on or to score on.
            DataError: a file is not there, or is none.
        """
        for split in ("train", "dev"):
            if files.get(split) is None:
                raise UsageError(
                    f"data.{split} must name a file of sources and one of targets, "
                    f"as --data.{split} {split}.en {split}.de"
                )
        home = Path(folder or os.environ.get("TRANSFORMER_JAX_DATA") or ".")
        named = {split: files.get(split) for split in SPLITS}
        self._names = {split: pair for split, pair in named.items() if pair is not None}
        self._paths = {
            split: tuple(_existing(home / name) for name in pair)
            for split, pair in self._names.items()
        }
        self._counts: dict[Split, int] = {}
        # Text is read more than once, and must be the same each time.
        self._states = {path: _state(path) for pair in self._paths.values() for path in pair}

    @property
    def name(self) -> str:
        """The files of the training set, without where they lie."""
        names = " + ".join(path.name for path in self._paths["train"])
        # A name may hold bytes that are no UTF-8, which no terminal shows.
        return names.encode(errors="backslashreplace").decode()

    @property
    def splits(self) -> tuple[Split, ...]:
        return tuple(self._names)

    @property
    def identity(self) -> str:
        """SHA-256 of all files as they are stored."""
        digest = hashlib.sha256()
        for split, paths in self._paths.items():
            digest.update(split.encode())
            for path in paths:
                try:
                    with path.open("rb") as file:
                        digest.update(hashlib.file_digest(file, "sha256").digest())
                except OSError as error:
                    raise _unreadable(path, error) from error
            self._check_unchanged(split)
        return f"text files, {digest.hexdigest()}"

    def count(self, split: Split) -> int:
        """Return the number of pairs, after a look at every line.

        Raises:
            DataError: the files have no lines or not as many of one as of the other, or one is
                no UTF-8 or a broken gzip file, or has a line too long to be scored.
        """
        if split not in self._counts:
            sources, targets = (_count(path, split) for path in self._paths[split])
            self._check_unchanged(split)
            if sources != targets:
                first, second = self._paths[split]
                longer = first if sources > targets else second
                raise DataError(
                    f"{longer.name}, line {min(sources, targets) + 1}: nothing stands beside it; "
                    f"{first.name} has {sources} lines, {second.name} has {targets}"
                )
            if not sources:
                raise DataError(f"{self._paths[split][0].name} has no line")
            self._counts[split] = sources
        return self._counts[split]

    def read(self, split: Split, start: int = 0) -> Iterator[tuple[str, str]]:
        # After it they can only be of unlike lengths if they were changed.
        self.count(split)
        source, target = (_lines(path) for path in self._paths[split])
        yield from itertools.islice(zip(source, target, strict=False), start, None)
        self._check_unchanged(split)

    def _check_unchanged(self, split: Split) -> None:
        for path in self._paths[split]:
            if _state(path) != self._states[path]:
                raise DataError(
                    f"{path.name} was changed while it was read: begin again when it is finished"
                )


def is_too_long(line: str) -> bool:
    """Tell whether a line has more than `MAX_LINE_BYTES` in UTF-8."""
    return len(line) > MAX_LINE_BYTES // 4 and len(line.encode()) > MAX_LINE_BYTES


def _existing(path: Path) -> Path:
    """Return the path of an ordinary file: a FIFO would be waited for without end."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:
        raise DataError(
            f"there is no file {path}: name it as it lies from here, or say by --data.folder or "
            f"$TRANSFORMER_JAX_DATA where names begin"
        ) from error
    except OSError as error:
        raise _unreadable(path, error) from error
    if not stat.S_ISREG(mode):
        kind = "folder" if stat.S_ISDIR(mode) else "device or pipe"
        raise DataError(f"{path} is no file of text, but a {kind}: name a file")
    return path


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"{path.name} cannot be read: {error.strerror or error}")


def _state(path: Path) -> tuple[int, int] | None:
    """Return what changes when a file does; None if it is gone."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def _count(path: Path, split: Split) -> int:
    """Return the number of lines.

    Raises:
        DataError: as `_lines` does; a line is too long in a set that is scored as a whole.
    """
    number = 0
    for number, line in enumerate(_lines(path), start=1):
        if split != "train" and is_too_long(line):
            raise DataError(
                f"{path.name}, line {number}: more than {MAX_LINE_BYTES} bytes; {split} is scored "
                f"as a whole, so take the pair out or part it"
            )
    return number


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file without their ends; of one that is too long, its beginning.

    Raises:
        DataError: it cannot be read, with file and line.
    """
    number = 0
    try:
        with _open(path) as file:
            # So much that a cut line is too long also without a byte-order mark (3 bytes) and
            # without the character that was cut in two (another 3).
            while line := file.readline(MAX_LINE_BYTES + 8):
                number += 1
                is_cut = len(line) == MAX_LINE_BYTES + 8 and not line.endswith(b"\n")
                if is_cut:
                    _skip_line(file)
                line = line.removesuffix(b"\n").removesuffix(b"\r")
                text, _ = codecs.utf_8_decode(line, "strict", not is_cut)
                yield text.removeprefix("\ufeff") if number == 1 else text
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path.name}, line {number}: no UTF-8, byte {error.start + 1} is "
            f"0x{error.object[error.start]:02x}: convert the file, as by iconv"
        ) from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path.name}, after line {number}: broken gzip: {error}") from error
    except OSError as error:
        raise _unreadable(path, error) from error


def _open(path: Path) -> io.BufferedIOBase:
    """Open a file, unpacking it where its first bytes say that it is gzip."""
    with path.open("rb") as file:
        is_gzip = file.read(2) == GZIP_MAGIC
    if not is_gzip and path.suffix == ".gz":
        raise DataError(f"{path.name} is no gzip file, although its name says so")
    return gzip.open(path) if is_gzip else path.open("rb")


def _skip_line(file: io.BufferedIOBase) -> None:
    while (rest := file.readline(1 << 20)) and not rest.endswith(b"\n"):
        pass
