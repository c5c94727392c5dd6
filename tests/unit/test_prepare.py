"""Text becomes pieces once; what is kept is whole, the same anywhere, and nothing is lost."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_jax.cache import cache_folder
from transformer_jax.config import DataConfig
from transformer_jax.data import encode as encode_module
from transformer_jax.data import prepare as prepare_module
from transformer_jax.data.corpora import CORPORA
from transformer_jax.data.encode import CONTROL
from transformer_jax.data.number_words import NumberWords
from transformer_jax.data.prepare import Prepared, prepare
from transformer_jax.data.splits import SPLITS, Split
from transformer_jax.data.text_files import MAX_LINE_BYTES
from transformer_jax.data.tokenizer import MAX_TRAINING_LINE, Tokenizer, Vocabulary
from transformer_jax.errors import DataError, StorageError
from transformer_jax.special_tokens import EOS

Pairs = list[tuple[str, str]]

CONFIG = DataConfig(num_pairs=300, vocab_size=256)
# Half of the training pairs have more pieces than this.
SHORT = DataConfig(num_pairs=300, vocab_size=256, max_length=12)


class Lines:
    """A corpus of given lines."""

    name = "lines"

    def __init__(self, train: Pairs, held_out: Pairs) -> None:
        self._splits: dict[Split, Pairs] = {
            "train": train,
            "dev": held_out,
            "test": held_out[::-1],
        }
        self.identity = json.dumps(self._splits)
        self.splits = SPLITS

    def count(self, split: Split) -> int:
        return len(self._splits[split])

    def read(self, split: Split, start: int = 0) -> Iterator[tuple[str, str]]:
        yield from self._splits[split][start:]


WORDS = list(NumberWords(50).read("train"))
TOKENIZER = Tokenizer.train([line for pair in WORDS for line in pair], 100)
VOCABULARY = Vocabulary.shared(TOKENIZER)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a test a cache of its own."""
    monkeypatch.setenv("TRANSFORMER_JAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@contextmanager
def prepared_from(
    train: Pairs, held_out: Pairs, config: DataConfig = CONFIG, vocabulary: Vocabulary | None = None
) -> Iterator[Prepared]:
    """Prepare lines in a cache that is gone afterwards."""
    with pytest.MonkeyPatch.context() as patched, tempfile.TemporaryDirectory() as folder:
        patched.setenv("TRANSFORMER_JAX_CACHE", folder)
        patched.setitem(CORPORA, "number_words", lambda _: Lines(train, held_out))
        yield prepare(config, vocabulary)


def content(folder: Path) -> dict[str, bytes]:
    """Return all files but the locks, which are empty."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".lock"
    }


def sequences(prepared: Prepared, split: Split) -> list[list[list[int]]]:
    """Return the pieces of all sources, and of all targets."""
    return [
        [row.tolist() for row in np.split(ragged.flat, ragged.offsets[1:-1])]
        for ragged in prepared.tokens(split)
    ]


@pytest.mark.parametrize("split", SPLITS)
def test_pieces_are_those_of_the_corpus_in_order(split: Split, cache: Path) -> None:
    prepared = prepare(CONFIG)
    assert prepared.folder.is_relative_to(cache)
    lines = [list(side) for side in zip(*NumberWords(300).read(split), strict=True)]
    assert sequences(prepared, split) == [prepared.vocabulary.target.encode(side) for side in lines]
    if split != "train":
        assert list(prepared.lines(split)) == lines


@pytest.mark.usefixtures("cache")
def test_a_vocabulary_of_more_than_65536_pieces_has_room_for_each() -> None:
    class Many(Tokenizer):
        def __len__(self) -> int:
            return 2**16 + 1

        def encode(self, lines: Sequence[str]) -> list[list[int]]:
            return [[2**16, EOS] for _ in lines]

    prepared = prepare(CONFIG, Vocabulary.shared(Many(TOKENIZER.model)))
    assert sequences(prepared, "dev")[0] == [[2**16, EOS]] * 500


def test_a_second_call_reads_what_the_first_one_kept(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepare(CONFIG)
    kept = {path: path.stat().st_mtime_ns for path in cache.rglob("*") if path.is_file()}
    # Without a method that reads, the text can only come from the cache.
    monkeypatch.delattr(NumberWords, "read")
    second = prepare(CONFIG)
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*") if path.is_file()} == kept
    assert second.folder == first.folder
    assert second.report == first.report
    assert second.vocabulary.target.model == first.vocabulary.target.model


@pytest.mark.usefixtures("cache")
def test_pairs_that_are_too_long_are_left_out_of_training_only_and_counted() -> None:
    prepared = prepare(SHORT)
    for split in SPLITS:
        longest = [
            max(len(row) for row in prepared.vocabulary.target.encode(pair))
            for pair in NumberWords(300).read(split)
        ]
        too_long = sum(length > SHORT.max_length for length in longest)
        assert 0 < too_long < len(longest)
        report = prepared.report[split]
        assert report["pairs"] == len(longest)
        assert report["kept"] == len(sequences(prepared, split)[0])
        if split == "train":
            assert report["too long"] == too_long
            assert report["kept"] + too_long == len(longest)
            kept = [row for side in sequences(prepared, split) for row in side]
            assert max(map(len, kept)) <= SHORT.max_length
        else:
            assert report == {"pairs": len(longest), "kept": len(longest)}


def test_nothing_is_left_out_of_what_is_scored() -> None:
    odd = [
        ("", ""),
        (" ", "x"),
        ("<s>", "</s>"),
        ("a\0b", "a\x1bb"),
        ("one " * 400, "eins"),
        ("a\u2028b", "a\u0085b"),
        ("a\x0cb", "a\x1cb"),
        ("a\u2029", "\u2029b"),
        ("\ufeffone", "\u2581eins"),
    ]
    with prepared_from(WORDS, odd, SHORT) as prepared:
        assert list(zip(*prepared.lines("dev"), strict=True)) == odd
        assert list(zip(*prepared.lines("test"), strict=True)) == odd[::-1]
        assert prepared.report["dev"] == {"pairs": len(odd), "kept": len(odd)}
        encoded = [prepared.vocabulary.target.encode(side) for side in prepared.lines("dev")]
        assert sequences(prepared, "dev") == encoded
        assert encoded[0][0] == [EOS]


def test_a_line_too_long_to_be_scored_is_refused() -> None:
    whole, longer = "x" * MAX_LINE_BYTES, "é" * (MAX_LINE_BYTES // 2) + "x"
    with prepared_from(WORDS, [("one", whole)], vocabulary=VOCABULARY) as prepared:
        assert prepared.report["dev"]["kept"] == 1
    with (
        pytest.raises(DataError, match=r"dev of lines has a line of more than 65536 bytes, which"),
        prepared_from(WORDS, [("one", longer)], vocabulary=VOCABULARY),
    ):
        pass


def reason(pair: tuple[str, str], config: DataConfig) -> str:
    """Return what becomes of a pair, by the words of the documentation."""
    source, target = pair
    if not source.strip() or not target.strip():
        return "empty"
    if any(len(line.encode()) > MAX_LINE_BYTES for line in pair):
        return "too long"
    special = {"\ufeff", "\u2028", "\u2029", "\u2581", "\u2585"}
    is_control = [ord(c) < 32 or 127 <= ord(c) < 160 or c in special for c in source + target]
    marks = ["<pad>", "<s>", "</s>", "<unk>"]
    if sum(is_control) > (source + target).count("\t") or any(
        mark in line for mark in marks for line in pair
    ):
        return "control symbols"
    lengths = [len(row) for row in TOKENIZER.encode(pair)]
    if min(lengths) == 1:
        return "empty"
    if max(lengths) > config.max_length:
        return "too long"
    if max(lengths) - 1 > config.max_ratio * (min(lengths) - 1):
        return "ratio"
    return "kept"


NUMBERS = st.sampled_from([word for pair in WORDS[:9] for word in pair])
LINES = (
    st.lists(
        NUMBERS
        | st.text(st.characters(exclude_characters="\n", codec="utf-8"), max_size=5)
        | st.sampled_from(["", " ", "\t", "\xa0", "\0", "\x85", "\u2028", "\u2581", "\ufeff"])
        | st.sampled_from(["<s>", "</s>", "<pad>", "<unk>", "x" * 99, "日" * 22_000]),
        max_size=4,
    )
    .map(" ".join)
    .filter(lambda line: "\n" not in line)
)


@given(
    st.lists(st.tuples(LINES | NUMBERS, LINES | NUMBERS), max_size=30),
    st.integers(8, 60),
    st.floats(1, 5),
)
@settings(deadline=None, derandomize=True, max_examples=100)
def test_every_pair_is_kept_or_counted_by_the_reason_why_not(
    pairs: Pairs, max_length: int, max_ratio: float
) -> None:
    config = replace(CONFIG, max_length=max_length, max_ratio=max_ratio)
    pairs = [("one", "one"), *pairs]
    with prepared_from(pairs, [("one", "eins")], config, VOCABULARY) as prepared:
        report = prepared.report["train"]
        assert report.pop("pairs") == len(pairs) == sum(report.values())
        reasons = [reason(pair, config) for pair in pairs]
        assert report == Counter(reasons)
        kept = [pair for pair, why in zip(pairs, reasons, strict=True) if why == "kept"]
        sides = [TOKENIZER.encode(side) for side in zip(*kept, strict=True)]
        assert sequences(prepared, "train") == sides


def test_control_symbols_are_those_that_no_sentence_holds() -> None:
    found = {chr(code) for code in range(0x110000) if CONTROL.search(chr(code))}
    expected = {chr(code) for code in (*range(32), *range(127, 160))} - {"\t"}
    assert found == expected | set("\u2028\u2029\ufeff\u2581\u2585")
    assert not any(CONTROL.search(text) for text in ("<b>", "< s >", "a < b > c", "pad", "\u2047"))


def test_a_ratio_of_one_keeps_pairs_of_the_same_length_only() -> None:
    config = replace(CONFIG, max_ratio=1.0)
    same = [(source, source) for source, _ in WORDS]
    with prepared_from([*WORDS, *same], WORDS[:1], config, VOCABULARY) as prepared:
        source, target = (side.lengths for side in prepared.tokens("train"))
        np.testing.assert_array_equal(source, target)
        assert prepared.report["train"]["ratio"] > 0


@pytest.mark.usefixtures("cache")
def test_a_corpus_with_no_training_pair_left_is_refused() -> None:
    with pytest.raises(DataError) as told:
        prepare(DataConfig(num_pairs=300, vocab_size=256, max_length=1))
    assert str(told.value) == (
        "no pair of number words, en-de, 300 is left to train on, of 300: 300 too long "
        "(data.max_length 1, data.max_ratio 9)"
    )


@pytest.mark.parametrize("line", ["", "\0", "x" * (MAX_TRAINING_LINE + 1)])
def test_a_corpus_with_nothing_to_learn_from_is_refused(line: str) -> None:
    with (
        pytest.raises(DataError, match="nothing to learn a vocabulary from: all 9 pairs of lines"),
        prepared_from([(line, line)] * 9, WORDS[:1]),
    ):
        pass


def test_the_fingerprint_is_of_the_content_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fingerprint(cache: str, config: DataConfig) -> str:
        monkeypatch.setenv("TRANSFORMER_JAX_CACHE", str(tmp_path / cache))
        prepared = prepare(config)
        assert prepared.folder.is_relative_to(tmp_path / cache)
        return prepared.fingerprint

    one = fingerprint("one", CONFIG)
    assert fingerprint("two", CONFIG) == one
    others = [
        DataConfig(num_pairs=300, vocab_size=200),
        DataConfig(num_pairs=301, vocab_size=256),
        SHORT,
    ]
    assert len({one, *(fingerprint("one", other) for other in others)}) == 4


def test_a_given_tokenizer_is_used_and_none_is_learned(cache: Path) -> None:
    prepared = prepare(CONFIG, VOCABULARY)
    assert prepared.vocabulary.target.model == TOKENIZER.model
    assert prepared.report["vocabulary"] == {"pieces": 100, "sha256": TOKENIZER.digest}
    sources = [source for source, _ in NumberWords(300).read("dev")]
    assert sequences(prepared, "dev")[0] == TOKENIZER.encode(sources)
    assert list(cache.rglob("*.model")) == []
    assert prepare(CONFIG).folder != prepared.folder


@pytest.mark.usefixtures("cache")
def test_a_vocabulary_is_learnt_from_pairs_spread_evenly_over_the_fit_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pairs = [(f"one {number}", f"eins {number}") for number in range(95)]
    pairs[20], pairs[30] = ("", "empty"), ("x" * (MAX_TRAINING_LINE + 1), "short")
    monkeypatch.setattr(prepare_module, "SAMPLE_PAIRS", 10)
    monkeypatch.setitem(CORPORA, "number_words", lambda _: Lines(pairs, WORDS[:1]))
    learnt: list[list[str]] = []

    def learn(lines: Iterator[str], _: int) -> Tokenizer:
        learnt.append(list(lines))
        return TOKENIZER

    monkeypatch.setattr(Tokenizer, "train", learn)
    prepare(DataConfig(vocab_size=100))
    spread = [line for number in (0, 10, 40, 50, 60, 70, 80, 90) for line in pairs[number]]
    assert learnt == [[*spread[:4], "short", *spread[4:]]]
    # Other limits and another time: the same text gives the same vocabulary.
    prepare(DataConfig(vocab_size=100, max_length=20, max_ratio=2.0))
    assert len(learnt) == 1


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(("most", "step"), [(10_000, 1), (9_999, 2), (5_000, 2), (2_500, 4)])
def test_a_vocabulary_is_learnt_from_so_many_bytes_spread_evenly(
    most: int, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs: Pairs = [(f"{number:02} " + "ä" * 26, "x" * 45) for number in range(100)]
    monkeypatch.setattr(prepare_module, "SAMPLE_BYTES", most)
    monkeypatch.setitem(CORPORA, "number_words", lambda _: Lines(pairs, WORDS[:1]))
    learnt: list[str] = []

    def learn(lines: Iterator[str], _: int) -> Tokenizer:
        learnt.extend(lines)
        return TOKENIZER

    monkeypatch.setattr(Tokenizer, "train", learn)
    prepare(DataConfig(vocab_size=100, max_ratio=100.0))
    assert learnt == [line for pair in pairs[::step] for line in pair]
    assert len("".join(learnt).encode()) <= most


@pytest.mark.usefixtures("cache")
def test_a_source_vocabulary_that_is_too_small_is_told_with_its_own_option() -> None:
    with pytest.raises(DataError, match=r"^no vocabulary of 9 pieces .*data\.source_vocab_size"):
        prepare(replace(CONFIG, source_vocab_size=9))


@pytest.mark.usefixtures("cache")
def test_text_that_fails_while_a_vocabulary_is_learnt_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Failing(Lines):
        def read(self, split: Split, start: int = 0) -> Iterator[tuple[str, str]]:
            yield from super().read(split, start)
            raise DataError("train.en was changed while it was read")

    monkeypatch.setitem(CORPORA, "number_words", lambda _: Failing(WORDS, WORDS))
    with pytest.raises(DataError, match=r"^train\.en was changed while it was read$"):
        prepare(CONFIG)


class Encoder:
    """Counts the lines that are encoded, and breaks off when a number of calls is reached."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lines = self.calls = 0
        self.breaks_at: int | None = None
        self.error: BaseException = KeyboardInterrupt()
        encode = Tokenizer.encode

        def counted(tokenizer: Tokenizer, lines: list[str]) -> list[list[int]]:
            if self.calls == self.breaks_at:
                self.breaks_at = None
                raise self.error
            self.calls += 1
            self.lines += len(lines)
            return encode(tokenizer, lines)

        monkeypatch.setattr(Tokenizer, "encode", counted)


CHUNK = 8
# 7 chunks, 3 and 3; each has a call for its sources and one for its targets.
SMALL = Lines([*WORDS[:48], ("", ""), WORDS[49]], WORDS[:20])
LINES_OF_SMALL = 2 * (49 + 20 + 20)


@pytest.fixture
def encoder(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Encoder:
    """Let a test prepare `SMALL` chunk by chunk, in a cache of its own."""
    assert not cache.exists()
    monkeypatch.setattr(encode_module, "CHUNK_PAIRS", CHUNK)
    monkeypatch.setitem(CORPORA, "number_words", lambda _: SMALL)
    return Encoder(monkeypatch)


@pytest.fixture
def whole(encoder: Encoder, cache: Path) -> dict[str, bytes]:
    """Return what an uninterrupted preparation of `SMALL` leaves; the cache is empty again."""
    prepare(CONFIG, VOCABULARY)
    assert (encoder.calls, encoder.lines) == (26, LINES_OF_SMALL)
    files = content(cache)
    shutil.rmtree(cache)
    encoder.lines = encoder.calls = 0
    return files


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError(), OSError(28, "full")])
def test_wherever_a_preparation_is_interrupted_it_goes_on_and_ends_the_same(
    error: BaseException, encoder: Encoder, whole: dict[str, bytes], cache: Path
) -> None:
    encoder.error = error
    for place in range(26):
        encoder.breaks_at, encoder.lines, encoder.calls = place, 0, 0
        with pytest.raises(StorageError if isinstance(error, OSError) else type(error)):
            prepare(CONFIG, VOCABULARY)
        assert not list(cache.rglob("report.json"))
        prepare(CONFIG, VOCABULARY)
        assert content(cache) == whole
        # A chunk was broken off between its sources and its targets, or before both.
        again = encoder.lines - LINES_OF_SMALL
        assert 0 <= again <= (CHUNK if place % 2 else 0)
        shutil.rmtree(cache)


def test_a_preparation_that_is_interrupted_again_and_again_comes_to_its_end(
    encoder: Encoder, whole: dict[str, bytes], cache: Path
) -> None:
    for _ in range(13):
        encoder.breaks_at = encoder.calls + 3
        with pytest.raises(KeyboardInterrupt):
            prepare(CONFIG, VOCABULARY)
        encoder.calls -= 1
        if encoder.calls >= 24:
            break
    prepare(CONFIG, VOCABULARY)
    assert content(cache) == whole


@pytest.mark.parametrize("damage", ["half written", "journal", "shorter", "gone", "report"])
def test_whatever_an_interruption_left_behind_it_ends_the_same(
    damage: str, encoder: Encoder, whole: dict[str, bytes], cache: Path
) -> None:
    for place in range(1, 26, 4):
        encoder.breaks_at, encoder.calls = place, 0
        with pytest.raises(KeyboardInterrupt):
            prepare(CONFIG, VOCABULARY)
        (partial,) = cache.rglob("*.partial")
        files = [path for path in partial.iterdir() if "journal" not in path.name]
        journals = list(partial.glob("*.journal.json"))
        for path in {"journal": journals, "report": []}.get(damage, files):
            data = path.read_bytes()
            if damage == "half written":
                path.write_bytes(data + b"half")
            elif damage == "gone":
                path.unlink()
            else:
                path.write_bytes(data[: len(data) // 2])
        if damage == "report":
            # Of an earlier attempt that did not come to the renaming.
            (partial / "report.json").write_text("{}")
        prepare(CONFIG, VOCABULARY)
        assert content(cache) == whole
        shutil.rmtree(cache)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, OSError])
def test_who_is_interrupted_at_the_very_end_has_nothing_to_encode_again(
    error: type[BaseException],
    encoder: Encoder,
    whole: dict[str, bytes],
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(*_: object) -> str:
        raise error

    for owner, name in ((prepare_module, "_fingerprint"), (Path, "unlink"), (Path, "rename")):
        encoder.lines = 0
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, interrupt)
            with pytest.raises(StorageError if error is OSError else error):
                prepare(CONFIG, VOCABULARY)
        assert encoder.lines == LINES_OF_SMALL
        prepare(CONFIG, VOCABULARY)
        # Between the journals' end and the renaming all is lost, but that is a moment.
        assert encoder.lines == LINES_OF_SMALL * (2 if name == "rename" else 1)
        assert content(cache) == whole
        shutil.rmtree(cache)


PREPARE = """
import os, signal, sys
from transformer_jax.config import DataConfig
from transformer_jax.data import encode
from transformer_jax.data.prepare import prepare

encode.CHUNK_PAIRS = 16
left = int(sys.argv[1])

def progress(doing, done, total):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)

prepare(DataConfig(num_pairs=300, vocab_size=256), progress=progress)
"""


def test_a_killed_process_is_gone_on_with_by_another(cache: Path, tmp_path: Path) -> None:
    def run(home: Path, kill_at: int) -> int:
        return subprocess.run(
            [sys.executable, "-c", PREPARE, str(kill_at)],
            env={**os.environ, "TRANSFORMER_JAX_CACHE": str(home)},
            check=False,
        ).returncode

    # While the vocabulary is learnt, in the training set, in the test set.
    for kill_at in (2, 12, 70):
        assert run(cache, kill_at) == -signal.SIGKILL
        assert not list(cache.rglob("report.json"))
    assert run(cache, -1) == 0
    prepare(CONFIG)
    assert run(tmp_path / "other", -1) == 0
    assert content(cache) == content(tmp_path / "other")


def test_two_that_prepare_at_once_share_one_whole_corpus(
    encoder: Encoder, whole: dict[str, bytes], cache: Path
) -> None:
    waiting = threading.Event()
    told: list[str] = []
    found: list[Prepared] = []

    def first(doing: str, done: int, total: int) -> None:
        assert done <= total
        if doing.startswith("encoding"):
            assert waiting.wait(60)

    def second(doing: str, done: int, total: int) -> None:
        assert done <= total
        told.append(doing)
        waiting.set()

    def begin() -> None:
        found.append(prepare(CONFIG, VOCABULARY, progress=first))

    thread = threading.Thread(target=begin)
    thread.start()
    while not encoder.calls:
        pass
    found.append(prepare(CONFIG, VOCABULARY, progress=second))
    thread.join()
    assert told == ["waiting for another process that prepares the same text"]
    assert encoder.lines == LINES_OF_SMALL
    assert found[0].folder == found[1].folder
    assert found[0].report == found[1].report
    assert content(cache) == whole


def test_a_damaged_corpus_is_made_anew(
    encoder: Encoder, whole: dict[str, bytes], cache: Path
) -> None:
    folder = prepare(CONFIG, VOCABULARY).folder
    report = json.loads((folder / "report.json").read_bytes())
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        cuts = [data[: len(data) * tenths // 10] for tenths in (0, 1, 5, 9)]
        if path.name == "report.json":
            lost = {key: value for key, value in report.items() if key != "fingerprint"}
            cuts += [b"[]", b"null", b"{}", b'{"sizes": {}}', json.dumps(lost).encode()]
        for cut in cuts:
            path.write_bytes(cut)
            prepare(CONFIG, VOCABULARY)
            assert content(cache) == whole
        path.unlink()
        encoder.lines = 0
        prepare(CONFIG, VOCABULARY)
        assert encoder.lines == LINES_OF_SMALL
        assert content(cache) == whole


def is_model(data: bytes) -> bool:
    try:
        Tokenizer(data)
    except DataError:
        return False
    return True


def test_a_damaged_vocabulary_is_learnt_anew(cache: Path) -> None:
    prepared = prepare(CONFIG)
    (path,) = cache.rglob("*.model")
    model = prepared.vocabulary.target.model
    # Up to the end of any piece the beginning of a model is a model itself.
    smaller = next(model[:end] for end in range(len(model) - 100, 0, -1) if is_model(model[:end]))
    assert len(Tokenizer(smaller)) < len(Tokenizer(model))
    for damaged in (b"", model[:-1], b"no model", b"\0" * 999, smaller):
        path.write_bytes(damaged)
        assert prepare(CONFIG).folder == prepared.folder
        assert path.read_bytes() == model
    path.with_suffix(".sha256").unlink()
    assert prepare(CONFIG).folder == prepared.folder


def write_texts(folder: Path, pairs: Pairs) -> DataConfig:
    """Write pairs as files; return the config that names them."""
    folder.mkdir(exist_ok=True)
    for name, side in zip(("en", "de"), zip(*pairs, strict=True), strict=True):
        for split, lines in (("train", side), ("dev", side[:5])):
            (folder / f"{split}.{name}").write_text("".join(f"{x}\n" for x in lines), "utf-8")
    return DataConfig(
        corpus="text",
        train=("train.en", "train.de"),
        dev=("dev.en", "dev.de"),
        folder=str(folder),
        vocab_size=100,
    )


def test_what_a_run_began_with_is_found_though_its_files_are_gone(
    cache: Path, tmp_path: Path
) -> None:
    config = write_texts(tmp_path / "texts", WORDS)
    first = prepare(config)
    shutil.rmtree(tmp_path / "texts")
    with pytest.raises(DataError, match="there is no file"):
        prepare(config)
    with pytest.raises(DataError, match="there is no file"):
        prepare(config, first.vocabulary, "0" * 64)
    again = prepare(config, first.vocabulary, first.fingerprint)
    assert (again.folder, again.report) == (first.folder, first.report)
    # What is still being made is not yet there.
    shutil.move(first.folder, first.folder.with_suffix(".partial"))
    with pytest.raises(DataError, match="there is no file"):
        prepare(config, first.vocabulary, first.fingerprint)
    assert cache.exists()


def test_what_a_run_began_with_may_lie_elsewhere_but_not_be_another(
    cache: Path, tmp_path: Path
) -> None:
    first = prepare(write_texts(tmp_path / "texts", WORDS))
    shutil.rmtree(cache)
    moved = write_texts(tmp_path / "moved", WORDS)
    assert prepare(moved, first.vocabulary, first.fingerprint).report == first.report
    shutil.rmtree(cache)
    for other in (
        write_texts(tmp_path / "other", WORDS[::-1]),
        write_texts(tmp_path / "fewer", WORDS[:-1]),
        replace(moved, max_length=20),
    ):
        with pytest.raises(DataError, match="is not the text that the run began with") as told:
            prepare(other, first.vocabulary, first.fingerprint)
        assert str(told.value).startswith("train.en + train.de ")


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("vocabulary", [None, VOCABULARY])
def test_a_fault_in_any_file_is_told_before_anything_is_learnt_or_encoded(
    vocabulary: Vocabulary | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_texts(tmp_path / "texts", WORDS)
    with (tmp_path / "texts" / "dev.de").open("ab") as file:
        file.write(b"one\n\xff\n")
    encoder = Encoder(monkeypatch)
    monkeypatch.setattr(Tokenizer, "train", lambda *_: pytest.fail("it was learnt"))
    with pytest.raises(DataError, match=r"^dev\.de, line 7: no UTF-8"):
        prepare(config, vocabulary)
    assert encoder.calls == 0


@pytest.mark.usefixtures("cache")
def test_long_lines_are_encoded_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs: Pairs = [("one " * 100, "eins " * 80)] * 50
    sizes: list[int] = []
    encode = Tokenizer.encode

    def noted(tokenizer: Tokenizer, lines: list[str]) -> list[list[int]]:
        sizes.append(sum(map(len, lines)))
        return encode(tokenizer, lines)

    whole = prepare_with(pairs, monkeypatch)
    monkeypatch.setattr(Tokenizer, "encode", noted)
    monkeypatch.setattr(encode_module, "CHUNK_CHARACTERS", 2000)
    assert prepare_with(pairs, monkeypatch) == whole
    assert max(sizes) <= 2000


def prepare_with(pairs: Pairs, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder, monkeypatch.context() as patched:
        patched.setenv("TRANSFORMER_JAX_CACHE", folder)
        patched.setitem(CORPORA, "number_words", lambda _: Lines(pairs, WORDS[:1]))
        return content(prepare(replace(CONFIG, max_length=2000), VOCABULARY).folder)


STREAMS = r"""
import re, sys
from pathlib import Path
from transformer_jax.config import DataConfig
from transformer_jax.data.prepare import prepare

config = DataConfig(
    corpus="text", train=("a", "b"), dev=("c", "d"), folder=sys.argv[1], vocab_size=1000
)
report = prepare(config).report["train"]
# Not `getrusage`: it knows of the process too that this one was forked from.
most = int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])
print(report, most)
assert report == eval(sys.argv[2]), report
assert most < 1_000_000
"""


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["one line of 100 MB", "5 million lines", "many lines of 60 KB"])
def test_text_of_any_size_goes_through_little_memory(
    kind: str, cache: Path, tmp_path: Path
) -> None:
    report = {"pairs": 100, "kept": 100}
    numbers = list(NumberWords(20_000).read("train"))
    for name, side in zip("abcd", (*zip(*numbers, strict=True),) * 2, strict=True):
        with (tmp_path / name).open("w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in side[:100])
            if name in "cd":
                continue
            if kind == "one line of 100 MB":
                file.write("x" * 100_000_000 + "\n")
                report = {"pairs": 101, "kept": 100, "too long": 1}
            elif kind == "5 million lines":
                for _ in range(250):
                    file.writelines(f"{line}\n" for line in side)
                report = {"pairs": 5_000_100, "kept": 5_000_100}
            else:
                file.writelines(f"{' '.join(side[n : n + 1000])}\n" for n in range(1000))
                report = {"pairs": 1100, "kept": 100, "too long": 1000}
    ended = subprocess.run(
        [sys.executable, "-c", STREAMS, str(tmp_path), repr(report)],
        env={**os.environ, "TRANSFORMER_JAX_CACHE": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_a_cache_that_cannot_be_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRANSFORMER_JAX_CACHE", str(tmp_path / "file"))
    with pytest.raises(StorageError, match=r"the cache .* cannot be made") as told:
        prepare(CONFIG)
    assert str(tmp_path / "file") in str(told.value)
    assert "\n" not in str(told.value)


def test_a_cache_that_nobody_named_moves_to_where_it_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "temporary").mkdir()
    monkeypatch.delenv("TRANSFORMER_JAX_CACHE")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cache_folder("x") == tmp_path / "cache" / "transformer_jax" / "x"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    moved = cache_folder("x")
    assert moved == tmp_path / "temporary" / f"transformer_jax-{os.getuid()}" / "x"
    assert moved.is_dir()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder("x") == tmp_path / "home" / ".cache" / "transformer_jax" / "x"
