"""Text becomes pieces once; what is kept is whole, the same anywhere, and nothing is lost."""

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from transformer_jax.cache import cache_folder
from transformer_jax.config import DataConfig
from transformer_jax.data import prepare as prepare_module
from transformer_jax.data.corpora import SOURCES
from transformer_jax.data.numberwords import NumberWords
from transformer_jax.data.prepare import Prepared, prepare
from transformer_jax.data.splits import SPLITS, Split
from transformer_jax.data.tokenizer import Tokenizer, Vocabulary
from transformer_jax.errors import DataError, StorageError
from transformer_jax.pieces import EOS

CONFIG = DataConfig(num_pairs=300, vocab_size=256)
# Half of the training pairs have more pieces than this.
SHORT = DataConfig(num_pairs=300, vocab_size=256, max_length=12)


class Lines:
    """A corpus of given lines."""

    bleu_tokenizer = "13a"

    def __init__(
        self,
        train: list[tuple[str, str]],
        held_out: list[tuple[str, str]],
    ) -> None:
        self._splits: dict[Split, list[tuple[str, str]]] = {
            "train": train,
            "dev": held_out,
            "test": held_out[::-1],
        }
        self.identity = json.dumps(self._splits)

    def read(self, split: Split) -> Iterator[tuple[str, str]]:
        yield from self._splits[split]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a test a cache of its own."""
    monkeypatch.setenv("TRANSFORMER_JAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def files(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return when each file was written, and its content."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file()
    }


def sequences(prepared: Prepared, split: Split) -> list[list[list[int]]]:
    """Return the pieces of all sources, and of all targets."""
    return [
        [row.tolist() for row in np.split(ragged.flat, ragged.offsets[1:-1])]
        for ragged in prepared.pieces(split)
    ]


@pytest.mark.parametrize("split", SPLITS)
def test_pieces_are_those_of_the_corpus_in_order(split: Split, cache: Path) -> None:
    prepared = prepare(CONFIG)
    assert prepared.folder.is_relative_to(cache)
    lines = [list(side) for side in zip(*NumberWords(300).read(split), strict=True)]
    assert sequences(prepared, split) == [prepared.vocabulary.target.encode(side) for side in lines]
    if split != "train":
        assert list(prepared.lines(split)) == lines


def test_a_second_call_reads_what_the_first_one_kept(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepare(CONFIG)
    kept = files(cache)
    # Without a method that reads, the text can only come from the cache.
    monkeypatch.delattr(NumberWords, "read")
    second = prepare(CONFIG)
    assert files(cache) == kept
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
            assert report["kept"] == len(longest)


def test_a_pair_with_an_empty_side_is_left_out_of_training_only(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = Lines([("one", "eins"), ("", "zwei"), ("three", "")], [("four", "vier"), ("", "")])
    monkeypatch.setitem(SOURCES, "embedded", lambda _: corpus)
    prepared = prepare(DataConfig(vocab_size=40))
    assert prepared.folder.is_relative_to(cache)
    assert prepared.report["train"] == {"pairs": 3, "kept": 1, "empty": 2}
    assert prepared.report["dev"] == {"pairs": 2, "kept": 2}
    assert sequences(prepared, "dev")[0][1] == [EOS]
    assert prepared.lines("dev") == (["four", ""], ["vier", ""])


@pytest.mark.usefixtures("cache")
def test_a_corpus_with_no_training_pair_left_is_refused() -> None:
    with pytest.raises(DataError, match="no pair of train is left of 300: 300 too long") as told:
        prepare(DataConfig(num_pairs=300, vocab_size=256, max_length=1))
    assert "\n" not in str(told.value)


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
    lines = [line for pair in NumberWords(50).read("train") for line in pair]
    tokenizer = Tokenizer.learn(lines, 100)
    prepared = prepare(CONFIG, Vocabulary.shared(tokenizer))
    assert prepared.vocabulary.target.model == tokenizer.model
    assert prepared.report["vocabulary"] == {"pieces": 100, "sha256": tokenizer.digest}
    sources = [source for source, _ in NumberWords(300).read("dev")]
    assert sequences(prepared, "dev")[0] == tokenizer.encode(sources)
    assert list(cache.rglob("*.model")) == []
    assert prepare(CONFIG).folder != prepared.folder


@pytest.mark.usefixtures("cache")
def test_only_a_newline_parts_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = [("a\u2028b", "a\u0085b"), ("a\x0cb", "a\x1cb"), ("a\u2029", "\u2029b")]
    monkeypatch.setitem(SOURCES, "embedded", lambda _: Lines([("a b", "b a")], odd))
    prepared = prepare(DataConfig(vocab_size=40))
    assert list(zip(*prepared.lines("dev"), strict=True)) == odd
    assert list(zip(*prepared.lines("test"), strict=True)) == odd[::-1]
    assert [len(side) for side in sequences(prepared, "dev")] == [3, 3]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, OSError])
def test_an_interrupted_preparation_leaves_no_half_of_a_corpus(
    cache: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def interrupt(_: Path) -> str:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(prepare_module, "_fingerprint", interrupt)
        with pytest.raises(StorageError if error is OSError else error):
            prepare(CONFIG)
    assert list((cache / "corpora").iterdir()) == []
    assert len(sequences(prepare(CONFIG), "train")[0]) == 300


def test_two_that_prepare_at_once_share_one_whole_corpus(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fingerprint = prepare_module._fingerprint
    faster: list[Prepared] = []

    def after_another(folder: Path) -> str:
        monkeypatch.setattr(prepare_module, "_fingerprint", fingerprint)
        faster.append(prepare(CONFIG))
        return fingerprint(folder)

    monkeypatch.setattr(prepare_module, "_fingerprint", after_another)
    slower = prepare(CONFIG)
    assert list((cache / "corpora").iterdir()) == [slower.folder]
    assert [other.report for other in faster] == [slower.report]


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
