"""Test which lines a vocabulary is trained on, and that a damaged vocabulary is retrained."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from corpora import TOKENIZER, WORDS, InMemoryCorpus, Pairs, use_corpus

from transformer_jax.config import DataConfig
from transformer_jax.data import vocabulary as vocabulary_module
from transformer_jax.data.prepare import prepare_text
from transformer_jax.data.splits import Split
from transformer_jax.data.tokenizer import MAX_TRAINING_LINE, Tokenizer
from transformer_jax.errors import DataError

CONFIG = DataConfig(num_pairs=300, vocab_size=256)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test an empty cache."""
    monkeypatch.setenv("TRANSFORMER_JAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def record_training(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Stub out tokenizer training, and return a list that records the lines passed to each call."""
    samples: list[list[str]] = []

    def train(lines: Iterator[str], *_: object) -> Tokenizer:
        samples.append(list(lines))
        return TOKENIZER

    monkeypatch.setattr(Tokenizer, "train", train)
    return samples


def test_a_vocabulary_is_trained_on_fit_pairs_spread_evenly_over_the_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pairs = [(f"one {number}", f"eins {number}") for number in range(95)]
    pairs[20], pairs[30] = ("", "empty"), ("x" * (MAX_TRAINING_LINE + 1), "short")
    monkeypatch.setattr(vocabulary_module, "SAMPLE_PAIRS", 10)
    use_corpus(monkeypatch, InMemoryCorpus(pairs, WORDS[:1]))
    samples = record_training(monkeypatch)
    prepare_text(replace(CONFIG, vocab_size=100))
    spread = [line for number in (0, 10, 40, 50, 60, 70, 80, 90) for line in pairs[number]]
    assert samples == [[*spread[:4], "short", *spread[4:]]]
    # The vocabulary depends only on the text, not on the length limits for training pairs.
    prepare_text(replace(CONFIG, vocab_size=100, max_length=20, max_ratio=2.0))
    assert len(samples) == 1


@pytest.mark.parametrize(("limit", "step"), [(10_000, 1), (9_999, 2), (5_000, 2), (2_500, 4)])
def test_the_sample_for_the_vocabulary_is_limited_in_bytes(
    limit: int, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs: Pairs = [(f"{number:02} " + "ä" * 26, "x" * 45) for number in range(100)]
    monkeypatch.setattr(vocabulary_module, "SAMPLE_BYTES", limit)
    use_corpus(monkeypatch, InMemoryCorpus(pairs, WORDS[:1]))
    samples = record_training(monkeypatch)
    prepare_text(replace(CONFIG, vocab_size=100, max_ratio=100.0))
    (sample,) = samples
    assert sample == [line for pair in pairs[::step] for line in pair]
    assert len("".join(sample).encode()) <= limit


@pytest.mark.parametrize("line", ["", "\0", "x" * (MAX_TRAINING_LINE + 1)])
def test_a_corpus_without_a_line_to_train_the_vocabulary_on_is_refused(
    line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_corpus(monkeypatch, InMemoryCorpus([(line, line)] * 9, WORDS[:1]))
    with pytest.raises(DataError, match="no text to train a vocabulary on: all 9 pairs of lines"):
        prepare_text(CONFIG)


def test_a_source_vocabulary_that_is_too_small_is_reported_with_its_option() -> None:
    with pytest.raises(DataError, match=r"^cannot train .* 9 tokens .*data\.source_vocab_size"):
        prepare_text(replace(CONFIG, source_vocab_size=9))


def test_an_error_of_the_corpus_during_training_of_the_vocabulary_is_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class FailingCorpus(InMemoryCorpus):
        def read(self, split: Split, start: int = 0) -> Iterator[tuple[str, str]]:
            yield from super().read(split, start)
            raise DataError("train.en was changed while it was read")

    use_corpus(monkeypatch, FailingCorpus(WORDS, WORDS))
    with pytest.raises(DataError, match=r"^train\.en was changed while it was read$"):
        prepare_text(CONFIG)


def is_model(data: bytes) -> bool:
    try:
        Tokenizer(data)
    except DataError:
        return False
    return True


def test_a_damaged_vocabulary_is_trained_again(cache: Path) -> None:
    prepared = prepare_text(CONFIG)
    (path,) = cache.rglob("*.model")
    model = prepared.vocabulary.target.model
    # A model file that is cut off after a complete token is a valid but smaller model.
    smaller = next(model[:end] for end in range(len(model) - 100, 0, -1) if is_model(model[:end]))
    assert len(Tokenizer(smaller)) < len(Tokenizer(model))
    for damaged in (b"", model[:-1], b"no model", b"\0" * 999, smaller):
        path.write_bytes(damaged)
        assert prepare_text(CONFIG).folder == prepared.folder
        assert path.read_bytes() == model
    path.with_suffix(".sha256").unlink()
    assert prepare_text(CONFIG).folder == prepared.folder
