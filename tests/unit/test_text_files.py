"""Files of text: read as they are, or refused in one line that names the file and the line."""

import gzip
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_jax.data.splits import SPLITS
from transformer_jax.data.text_files import MAX_LINE_BYTES, TextFiles, is_too_long
from transformer_jax.errors import DataError, UsageError

# Each of these ends a line for `str.splitlines`, or is nothing to see.
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


def named(folder: Path | str | None, **files: tuple[str, str] | None) -> TextFiles:
    """Return a corpus of these files; where they are not said, of those that `texts` writes."""
    usual = {"train": ("train.en", "train.de"), "dev": ("dev.en", "dev.de")}
    found = {**usual, **files}
    home = None if folder is None else str(folder)
    return TextFiles({split: found.get(split) for split in SPLITS}, home)


def texts(folder: Path, source: bytes, target: bytes | None = None) -> TextFiles:
    """Return a corpus whose training set is these bytes."""
    files = {"train.en": source, "train.de": source if target is None else target}
    for name, data in {**files, "dev.en": b"one\n", "dev.de": b"eins\n"}.items():
        (folder / name).write_bytes(data)
    return named(folder)


def sources(corpus: TextFiles) -> list[str]:
    """Return one side of a training set of which both are alike."""
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
def test_lines_are_read_as_they_were_written(
    folder: Path, lines: list[str], end: bytes, has_mark: bool, is_gzip: bool, ends: bool
) -> None:
    # What no reader can know: whether a carriage return belongs to the line or to its end, and a
    # mark of the line's own at the beginning of a file; an unended empty line is none.
    lines = [line.removesuffix("\r") for line in lines]
    if lines[0].startswith("\ufeff"):
        has_mark = True
    data = BOM * has_mark + end.join(line.encode() for line in lines)
    if ends or not lines[-1]:
        data += end
    corpus = texts(folder, compress(data) if is_gzip else data)
    assert sources(corpus) == lines
    for start in range(len(lines) + 2):
        assert [source for source, _ in corpus.read("train", start)] == lines[start:]


def test_gzip_is_known_by_its_first_bytes_and_may_have_several_parts(tmp_path: Path) -> None:
    data = "eins\nzwölf\n".encode()
    for stored in (data, compress(data), compress(data[:7]) + compress(data[7:]) + bytes(9)):
        assert sources(texts(tmp_path, stored)) == ["eins", "zwölf"]
    for name in ("dev.en.gz", "dev.de.gz"):
        (tmp_path / name).write_bytes(compress(data))
    assert sources(named(tmp_path, train=("dev.en.gz", "train.en"))) == ["eins", "zwölf"]


CORRUPT = bytearray(compress("".join(f"{n}\n" for n in range(9999)).encode()))
CORRUPT[len(CORRUPT) // 2] ^= 0xFF
FAULTS: dict[str, tuple[bytes, str]] = {
    "latin-1": ("eins\nzwölf\n".encode("latin-1"), "train.de, line 2: no UTF-8, byte 3 is 0xf6"),
    "UTF-16": ("eins\nzwei\n".encode("utf-16"), "train.de, line 1: no UTF-8, byte 1 is 0xff"),
    "surrogate": (b"one\ntwo \xed\xa0\x80\n", "train.de, line 2: no UTF-8, byte 5 is 0xed"),
    "overlong": (b"one\n\xc0\x80\n", "train.de, line 2: no UTF-8, byte 1 is 0xc0"),
    "half a letter": (b"one\ntw\xc3", "train.de, line 2: no UTF-8, byte 3 is 0xc3"),
    "after a mark": (BOM + b"\xffone\n", "train.de, line 1: no UTF-8, byte 4 is 0xff"),
    "binary": (b"one\n" + b"\xff" * 2_000_000, "train.de, line 2: no UTF-8, byte 1 is 0xff"),
    "empty": (b"", "train.en, line 1: nothing stands beside it; train.en has 2 lines, train.de"),
    "shorter": (b"one\n", "train.en, line 2: nothing stands beside it; train.en has 2 lines"),
    "longer": (b"one\ntwo\n\n", "train.de, line 3: nothing stands beside it; train.en has 2"),
    "cut gzip": (compress(b"one\ntwo\n" * 999)[:-9], "train.de, after line "),
    "gzip's head": (compress(b"one\ntwo\n")[:5], "train.de, after line 0: broken gzip: "),
    # Which line, and whether its bytes or its checksum tell, depends on the library.
    "corrupt gzip": (bytes(CORRUPT), "train.de, "),
    "wrong checksum": (compress(b"one\ntwo\n")[:-8] + bytes(8), "after line 2: broken gzip: CRC"),
    "gzip and more": (compress(b"one\ntwo\n") + b"more", "after line 2: broken gzip: "),
}


def fault(call: Callable[[], object]) -> str:
    with pytest.raises(DataError) as told:
        call()
    line = str(told.value)
    assert "\n" not in line
    return line


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_names_the_file_and_the_line(kind: str, tmp_path: Path) -> None:
    data, words = FAULTS[kind]
    corpus = texts(tmp_path, b"one\ntwo\n", data)
    line = fault(lambda: corpus.count("train"))
    assert words in line
    # Names are shown without folders: they are told who shared the text, not where it lay.
    assert str(tmp_path) not in line


def test_text_without_a_line_is_refused(tmp_path: Path) -> None:
    assert fault(lambda: texts(tmp_path, b"").count("train")) == "train.en has no line"
    assert sources(texts(tmp_path, b"\n\n")) == ["", ""]


def test_a_name_that_says_gzip_must_keep_its_word(tmp_path: Path) -> None:
    texts(tmp_path, b"one\n")
    for data in (b"", b"one\n", b"\x1f"):
        (tmp_path / "x.gz").write_bytes(data)
        corpus = named(tmp_path, train=("x.gz", "x.gz"))
        assert "x.gz is no gzip file" in fault(lambda: corpus.count("train"))  # noqa: B023


def put(path: Path, kind: str) -> None:
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind != "nothing":
        path.symlink_to({"device": "/dev/zero", "loop": path.name, "dangling": "nowhere"}[kind])


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("nothing", "there is no file "),
        ("dangling", "there is no file "),
        ("loop", "x.en cannot be read: Too many levels of symbolic links"),
        ("folder", "but a folder"),
        ("pipe", "but a device or pipe"),
        ("device", "but a device or pipe"),
    ],
)
@pytest.mark.parametrize("place", ["train", "dev", "test"])
def test_what_is_no_file_is_told_before_anything_is_read(
    kind: str, words: str, place: str, tmp_path: Path
) -> None:
    texts(tmp_path, b"one\n")
    put(tmp_path / "x.en", kind)
    line = fault(lambda: named(tmp_path, **{place: ("dev.en", "x.en")}))
    assert words in line
    assert "x.en" in line


@pytest.mark.parametrize("name", ["", ".", "dev.en/x", "x" * 300, "a\0b"])
def test_what_is_no_name_is_told(name: str, tmp_path: Path) -> None:
    texts(tmp_path, b"one\n")
    fault(lambda: named(tmp_path, train=("dev.en", name)))


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is kept from root")
def test_a_file_that_may_not_be_read_is_told(tmp_path: Path) -> None:
    corpus = texts(tmp_path, b"one\n")
    (tmp_path / "train.de").chmod(0)
    for call in (lambda: corpus.identity, lambda: corpus.count("train")):
        assert fault(call) == "train.de cannot be read: Permission denied"


@pytest.mark.skipif(not Path("/proc/self/mem").is_file(), reason="there is no such file here")
def test_a_file_that_fails_is_told(tmp_path: Path) -> None:
    texts(tmp_path, b"one\n")
    # Memory has nothing at address 0: reading gives the error of a broken disk.
    corpus = named(tmp_path, train=("dev.en", "/proc/self/mem"))
    for call in (lambda: corpus.identity, lambda: corpus.count("train")):
        assert fault(call) == "mem cannot be read: Input/output error"


def test_a_link_to_a_file_is_as_good_as_the_file(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    corpus = texts(tmp_path / "kept", b"one\ntwo\n")
    (tmp_path / "link").symlink_to("kept")
    (tmp_path / "train").symlink_to("link/train.en")
    linked = named(tmp_path, train=("train", "kept/train.de"), dev=("link/dev.en", "link/dev.de"))
    assert sources(linked) == ["one", "two"]
    assert linked.identity == corpus.identity


CHANGES: dict[str, Callable[[Path], object]] = {
    "longer": lambda path: path.write_bytes(b"one\ntwo\nmore\n"),
    "shorter": lambda path: os.truncate(path, 4),
    "gone": lambda path: path.unlink(),
    "replaced": lambda path: (path.unlink(), path.write_bytes(b"one\nsix\n")),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("when", ["before", "counted", "while"])
def test_a_file_that_changes_while_it_is_read_is_told(
    change: str, when: str, tmp_path: Path
) -> None:
    texts(tmp_path, b"one\ntwo\n")
    os.utime(tmp_path / "train.de", ns=(0, 0))
    corpus = named(tmp_path)
    assert corpus.identity
    if when != "before":
        corpus.count("train")
    reading = corpus.read("train")
    if when == "while":
        next(reading)
    CHANGES[change](tmp_path / "train.de")
    line = fault(lambda: list(reading))
    assert "train.de was changed while it was read" in line or (
        (change, when) != ("replaced", "while") and "train.de cannot be read" in line
    )


def test_names_begin_where_one_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    homes = [tmp_path / name for name in ("said", "environment", "here")]
    for number, home in enumerate(homes):
        home.mkdir()
        texts(home, f"{number}\n".encode())

    def found(folder: str | None) -> list[str]:
        return sources(named(folder))

    monkeypatch.delenv("TRANSFORMER_JAX_DATA", raising=False)
    monkeypatch.chdir(homes[2])
    assert found(None) == ["2"]
    monkeypatch.setenv("TRANSFORMER_JAX_DATA", str(homes[1]))
    assert found(None) == ["1"]
    assert found("../said") == found(str(homes[0])) == ["0"]
    absolute = str(homes[2] / "train.en"), str(homes[2] / "train.de")
    assert sources(named(homes[0], train=absolute)) == ["2"]
    monkeypatch.chdir(tmp_path)
    line = fault(lambda: named("nowhere"))
    assert line.startswith("there is no file nowhere/train.en: ")
    assert "--data.folder" in line


def test_the_identity_is_of_what_stands_in_each_place_wherever_it_lies(tmp_path: Path) -> None:
    for name, data in {"a": b"one\n", "b": b"two\n", "c": b"six\n"}.items():
        (tmp_path / name).write_bytes(data)
        (tmp_path / f"{name}{name}").write_bytes(data)

    def identity(**places: tuple[str, str]) -> str:
        return named(tmp_path, **places).identity

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


def test_a_corpus_is_called_by_its_files_without_their_folders(tmp_path: Path) -> None:
    corpus = texts(tmp_path, b"one\n")
    assert corpus.name == "train.en + train.de"
    assert corpus.splits == ("train", "dev")
    odd = tmp_path / os.fsdecode(b"\xff.en")
    odd.write_bytes(b"one\n")
    assert named(tmp_path, train=(odd.name, "dev.de")).name == r"\udcff.en + dev.de"


@pytest.mark.parametrize("missing", ["train", "dev"])
def test_files_to_train_and_to_score_on_must_be_named(missing: str, tmp_path: Path) -> None:
    texts(tmp_path, b"one\n")
    with pytest.raises(UsageError, match=rf"--data\.{missing} {missing}\.en {missing}\.de"):
        named(tmp_path, **{missing: None})


def long_lines() -> Iterator[bytes]:
    """Yield lines about as long as one may be, of letters of every size at every place."""
    for letter in ("a", "é", "日", "𝄞"):
        size = len(letter.encode())
        for shift in range(size):
            for length in (MAX_LINE_BYTES - 2, MAX_LINE_BYTES + 1, MAX_LINE_BYTES + 8, 1_000_000):
                yield b"x" * shift + letter.encode() * (length // size)
    yield from (b"x" * (MAX_LINE_BYTES + extra) for extra in range(-2, 12))


@pytest.mark.parametrize("begin", [b"", BOM])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_a_line_is_whole_or_known_to_be_too_long(begin: bytes, end: bytes, tmp_path: Path) -> None:
    for line in long_lines():
        first, last = sources(texts(tmp_path, begin + line + end + b"next"))
        assert last == "next"
        assert is_too_long(first) is (len(line) > MAX_LINE_BYTES)
        assert line.decode().startswith(first)
        assert is_too_long(first) or first.encode() == line
        # Of what is far too long, little is held in memory.
        assert len(first.encode()) <= MAX_LINE_BYTES + 8


def test_a_set_that_is_scored_as_a_whole_has_no_line_that_is_too_long(tmp_path: Path) -> None:
    for line in ("x" * MAX_LINE_BYTES, "日" * (MAX_LINE_BYTES // 3)):
        texts(tmp_path, b"one\n")
        for extra, is_fine in (("", True), ("日", False)):
            (tmp_path / "dev.de").write_text(f"eins\n{line}{extra}\n", "utf-8")
            (tmp_path / "dev.en").write_text("one\ntwo\n")
            corpus = named(tmp_path, train=("dev.en", "dev.de"))
            assert corpus.count("train") == 2
            if is_fine:
                assert corpus.count("dev") == 2
            else:
                line_of = fault(lambda: corpus.count("dev"))  # noqa: B023
                assert line_of.startswith("dev.de, line 2: more than 65536 bytes; dev is scored")
