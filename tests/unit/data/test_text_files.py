"""Test that lines are read as written, and that one-line error messages locate each fault."""

import bz2
import gzip
import lzma
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_jax.data.splits import SPLITS
from transformer_jax.data.text_files import (
    MAX_LINE_BYTES,
    TextFiles,
    choose_compression,
    is_too_long,
    read_lines,
)
from transformer_jax.errors import DataError, UsageError
from transformer_jax.progress import Note

# `str.splitlines` would split most of these lines. The other lines contain invisible characters.
ODD = [
    "a\u2028b",
    "a\u0085b",
    "a\x0bb",
    "a\x0cb",
    "a\x1cb",
    "a\rb",
    "a\0b",
    "\ufeffa",
    "\ta",
    " a ",
]
BOM = b"\xef\xbb\xbf"


def compress(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)


def open_corpus(folder: Path | str | None, **files: tuple[str, str] | None) -> TextFiles:
    """Open the files that `write_corpus` wrote, with the replacements given in `files`."""
    names = {"train": ("train.en", "train.de"), "dev": ("dev.en", "dev.de"), **files}
    data_folder = None if folder is None else str(folder)
    return TextFiles({split: names.get(split) for split in SPLITS}, data_folder)


def write_corpus(folder: Path, source: bytes, target: bytes | None = None) -> TextFiles:
    """Write a corpus that contains the given training text. The target defaults to the source."""
    files = {"train.en": source, "train.de": source if target is None else target}
    for name, data in {**files, "dev.en": b"one\n", "dev.de": b"eins\n"}.items():
        (folder / name).write_bytes(data)
    return open_corpus(folder)


def sources(corpus: TextFiles) -> list[str]:
    """Return the source lines of the training split, and check that the target lines match."""
    pairs = list(corpus.read("train"))
    assert len(pairs) == corpus.count("train")
    assert all(source == target for source, target in pairs)
    return [source for source, _ in pairs]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("texts")


LINES = st.lists(
    st.text(st.characters(exclude_characters="\n", codec="utf-8"), max_size=8)
    | st.sampled_from(["", *ODD]),
    min_size=1,
    max_size=20,
)


@given(LINES, st.sampled_from([b"\n", b"\r\n"]), st.booleans(), st.booleans(), st.booleans())
@settings(deadline=None, derandomize=True, max_examples=150)
def test_lines_are_read_as_they_were_written_from_any_start(
    folder: Path, lines: list[str], end: bytes, has_mark: bool, is_gzip: bool, ends: bool
) -> None:
    # Account for lines that do not survive a round trip through a file. A carriage return at the
    # end of a line would be read as part of the line ending. A byte-order mark at the start of the
    # first line would be read as the file's own mark. An empty last line would not be read at all.
    lines = [line.removesuffix("\r") for line in lines]
    if lines[0].startswith("\ufeff"):
        has_mark = True
    data = BOM * has_mark + end.join(line.encode() for line in lines)
    if ends or not lines[-1]:
        data += end
    corpus = write_corpus(folder, compress(data) if is_gzip else data)
    assert sources(corpus) == lines
    for start in range(len(lines) + 2):
        assert [source for source, _ in corpus.read("train", start)] == lines[start:]


def test_gzip_is_recognized_by_its_first_bytes_and_may_have_several_members(tmp_path: Path) -> None:
    data = "eins\nzwölf\n".encode()
    for stored in (data, compress(data), compress(data[:7]) + compress(data[7:]) + bytes(9)):
        assert sources(write_corpus(tmp_path, stored)) == ["eins", "zwölf"]
    for name in ("dev.en.gz", "dev.de.gz"):
        (tmp_path / name).write_bytes(compress(data))
    assert sources(open_corpus(tmp_path, train=("dev.en.gz", "train.en"))) == ["eins", "zwölf"]


CORRUPT = bytearray(compress("".join(f"{n}\n" for n in range(9999)).encode()))
CORRUPT[len(CORRUPT) // 2] ^= 0xFF
FAULTS: dict[str, tuple[bytes, str]] = {
    "latin-1": ("eins\nzwölf\n".encode("latin-1"), "train.de, line 2: not UTF-8, byte 3 is 0xf6"),
    "UTF-16": ("eins\nzwei\n".encode("utf-16"), "train.de, line 1: not UTF-8, byte 1 is 0xff"),
    "surrogate": (b"one\ntwo \xed\xa0\x80\n", "train.de, line 2: not UTF-8, byte 5 is 0xed"),
    "overlong": (b"one\n\xc0\x80\n", "train.de, line 2: not UTF-8, byte 1 is 0xc0"),
    "half a letter": (b"one\ntw\xc3", "train.de, line 2: not UTF-8, byte 3 is 0xc3"),
    "after a mark": (BOM + b"\xffone\n", "train.de, line 1: not UTF-8, byte 4 is 0xff"),
    "binary": (b"one\n" + b"\xff" * 2_000_000, "train.de, line 2: not UTF-8, byte 1 is 0xff"),
    "empty": (b"", "train.en, line 1: no such line in train.de; train.en and train.de have"),
    "shorter": (
        b"one\n",
        "line 2: no such line in train.de; train.en and train.de have 2 and 1 lines",
    ),
    "longer": (
        b"one\ntwo\n\n",
        "train.de, line 3: no such line in train.en; train.en and train.de",
    ),
    "cut gzip": (compress(b"one\ntwo\n" * 999)[:-9], "train.de, after line "),
    "gzip's head": (compress(b"one\ntwo\n")[:5], "train.de, after line 0: broken gzip: "),
    # Which line fails, and whether the error is in the data or the checksum, depends on the
    # decompression library.
    "corrupt gzip": (bytes(CORRUPT), "train.de, "),
    "wrong checksum": (compress(b"one\ntwo\n")[:-8] + bytes(8), "after line 2: broken gzip: CRC"),
    "gzip and more": (compress(b"one\ntwo\n") + b"more", "after line 2: broken gzip: "),
}


def data_error(call: Callable[[], object]) -> str:
    """Check that a call raises a DataError with a one-line message, and return the message."""
    with pytest.raises(DataError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_is_reported_with_its_file_and_line(kind: str, tmp_path: Path) -> None:
    data, words = FAULTS[kind]
    corpus = write_corpus(tmp_path, b"one\ntwo\n", data)
    line = data_error(lambda: corpus.count("train"))
    assert words in line
    # Users might share error messages, so messages must not contain folder names.
    assert str(tmp_path) not in line


def test_empty_files_are_refused(tmp_path: Path) -> None:
    assert data_error(lambda: write_corpus(tmp_path, b"").count("train")) == "train.en has no lines"
    assert sources(write_corpus(tmp_path, b"\n\n")) == ["", ""]


@pytest.mark.parametrize(("name", "kind"), [("x.gz", "gzip"), ("x.GZ", "gzip"), ("x.zst", "zstd")])
def test_a_file_has_the_format_that_its_name_states(name: str, kind: str, tmp_path: Path) -> None:
    write_corpus(tmp_path, b"one\n")
    for data in (b"", b"one\n", b"\x1f"):
        (tmp_path / name).write_bytes(data)
        corpus = open_corpus(tmp_path, train=(name, name))
        assert f"{name} is not a {kind} file" in data_error(partial(corpus.count, "train"))


def test_a_new_file_has_the_format_that_its_name_states(tmp_path: Path) -> None:
    for name in ("x.txt", "x.gz", "x.XZ", "x.bz2"):
        path = tmp_path / name
        path.write_bytes(choose_compression(path)(b"one\n"))
        assert list(read_lines(path)) == ["one"]
    with pytest.raises(UsageError, match=r"x\.zst cannot be a zstd file"):
        choose_compression(tmp_path / "x.zst")


NOT_REGULAR: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing": (lambda _: None, "there is no file "),
    "dangling link": (lambda path: path.symlink_to("nowhere"), "there is no file "),
    "circular link": (
        lambda path: path.symlink_to(path.name),
        "x.en cannot be read: Too many levels of symbolic links",
    ),
    "folder": (Path.mkdir, "is a folder, not a text file"),
    "pipe": (os.mkfifo, "is a device or pipe, not a text file"),
    "device": (
        lambda path: path.symlink_to("/dev/zero"),
        "is a device or pipe, not a text file",
    ),
}


@pytest.mark.parametrize("kind", NOT_REGULAR)
def test_a_path_that_is_not_a_regular_file_is_refused_at_once(kind: str, tmp_path: Path) -> None:
    create, words = NOT_REGULAR[kind]
    write_corpus(tmp_path, b"one\n")
    create(tmp_path / "x.en")
    for split in SPLITS:
        files = {split: ("dev.en", "x.en")}
        message = data_error(partial(open_corpus, tmp_path, **files))
        assert words in message
        assert "x.en" in message


def test_an_impossible_file_name_is_refused(tmp_path: Path) -> None:
    write_corpus(tmp_path, b"one\n")
    for name in ("", ".", "dev.en/x", "x" * 300, "a\0b"):
        data_error(partial(open_corpus, tmp_path, train=("dev.en", name)))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_without_read_permission_is_reported(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path, b"one\n")
    (tmp_path / "train.de").chmod(0)
    for call in (lambda: corpus.identity, lambda: corpus.count("train")):
        assert data_error(call) == "train.de cannot be read: Permission denied"


@pytest.mark.skipif(not Path("/proc/self/mem").is_file(), reason="needs /proc/self/mem")
def test_a_read_error_is_reported(tmp_path: Path) -> None:
    write_corpus(tmp_path, b"one\n")
    # Reading `/proc/self/mem` at address 0 raises the same error as a failing disk.
    corpus = open_corpus(tmp_path, train=("dev.en", "/proc/self/mem"))
    for call in (lambda: corpus.identity, lambda: corpus.count("train")):
        assert data_error(call) == "mem cannot be read: Input/output error"


def test_links_to_files_are_followed(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    corpus = write_corpus(tmp_path / "files", b"one\ntwo\n")
    (tmp_path / "link").symlink_to("files")
    (tmp_path / "train").symlink_to("link/train.en")
    linked = open_corpus(
        tmp_path, train=("train", "files/train.de"), dev=("link/dev.en", "link/dev.de")
    )
    assert sources(linked) == ["one", "two"]
    assert linked.identity == corpus.identity


CHANGES: dict[str, Callable[[Path], object]] = {
    "longer": lambda path: path.write_bytes(b"one\ntwo\nmore\n"),
    "shorter": lambda path: os.truncate(path, 4),
    "gone": lambda path: path.unlink(),
    "replaced": lambda path: (path.unlink(), path.write_bytes(b"one\nsix\n")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_before_its_last_line_is_read_is_reported(
    change: str, tmp_path: Path
) -> None:
    for progress in ("opened", "counted", "half read"):
        write_corpus(tmp_path, b"one\ntwo\n")
        os.utime(tmp_path / "train.de", ns=(0, 0))
        corpus = open_corpus(tmp_path)
        assert corpus.identity
        if progress != "opened":
            corpus.count("train")
        reader = corpus.read("train")
        if progress == "half read":
            next(reader)
        CHANGES[change](tmp_path / "train.de")
        message = data_error(partial(list, reader))
        assert "train.de was changed while it was read" in message or (
            (change, progress) != ("replaced", "half read") and "train.de cannot be read" in message
        )


def test_relative_names_start_from_the_folder_the_environment_or_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    homes = [tmp_path / name for name in ("folder", "environment", "working")]
    for number, home in enumerate(homes):
        home.mkdir()
        write_corpus(home, f"{number}\n".encode())

    def lines(folder: str | None) -> list[str]:
        return sources(open_corpus(folder))

    monkeypatch.delenv("TRANSFORMER_JAX_DATA", raising=False)
    monkeypatch.chdir(homes[2])
    assert lines(None) == ["2"]
    monkeypatch.setenv("TRANSFORMER_JAX_DATA", str(homes[1]))
    assert lines(None) == ["1"]
    assert lines("../folder") == lines(str(homes[0])) == ["0"]
    absolute = str(homes[2] / "train.en"), str(homes[2] / "train.de")
    assert sources(open_corpus(homes[0], train=absolute)) == ["2"]
    monkeypatch.chdir(tmp_path)
    line = data_error(lambda: open_corpus("nowhere"))
    assert line.startswith("there is no file nowhere/train.en: ")
    assert line.endswith("data.folder='FOLDER'")


def test_the_identity_depends_on_the_content_of_each_file_alone(tmp_path: Path) -> None:
    for name, data in {"a": b"one\n", "b": b"two\n", "c": b"six\n"}.items():
        (tmp_path / name).write_bytes(data)
        (tmp_path / f"{name}{name}").write_bytes(data)

    def identity(**files: tuple[str, str]) -> str:
        return open_corpus(tmp_path, **files).identity

    first = identity(train=("a", "b"), dev=("a", "c"))
    assert identity(train=("aa", "bb"), dev=("aa", "cc")) == first
    others = [
        identity(train=("b", "a"), dev=("a", "c")),
        identity(train=("a", "c"), dev=("a", "b")),
        identity(train=("a", "b"), dev=("a", "b")),
        identity(train=("a", "b"), dev=("a", "c"), test=("a", "c")),
        identity(train=("a", "b"), dev=("a", "c"), test=("a", "b")),
    ]
    assert len({first, *others}) == 6


def test_the_name_of_a_corpus_is_its_file_names_without_folders(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path, b"one\n")
    assert corpus.name == "train.en + train.de"
    assert corpus.splits == ("train", "dev")
    odd = tmp_path / os.fsdecode(b"\xff.en")
    odd.write_bytes(b"one\n")
    assert open_corpus(tmp_path, train=(odd.name, "dev.de")).name == r"\udcff.en + dev.de"


def test_train_and_dev_files_are_required(tmp_path: Path) -> None:
    write_corpus(tmp_path, b"one\n")
    for split in ("train", "dev"):
        expected = rf"data\.{split} must name .* {split}\.en {split}\.de"
        with pytest.raises(UsageError, match=expected):
            open_corpus(tmp_path, **{split: None})


def long_lines() -> Iterator[bytes]:
    """Yield lines near or far above the limit, with 1- to 4-byte characters at every offset."""
    for letter in ("a", "é", "日", "𝄞"):
        size = len(letter.encode())
        for shift in range(size):
            for length in (MAX_LINE_BYTES - 2, MAX_LINE_BYTES + 1, MAX_LINE_BYTES + 8, 1_000_000):
                yield b"x" * shift + letter.encode() * (length // size)
    yield from (b"x" * (MAX_LINE_BYTES + extra) for extra in range(-2, 12))


@pytest.mark.parametrize(("begin", "end"), [(b"", b"\n"), (BOM, b"\n"), (BOM, b"\r\n")])
def test_only_lines_that_are_too_long_are_truncated(
    begin: bytes, end: bytes, tmp_path: Path
) -> None:
    for line in long_lines():
        first, last = sources(write_corpus(tmp_path, begin + line + end + b"next"))
        assert last == "next"
        assert is_too_long(first) is (len(line) > MAX_LINE_BYTES)
        assert line.decode().startswith(first)
        assert is_too_long(first) or first.encode() == line
        # The reader must keep only the start of an overlong line in memory.
        assert len(first.encode()) <= MAX_LINE_BYTES + 8


def test_a_line_of_dev_that_is_too_long_is_refused(tmp_path: Path) -> None:
    for line in ("x" * MAX_LINE_BYTES, "日" * (MAX_LINE_BYTES // 3)):
        write_corpus(tmp_path, b"one\n")
        for extra, is_fine in (("", True), ("日", False)):
            (tmp_path / "dev.de").write_text(f"eins\n{line}{extra}\n", "utf-8")
            (tmp_path / "dev.en").write_text("one\ntwo\n")
            corpus = open_corpus(tmp_path, train=("dev.en", "dev.de"))
            assert corpus.count("train") == 2
            if is_fine:
                assert corpus.count("dev") == 2
            else:
                message = data_error(partial(corpus.count, "dev"))
                assert message.startswith("dev.de, line 2: more than 65536 bytes; dev is scored")


PACKED: dict[str, Callable[[bytes], bytes]] = {
    "gzip": compress,
    "xz": lzma.compress,
    "bzip2": bz2.compress,
}


@pytest.mark.parametrize("kind", PACKED)
def test_a_compressed_file_is_recognized_by_its_first_bytes(kind: str, tmp_path: Path) -> None:
    packed = PACKED[kind](b"one\nBZh\ntwo\n" * 50)
    assert sources(write_corpus(tmp_path, packed)) == ["one", "BZh", "two"] * 50
    broken = write_corpus(tmp_path, packed[:-12])
    assert f"broken {kind}: " in data_error(partial(broken.count, "train"))
    corrupt = write_corpus(tmp_path, packed[:20] + bytes(8) + packed[28:])
    assert "train.en, after line " in data_error(partial(corrupt.count, "train"))


UNSUPPORTED = {
    "zstd": bytes.fromhex("28b52ffd0403210000"),
    "zip": b"PK\x03\x04" + bytes(30),
    "7z": b"7z\xbc\xaf\x27\x1c" + bytes(9),
    "rar": b"Rar!\x1a\x07\x01\x00",
    "lz4": bytes.fromhex("04224d186440a7"),
    "compress": b"\x1f\x9d\x90",
    "lzma": lzma.compress(b"one\n", format=lzma.FORMAT_ALONE),
    "tar": b"train.en".ljust(257, b"\0") + b"ustar\x0000",
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_another_archive_is_named_whether_it_is_compressed_or_not(
    kind: str, tmp_path: Path
) -> None:
    for data in (UNSUPPORTED[kind], compress(UNSUPPORTED[kind]), lzma.compress(UNSUPPORTED[kind])):
        corpus = write_corpus(tmp_path, data)
        message = data_error(partial(corpus.count, "train"))
        assert message == f"train.en contains a {kind} file: unpack it first"


def test_text_is_not_mistaken_for_an_archive(tmp_path: Path) -> None:
    for data in (b"BZh9 is a magic number\n", b"PK\n", b"Rar!\n", b"7z\n", b"LZIP\n"):
        assert sources(write_corpus(tmp_path, data)) == [data.decode().strip()]


def open_sides(folder: Path, **splits: tuple[list[str], list[str]]) -> TextFiles:
    """Write the source and target lines of each split, and open the files."""
    names = {split: (f"{split}.en", f"{split}.de") for split in splits}
    for split, sides in splits.items():
        for name, lines in zip(names[split], sides, strict=True):
            (folder / name).write_text("".join(f"{line}\n" for line in lines), "utf-8")
    return open_corpus(folder, **names)


GOOD = {"train": (["a", "b"], ["c", "d"]), "dev": (["e", "7"], ["f", "7"])}


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        (
            {"dev": (["a", "b", "c"], ["a", "b", "d"])},
            "dev.en and dev.de are the same in 2 of the first 3",
        ),
        ({"test": GOOD["dev"]}, "dev and test start with the same 2 pairs"),
        (
            {"test": (["e", "7", "g"], ["f", "7", "h"])},
            "dev and test start with the same 2 pairs",
        ),
        ({"test": (["x", '<seg id="1">x</seg>'], ["y", "z"])}, "test.en contains markup.*<seg id="),
        ({"test": (["x", "y"], ["<?xml version='1.0'?>", "z"])}, "test.de contains markup"),
        ({"test": (['{"en": "x"}', "y"], ["a", "z"])}, "test.en contains markup"),
        (
            {"train": (["version https://git-lfs.github.com/spec/v1", "oid"], ["a", "z"])},
            "train.en contains markup.*git-lfs",
        ),
    ],
)
def test_a_common_mistake_in_files_is_noted(
    splits: dict[str, tuple[list[str], list[str]]], message: str, tmp_path: Path
) -> None:
    with pytest.warns(Note, match=message):
        open_sides(tmp_path, **{**GOOD, **splits}).note_mistakes()


@pytest.mark.filterwarnings("error")
def test_a_line_that_is_the_same_in_both_languages_or_compares_numbers_is_no_mistake(
    tmp_path: Path,
) -> None:
    open_sides(tmp_path, **GOOD, test=(["1 < 2", "<segment"], ["x", "y"])).note_mistakes()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("sides", [(["e"], ["f"]), (["e", "7", "g"], ["f", "8", "h"])])
def test_splits_that_begin_with_only_one_equal_pair_are_no_mistake(
    sides: tuple[list[str], list[str]], tmp_path: Path
) -> None:
    open_sides(tmp_path, **GOOD, test=sides).note_mistakes()
