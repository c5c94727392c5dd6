"""Test that encoding keeps each pair or counts it as dropped, and uses little memory."""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp

import numpy as np
import pytest
from corpora import TOKENIZER, VOCABULARY, WORDS, InMemoryCorpus, Pairs, sequences
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_jax.config import DataConfig
from transformer_jax.data import encode
from transformer_jax.data.encode import CONTROL, SplitWriter
from transformer_jax.data.prepare import Prepared
from transformer_jax.data.splits import Split
from transformer_jax.data.text_files import MAX_LINE_BYTES
from transformer_jax.data.tokenizer import Tokenizer, Vocabulary
from transformer_jax.errors import DataError
from transformer_jax.progress import report_to
from transformer_jax.special_tokens import EOS

CONFIG = DataConfig(vocab_size=100)


def encode_pairs(
    folder: Path,
    pairs: Pairs,
    split: Split = "train",
    config: DataConfig = CONFIG,
    vocabulary: Vocabulary = VOCABULARY,
) -> Prepared:
    corpus, folder = InMemoryCorpus(pairs, pairs), Path(mkdtemp(dir=folder))
    outcome = SplitWriter(folder, corpus, split, vocabulary, config).write()
    return Prepared(folder, vocabulary, {split: outcome})


def expected_outcome(pair: tuple[str, str], config: DataConfig) -> str:
    """Return "kept", or the documented reason for dropping a training pair."""
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
    lengths = [len(tokens) for tokens in TOKENIZER.encode(pair)]
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
@settings(deadline=None, derandomize=True, max_examples=40)
def test_every_training_pair_is_kept_or_counted_with_a_reason(
    pairs: Pairs, max_length: int, max_ratio: float
) -> None:
    config = replace(CONFIG, max_length=max_length, max_ratio=max_ratio)
    pairs = [("one", "one"), *pairs]
    with TemporaryDirectory() as folder:
        prepared = encode_pairs(Path(folder), pairs, config=config)
        outcome = prepared.report["train"]
        assert outcome.pop("pairs") == len(pairs) == sum(outcome.values())
        outcomes = [expected_outcome(pair, config) for pair in pairs]
        assert outcome == Counter(outcomes)
        kept = [pair for pair, x in zip(pairs, outcomes, strict=True) if x == "kept"]
        encoded = [TOKENIZER.encode(side) for side in zip(*kept, strict=True)]
        assert sequences(prepared, "train") == encoded


def test_dev_and_test_keep_every_pair_and_its_exact_lines(tmp_path: Path) -> None:
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
    prepared = encode_pairs(tmp_path, odd, "dev", replace(CONFIG, max_length=12))
    assert list(zip(*prepared.lines("dev"), strict=True)) == odd
    assert prepared.report["dev"] == {"pairs": len(odd), "kept": len(odd)}
    encoded = [TOKENIZER.encode(side) for side in prepared.lines("dev")]
    assert sequences(prepared, "dev") == encoded
    assert encoded[0][0] == [EOS]


def test_a_line_that_is_too_long_to_score_is_refused(tmp_path: Path) -> None:
    longest, longer = "x" * MAX_LINE_BYTES, "é" * (MAX_LINE_BYTES // 2) + "x"
    assert encode_pairs(tmp_path, [("one", longest)], "dev").report["dev"]["kept"] == 1
    with pytest.raises(DataError, match=r"dev of lines has a line of more than 65536 bytes, which"):
        encode_pairs(tmp_path, [("one", longer)], "dev")


@pytest.mark.parametrize("split", ["dev", "test"])
def test_a_newline_in_a_line_that_must_be_scored_is_refused(split: Split, tmp_path: Path) -> None:
    pairs = [("one", "eins"), ("two\nthree", "zwei")]
    message = rf"^{split} of lines has a line with a newline, which begins with 'two\\nthree'$"
    with pytest.raises(DataError, match=message):
        encode_pairs(tmp_path, pairs, split)
    assert encode_pairs(tmp_path, pairs).report["train"]["control symbols"] == 1


def test_control_symbols_are_all_symbols_that_no_sentence_contains() -> None:
    matches = {chr(code) for code in range(0x110000) if CONTROL.search(chr(code))}
    expected = {chr(code) for code in (*range(32), *range(127, 160))} - {"\t"}
    assert matches == expected | set("\u2028\u2029\ufeff\u2581\u2585")
    assert not any(CONTROL.search(text) for text in ("<b>", "< s >", "a < b > c", "pad", "\u2047"))


def test_a_maximum_ratio_of_one_keeps_only_pairs_of_equal_length(tmp_path: Path) -> None:
    pairs = [*WORDS, *((source, source) for source, _ in WORDS)]
    prepared = encode_pairs(tmp_path, pairs, config=replace(CONFIG, max_ratio=1.0))
    source, target = (side.lengths for side in prepared.tokens("train"))
    np.testing.assert_array_equal(source, target)
    assert prepared.report["train"]["ratio"] > 0


def test_a_training_split_without_a_fit_pair_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        encode_pairs(tmp_path, WORDS, config=replace(CONFIG, max_length=1))
    assert str(caught.value) == (
        "lines: none of the 50 pairs can be used for training: 50 too long "
        "(data.max_length 1, data.max_ratio 9)"
    )


def test_token_ids_above_65535_are_stored_exactly(tmp_path: Path) -> None:
    class LargeTokenizer(Tokenizer):
        def __len__(self) -> int:
            return 2**16 + 1

        def encode(self, lines: Sequence[str]) -> list[list[int]]:
            return [[2**16, EOS] for _ in lines]

    vocabulary = Vocabulary.share(LargeTokenizer(TOKENIZER.model))
    prepared = encode_pairs(tmp_path, WORDS, "dev", vocabulary=vocabulary)
    assert sequences(prepared, "dev")[0] == [[2**16, EOS]] * len(WORDS)


def test_a_chunk_is_limited_in_characters_and_does_not_change_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs: Pairs = [("one " * 100, "eins " * 80)] * 50
    config = replace(CONFIG, max_length=2000)
    whole = sequences(encode_pairs(tmp_path, pairs, config=config), "train")
    characters: list[int] = []

    class CountingTokenizer(Tokenizer):
        def encode(self, lines: Sequence[str]) -> list[list[int]]:
            characters.append(sum(map(len, lines)))
            return super().encode(lines)

    monkeypatch.setattr(encode, "CHUNK_CHARACTERS", 2000)
    counting = Vocabulary.share(CountingTokenizer(TOKENIZER.model))
    in_chunks = encode_pairs(tmp_path, pairs, config=config, vocabulary=counting)
    assert sequences(in_chunks, "train") == whole
    assert max(characters) <= 2000


def test_bpe_dropout_splits_every_pair_at_random_in_every_sample(tmp_path: Path) -> None:
    config = replace(CONFIG, bpe_dropout=0.1, bpe_dropout_samples=3, max_ratio=99)
    prepared = encode_pairs(tmp_path, WORDS, config=config)
    assert prepared.report["train"] == {"pairs": 150, "kept": 150}
    for i, encoded in enumerate(sequences(prepared, "train")):
        assert TOKENIZER.decode(encoded) == [pair[i] for pair in WORDS] * 3
        samples = [encoded[j : j + 50] for j in range(0, 150, 50)]
        plain = TOKENIZER.encode([pair[i] for pair in WORDS])
        assert all(a != b for a, b in itertools.combinations([plain, *samples], 2))
    assert encode_pairs(tmp_path, WORDS, "dev", config).report["dev"]["pairs"] == 50


def test_interrupted_sampling_continues_with_the_same_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode, "CHUNK_PAIRS", 20)
    config = replace(CONFIG, bpe_dropout=0.1, bpe_dropout_samples=2)
    writer = SplitWriter(tmp_path, InMemoryCorpus(WORDS, WORDS), "train", VOCABULARY, config)

    def interrupt(_: str, done: int, __: int) -> None:
        if done == 60:
            raise KeyboardInterrupt

    with report_to(interrupt), pytest.raises(KeyboardInterrupt):
        writer.write()
    outcome = writer.write()
    resumed = sequences(Prepared(tmp_path, VOCABULARY, {}), "train")
    whole = encode_pairs(tmp_path, WORDS, config=config)
    assert outcome == whole.report["train"]
    assert resumed == sequences(whole, "train")


def test_progress_is_reported_after_each_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode, "CHUNK_PAIRS", 20)
    reports: list[tuple[str, int, int]] = []
    corpus = InMemoryCorpus(WORDS, WORDS)
    with report_to(lambda activity, done, total: reports.append((activity, done, total))):
        SplitWriter(tmp_path, corpus, "train", VOCABULARY, CONFIG).write()
    assert reports == [("encoding train", done, 50) for done in (20, 40, 50)]
