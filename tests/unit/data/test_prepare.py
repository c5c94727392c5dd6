"""Test that a corpus is encoded completely, only once, and identically on every machine.

`test_encode` tests the encoded files of a single split.
"""

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from corpora import TOKENIZER, VOCABULARY, WORDS, InMemoryCorpus, Pairs, sequences, use_corpus

from transformer_jax.config import Config, DataConfig
from transformer_jax.data import encode
from transformer_jax.data import prepare as prepare_module
from transformer_jax.data.number_words import NumberWords
from transformer_jax.data.prepare import Prepared, find_prepared, prepare_text
from transformer_jax.data.splits import SPLITS, Split
from transformer_jax.data.tokenizer import Tokenizer, Vocabulary
from transformer_jax.errors import DataError, StorageError, UsageError
from transformer_jax.files import write_json
from transformer_jax.progress import Note, report_to

CONFIG = DataConfig(num_pairs=300, vocab_size=256)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test an empty cache."""
    monkeypatch.setenv("TRANSFORMER_JAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def read_files(folder: Path) -> dict[str, bytes]:
    """Return the contents of all files except the lock files, which are empty."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".lock"
    }


def test_tokens_are_those_of_the_corpus_in_order(cache: Path) -> None:
    prepared = prepare_text(CONFIG)
    assert prepared.folder.is_relative_to(cache)
    for split in SPLITS:
        lines = [list(side) for side in zip(*NumberWords(300).read(split), strict=True)]
        encoded = [prepared.vocabulary.target.encode(side) for side in lines]
        assert sequences(prepared, split) == encoded
        if split != "train":
            assert list(prepared.lines(split)) == lines


def test_pairs_that_are_too_long_are_dropped_from_training_only() -> None:
    config = replace(CONFIG, max_length=12)
    prepared = prepare_text(config)
    for split in SPLITS:
        longest = [
            max(map(len, prepared.vocabulary.target.encode(pair)))
            for pair in NumberWords(300).read(split)
        ]
        too_long = sum(length > config.max_length for length in longest)
        assert 0 < too_long < len(longest)
        counts = {"pairs": len(longest), "kept": len(longest)}
        if split == "train":
            counts |= {"kept": len(longest) - too_long, "too long": too_long}
            assert max(side.lengths.max() for side in prepared.tokens(split)) <= config.max_length
        assert prepared.report[split] == counts
        assert len(prepared.tokens(split)[0].lengths) == counts["kept"]


def test_a_note_says_how_many_pairs_training_does_not_use() -> None:
    with pytest.warns(Note, match=r"uses only [\d,]+ of 300 pairs; dropped: [\d,]+ too long"):
        prepare_text(replace(CONFIG, max_length=12)).note_problems()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepare_text(CONFIG).note_problems()


def test_a_second_call_reads_only_the_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def times() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in cache.rglob("*") if path.is_file()}

    first, before = prepare_text(CONFIG), times()
    # After this point, any attempt to read the corpus fails.
    monkeypatch.delattr(NumberWords, "read")
    second = prepare_text(CONFIG)
    assert times() == before
    assert (second.folder, second.report) == (first.folder, first.report)
    assert second.vocabulary.target.model == first.vocabulary.target.model


def test_the_fingerprint_depends_on_the_content_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = prepare_text(CONFIG).fingerprint
    others = [replace(CONFIG, vocab_size=200), replace(CONFIG, num_pairs=301)]
    others += [replace(CONFIG, max_length=12)]
    assert len({one, *(prepare_text(other).fingerprint for other in others)}) == 4
    monkeypatch.setenv("TRANSFORMER_JAX_CACHE", str(tmp_path / "another cache"))
    assert prepare_text(CONFIG).fingerprint == one


def record_training(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Stub out tokenizer training, and return a list that records the lines passed to each call."""
    samples: list[list[str]] = []

    def train(lines: Iterator[str], _: int, __: str) -> Tokenizer:
        samples.append(list(lines))
        return TOKENIZER

    monkeypatch.setattr(Tokenizer, "train", train)
    return samples


def test_a_given_vocabulary_is_used_and_none_is_trained(cache: Path) -> None:
    prepared = prepare_text(CONFIG, VOCABULARY)
    assert prepared.vocabulary is VOCABULARY
    assert prepared.report["vocabulary"] == {"size": 100, "sha256": TOKENIZER.digest}
    sources = [source for source, _ in NumberWords(300).read("dev")]
    assert sequences(prepared, "dev")[0] == TOKENIZER.encode(sources)
    assert list(cache.rglob("*.model")) == []
    assert prepare_text(CONFIG).folder != prepared.folder


def test_lines_of_a_text_that_changes_meanwhile_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode, "CHUNK_PAIRS", 4)
    contents = {name: f"{name}\n" * 9 for name in ("train.en", "train.de", "dev.en", "dev.de")}
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    config = DataConfig(
        corpus="text",
        folder=str(tmp_path),
        train=("train.en", "train.de"),
        dev=("dev.en", "dev.de"),
    )

    def change_dev(activity: str, _: int, __: int) -> None:
        if activity == "encoding train":
            (tmp_path / "dev.de").write_text("changed\n" * 9)

    changed = pytest.raises(DataError, match=r"dev\.de was changed while it was read")
    with changed, report_to(change_dev):
        prepare_text(config, VOCABULARY)
    (tmp_path / "dev.de").write_text(contents["dev.de"])
    assert prepare_text(config, VOCABULARY).lines("dev") == (["dev.en"] * 9, ["dev.de"] * 9)


CHUNK = 8
# The train split has 7 chunks, and dev and test have 3 each. Encoding a chunk takes one call for
# the sources and one for the targets.
CORPUS = InMemoryCorpus([*WORDS[:48], ("", ""), WORDS[49]], WORDS[:20])
CALLS = 2 * (7 + 3 + 3)
LINES = 2 * (49 + 20 + 20)


class Encoder:
    """A wrapper for `Tokenizer.encode` that counts calls and lines and can raise an error."""

    fails_at: int | None
    error: BaseException

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reset()
        encode_lines = Tokenizer.encode

        def count(tokenizer: Tokenizer, lines: list[str]) -> list[list[int]]:
            if self.calls == self.fails_at:
                self.fails_at = None
                raise self.error
            self.calls += 1
            self.lines += len(lines)
            return encode_lines(tokenizer, lines)

        monkeypatch.setattr(Tokenizer, "encode", count)

    def reset(self, fails_at: int | None = None, error: BaseException | None = None) -> None:
        self.lines = self.calls = 0
        self.fails_at, self.error = fails_at, error or KeyboardInterrupt()


@pytest.fixture
def encoder(monkeypatch: pytest.MonkeyPatch) -> Encoder:
    """Make `prepare` encode `CORPUS` in small chunks, and count the calls to `Tokenizer.encode`."""
    monkeypatch.setattr(encode, "CHUNK_PAIRS", CHUNK)
    use_corpus(monkeypatch, CORPUS)
    return Encoder(monkeypatch)


@pytest.fixture
def complete(encoder: Encoder, cache: Path) -> dict[str, bytes]:
    """The files that `prepare` writes to the cache if nothing interrupts it."""
    prepare_text(CONFIG, VOCABULARY)
    assert (encoder.calls, encoder.lines) == (CALLS, LINES)
    files = read_files(cache)
    shutil.rmtree(cache)
    encoder.reset()
    return files


@pytest.mark.parametrize(
    "error",
    [
        KeyboardInterrupt(),
        pytest.param(RuntimeError(), marks=pytest.mark.slow),
        pytest.param(OSError(28, "full"), marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_preparation_resumes_and_gives_the_same_files(
    error: BaseException, encoder: Encoder, complete: dict[str, bytes], cache: Path
) -> None:
    for call in range(CALLS):
        encoder.reset(fails_at=call, error=error)
        with pytest.raises(StorageError if isinstance(error, OSError) else type(error)):
            prepare_text(CONFIG, VOCABULARY)
        assert not list(cache.rglob("report.json"))
        prepare_text(CONFIG, VOCABULARY)
        assert read_files(cache) == complete
        # Only the source sentences in the interrupted chunk should be re-encoded.
        assert 0 <= encoder.lines - LINES <= (CHUNK if call % 2 else 0)
        shutil.rmtree(cache)


def test_a_preparation_that_is_interrupted_many_times_still_finishes(
    encoder: Encoder, complete: dict[str, bytes], cache: Path
) -> None:
    interruptions = 0
    # Each attempt finishes one chunk and fails after encoding the source sentences of the next
    # chunk.
    while encoder.calls < CALLS + interruptions - 2:
        encoder.fails_at = encoder.calls + 3
        with pytest.raises(KeyboardInterrupt):
            prepare_text(CONFIG, VOCABULARY)
        interruptions += 1
    assert interruptions == CALLS // 2 - 1
    prepare_text(CONFIG, VOCABULARY)
    assert read_files(cache) == complete


@pytest.mark.parametrize("damage", ["appended", "journal", "truncated", "removed", "report"])
def test_damage_to_a_partial_preparation_does_not_change_the_result(
    damage: str, encoder: Encoder, complete: dict[str, bytes], cache: Path
) -> None:
    for call in range(1, CALLS, 4):
        encoder.reset(fails_at=call)
        with pytest.raises(KeyboardInterrupt):
            prepare_text(CONFIG, VOCABULARY)
        (partial,) = cache.rglob("*.partial")
        files = [path for path in partial.iterdir() if "journal" not in path.name]
        journals = list(partial.glob("*.journal.json"))
        for path in {"journal": journals, "report": []}.get(damage, files):
            data = path.read_bytes()
            if damage == "appended":
                path.write_bytes(data + b"half")
            elif damage == "removed":
                path.unlink()
            else:
                path.write_bytes(data[: len(data) // 2])
        if damage == "report":
            # A `prepare` call that is interrupted before it renames the folder leaves a report.json
            # behind.
            (partial / "report.json").write_text("{}")
        prepare_text(CONFIG, VOCABULARY)
        assert read_files(cache) == complete
        shutil.rmtree(cache)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, OSError])
def test_an_interruption_after_the_last_chunk_encodes_nothing_again(
    error: type[BaseException],
    encoder: Encoder,
    complete: dict[str, bytes],
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(*_: object) -> str:
        raise error

    steps = ((prepare_module, "_compute_fingerprint"), (Path, "unlink"), (Path, "rename"))
    for owner, name in steps:
        encoder.reset()
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, interrupt)
            with pytest.raises(StorageError if error is OSError else error):
                prepare_text(CONFIG, VOCABULARY)
        assert encoder.lines == LINES
        prepare_text(CONFIG, VOCABULARY)
        # Everything is encoded again only if the interruption occurred after the journals were
        # removed and before the folder was renamed.
        assert encoder.lines == LINES * (2 if name == "rename" else 1)
        assert read_files(cache) == complete
        shutil.rmtree(cache)


@pytest.mark.parametrize("cores", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_files_are_the_same_for_any_number_of_processes(
    cores: int,
    encoder: Encoder,
    complete: dict[str, bytes],
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(encode, "count_usable_cores", lambda: cores)
    monkeypatch.setattr(encode, "PAIRS_PER_PROCESS", 8)
    # Interrupt the preparation in the middle of the training split.
    with pytest.raises(KeyboardInterrupt), report_to(interrupt_training_split):
        prepare_text(CONFIG, VOCABULARY)
    (journal,) = cache.rglob("train.journal.json")
    assert json.loads(journal.read_bytes())["done"] == 3 * CHUNK
    prepare_text(CONFIG, VOCABULARY)
    assert read_files(cache) == complete
    # This process does not encode anything.
    assert encoder.calls == 0


def interrupt_training_split(activity: str, done: int, _total: int) -> None:
    if (activity, done) == ("encoding train", 4 * CHUNK):
        raise KeyboardInterrupt


KILLED_AFTER = """
import os, signal, sys
from transformer_jax.config import Config, DataConfig
from transformer_jax.data import encode
from transformer_jax.data.prepare import prepare_text
from transformer_jax.progress import Note, report_to

encode.CHUNK_PAIRS = encode.PAIRS_PER_PROCESS = 16
encode.count_usable_cores = lambda: 3
calls_left = int(sys.argv[1])

def die(activity, done, total):
    global calls_left
    calls_left -= 1
    if calls_left == 0:
        os.kill(os.getpid(), signal.SIGKILL)

with report_to(die):
    prepare_text(DataConfig(num_pairs=300, vocab_size=256))
"""


@pytest.mark.slow
def test_a_new_process_resumes_the_work_of_a_killed_one(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Kill one process while it samples lines for the vocabulary, and kill another one while it
    # encodes the test split.
    for calls in (2, 70):
        killed = subprocess.run([sys.executable, "-c", KILLED_AFTER, str(calls)], check=False)
        assert killed.returncode == -signal.SIGKILL
        assert not list(cache.rglob("report.json"))
    prepare_text(CONFIG)
    monkeypatch.setenv("TRANSFORMER_JAX_CACHE", str(tmp_path / "other"))
    prepare_text(CONFIG)
    assert read_files(cache) == read_files(tmp_path / "other")


def test_two_processes_that_prepare_the_same_text_share_the_work(
    encoder: Encoder, complete: dict[str, bytes], cache: Path
) -> None:
    has_started, is_waiting = threading.Event(), threading.Event()
    activities: list[str] = []
    results: list[Prepared] = []

    def first(activity: str, done: int, total: int) -> None:
        assert done <= total
        if activity.startswith("encoding"):
            has_started.set()
            assert is_waiting.wait(60)

    def second(activity: str, done: int, total: int) -> None:
        assert done <= total
        activities.append(activity)
        is_waiting.set()

    def prepare_first() -> None:
        with report_to(first):
            results.append(prepare_text(CONFIG, VOCABULARY))

    thread = threading.Thread(target=prepare_first)
    thread.start()
    assert has_started.wait(60)
    with report_to(second):
        results.append(prepare_text(CONFIG, VOCABULARY))
    thread.join()
    assert activities == ["waiting for another process that is preparing the same text"]
    assert encoder.lines == LINES
    assert results[0].folder == results[1].folder
    assert results[0].report == results[1].report
    assert read_files(cache) == complete


@pytest.mark.slow
def test_a_damaged_corpus_is_encoded_again(
    encoder: Encoder, complete: dict[str, bytes], cache: Path
) -> None:
    folder = prepare_text(CONFIG, VOCABULARY).folder
    report = json.loads((folder / "report.json").read_bytes())
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        damaged = [data[: len(data) * tenths // 10] for tenths in (0, 1, 5, 9)]
        if path.name == "report.json":
            incomplete = {key: value for key, value in report.items() if key != "fingerprint"}
            damaged += [b"[]", b"null", b"{}", b'{"sizes": {}}', json.dumps(incomplete).encode()]
        for content in damaged:
            path.write_bytes(content)
            prepare_text(CONFIG, VOCABULARY)
            assert read_files(cache) == complete
        path.unlink()
        encoder.reset()
        prepare_text(CONFIG, VOCABULARY)
        assert encoder.lines == LINES
        assert read_files(cache) == complete


def flip(path: Path, byte: int, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[byte] ^= 1 << bit
    path.write_bytes(content)


def test_a_flipped_bit_in_any_cached_file_is_noticed_and_mended() -> None:
    prepared = prepare_text(CONFIG)
    intact = read_files(prepared.folder)
    for name in sorted(intact):
        for byte in (0, len(intact[name]) // 2):
            flip(prepared.folder / name, byte, 0)
            # A corpus whose report is damaged looks unfinished, so no note mentions the damage.
            notes = contextlib.nullcontext()
            if name != "report.json":
                notes = pytest.warns(Note, match=r"the cached text in .* is damaged")
            with notes:
                prepare_text(CONFIG)
            assert read_files(prepared.folder) == intact


def test_a_run_does_not_use_a_damaged_cache(tmp_path: Path) -> None:
    config = write_texts(tmp_path / "texts", WORDS)
    first = prepare_text(config)
    expected = read_files(first.folder)
    flip(first.folder / "train.target.tokens", 3, 6)
    with pytest.warns(Note, match="damaged, so it is not used"):
        find_prepared(config, first.vocabulary, first.fingerprint)
    assert read_files(first.folder) == expected
    flip(first.folder / "dev.source.txt", 0, 0)
    shutil.rmtree(tmp_path / "texts")
    with (
        pytest.warns(Note, match="damaged, so it is not used"),
        pytest.raises(DataError, match="there is no file"),
    ):
        find_prepared(config, first.vocabulary, first.fingerprint)


def test_a_token_id_outside_the_vocabulary_is_noticed_although_its_digest_is_right() -> None:
    prepared = prepare_text(CONFIG)
    intact = read_files(prepared.folder)
    flip(prepared.folder / "train.target.tokens", 3, 6)
    report = dict(prepared.report)
    files = sorted(prepared.folder / name for name in report["sizes"])
    report["fingerprint"] = prepare_module._compute_fingerprint(files)
    write_json(prepared.folder / "report.json", report)
    with pytest.warns(Note, match="unknown token IDs"):
        prepare_text(CONFIG)
    assert read_files(prepared.folder) == intact


def test_a_config_instead_of_its_section_is_a_usage_error() -> None:
    config: Any = Config()
    with pytest.raises(UsageError, match=r"^config must be a DataConfig, got an object of type C"):
        prepare_text(config)


@pytest.mark.parametrize("splits", [("train", "test"), ("dev", "test"), ()])
def test_a_corpus_without_train_or_dev_is_refused(
    splits: tuple[Split, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = InMemoryCorpus(WORDS, WORDS[:20])
    monkeypatch.setattr(corpus, "splits", splits)
    use_corpus(monkeypatch, corpus)
    with pytest.raises(DataError, match=r"^lines has no (dev|train) split, which training needs$"):
        prepare_text(CONFIG, VOCABULARY)


def test_a_corpus_may_have_no_test_split(monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = InMemoryCorpus(WORDS, WORDS[:20])
    monkeypatch.setattr(corpus, "splits", ("train", "dev"))
    use_corpus(monkeypatch, corpus)
    assert "test" not in prepare_text(CONFIG, VOCABULARY).report


def write_texts(folder: Path, pairs: Pairs) -> DataConfig:
    """Write pairs to files, and return a config that names these files."""
    folder.mkdir(exist_ok=True)
    for name, side in zip(("en", "de"), zip(*pairs, strict=True), strict=True):
        for split, lines in (("train", side), ("dev", side[-5:])):
            (folder / f"{split}.{name}").write_text("".join(f"{x}\n" for x in lines), "utf-8")
    return DataConfig(
        corpus="text",
        train=("train.en", "train.de"),
        dev=("dev.en", "dev.de"),
        folder=str(folder),
        vocab_size=100,
    )


def test_the_data_of_a_run_is_found_although_its_files_are_gone(tmp_path: Path) -> None:
    config = write_texts(tmp_path / "texts", WORDS)
    first = prepare_text(config)
    shutil.rmtree(tmp_path / "texts")
    again = find_prepared(config, first.vocabulary, first.fingerprint)
    assert (again.folder, again.report) == (first.folder, first.report)
    with pytest.raises(DataError, match="there is no file"):
        prepare_text(config)
    with pytest.raises(DataError, match="there is no file"):
        find_prepared(config, first.vocabulary, "0" * 64)
    with pytest.raises(DataError, match="there is no file"):
        find_prepared(config, first.vocabulary, first.fingerprint, verify_text=True)
    # A folder whose name ends in `.partial` contains unfinished data, which `find_prepared` must
    # ignore.
    shutil.move(first.folder, first.folder.with_suffix(".partial"))
    with pytest.raises(DataError, match="there is no file"):
        find_prepared(config, first.vocabulary, first.fingerprint)


def test_the_text_of_a_run_may_move_but_not_change(cache: Path, tmp_path: Path) -> None:
    first = prepare_text(write_texts(tmp_path / "texts", WORDS))
    shutil.rmtree(cache)
    moved = write_texts(tmp_path / "moved", WORDS)
    assert find_prepared(moved, first.vocabulary, first.fingerprint).report == first.report
    for other in (
        write_texts(tmp_path / "reversed", WORDS[::-1]),
        write_texts(tmp_path / "fewer", WORDS[:-1]),
        replace(moved, max_length=20),
    ):
        with pytest.raises(
            DataError, match="is not the text that the run was created with"
        ) as caught:
            find_prepared(other, first.vocabulary, first.fingerprint, verify_text=True)
        assert str(caught.value).startswith("train.en + train.de ")
        # Without `verify_text`, `find_prepared` accepts cached text with the same fingerprint.
        found = find_prepared(other, first.vocabulary, first.fingerprint)
        assert found.report == first.report


@pytest.mark.parametrize("vocabulary", [None, VOCABULARY])
def test_a_fault_in_any_file_is_raised_before_training_and_encoding(
    vocabulary: Vocabulary | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_texts(tmp_path / "texts", WORDS)
    with (tmp_path / "texts" / "dev.de").open("ab") as file:
        file.write(b"one\n\xff\n")
    encoder = Encoder(monkeypatch)
    samples = record_training(monkeypatch)
    with pytest.raises(DataError, match=r"^dev\.de, line 7: not UTF-8"):
        prepare_text(config, vocabulary)
    assert (encoder.calls, samples) == (0, [])


MEASURE_MEMORY = r"""
import re, sys
from pathlib import Path
from transformer_jax.config import Config, DataConfig
from transformer_jax.data.prepare import prepare_text

config = DataConfig(
    corpus="text", train=("a", "b"), dev=("c", "d"), folder=sys.argv[1], vocab_size=1000
)
report = prepare_text(config).report["train"]
# `getrusage` would include the process that this one was forked from.
kilobytes = int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])
print(report, kilobytes)
assert report == eval(sys.argv[2]), report
assert kilobytes < int(sys.argv[3])
"""


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("kind", "limit"),
    # The memory limits, in kilobytes, are too low to hold all lines and tokens in memory.
    [
        ("one line of 100 MB", 1_000_000),
        ("2 million lines", 1_000_000),
        ("300 lines of 60 KB", 300_000),
    ],
)
def test_text_of_any_size_needs_little_memory(
    kind: str, limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The shared test cache may already contain the prepared text, so use an empty cache.
    monkeypatch.setenv("TRANSFORMER_JAX_CACHE", str(tmp_path / "cache"))
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
            elif kind == "2 million lines":
                for _ in range(100):
                    file.writelines(f"{line}\n" for line in side)
                report = {"pairs": 2_000_100, "kept": 2_000_100}
            else:
                file.writelines(f"{' '.join(side[n : n + 1000])}\n" for n in range(300))
                report = {"pairs": 400, "kept": 100, "too long": 300}
    ended = subprocess.run(
        [sys.executable, "-c", MEASURE_MEMORY, str(tmp_path), repr(report), str(limit)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_a_cache_that_cannot_be_written_is_reported_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRANSFORMER_JAX_CACHE", str(tmp_path / "file"))
    with pytest.raises(StorageError) as caught:
        prepare_text(CONFIG)
    assert str(tmp_path / "file") in str(caught.value)
    assert "\n" not in str(caught.value)
