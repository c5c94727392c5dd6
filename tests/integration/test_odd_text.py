"""Test `prepare` on random corpora: it either counts every pair or names the faulty file.

No matter what the files contain, `prepare` ends in one of two ways. Either it counts each pair as
kept or dropped and exits with code 0, or it prints one message that names a faulty file and, if
possible, the line, and exits with code 65. These tests fail if `prepare` prints a traceback
or hangs.
"""

import gzip
import os
import random
import re
from collections import Counter
from pathlib import Path

import pytest
from example_configs import read_pairs

from transformer_jax.cli import main

PAIRS = [(s.encode(), t.encode()) for s, t in read_pairs("train")]
LONG = b"x" * 1_000_000

# Lines that `prepare` drops from the training set, each with the reason that `prepare` reports.
DROPPED_LINES: list[tuple[bytes, str]] = [
    (b"", "empty"),
    (b"  ", "empty"),
    (b"\t\xc2\xa0", "empty"),
    (b"one\0", "control symbols"),
    (b"\x1b[31mone", "control symbols"),
    (b"one\rtwo", "control symbols"),
    (b"<s> one </s>", "control symbols"),
    ("one\u2028two".encode(), "control symbols"),
    ("one\u0085two".encode(), "control symbols"),
    (b"one\x0b\x0ctwo", "control symbols"),
    ("one \u2581 two \ufeff".encode(), "control symbols"),
    (b"one " * 300, "too long"),
    (LONG, "too long"),
    (b"one " * 250_000, "too long"),
    ("日".encode() * 22_000, "too long"),
]
INVALID_LINES = [
    b"one \xff two",
    "zwölf".encode("latin-1"),
    b"\xed\xa0\x80",
    b"\xc0\x80",
    b"tw\xc3",
]
NOT_FILES = ["nothing", "dangling", "folder", "pipe", "device"]


class RandomCorpus:
    """A random corpus, and the error messages and counts that `prepare` should print for it."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.splits = ["train", "dev", "test"][: rng.choice([2, 3])]
        self.files: dict[str, list[bytes]] = {}
        for split in self.splits:
            pairs = rng.sample(PAIRS, 40 if split == "train" else 3)
            for name, side in zip(self.names(split), zip(*pairs, strict=True), strict=True):
                self.files[name] = list(side)
        self.no_files: dict[str, str] = {}
        self.encoded: dict[str, bytes] = {}
        # Each tuple contains substrings of one possible error message. The actual message must
        # contain all substrings in at least one tuple.
        self.faults: list[tuple[str, ...]] = []
        self.dropped: Counter[str] = Counter()
        for _ in range(rng.randrange(6)):
            self.add_odd_pair(rng.choice(self.splits))
        if rng.random() < 0.6:
            for _ in range(rng.choice([1, 1, 1, 2])):
                rng.choice([self.break_line, self.break_sides, self.break_file, self.lengthen])()
        for name in self.files:
            if name not in self.encoded and name not in self.no_files:
                self.encoded[name] = self.encode(name)
        if self.faults and rng.random() < 0.2:
            self.break_gzip()

    def names(self, split: str) -> tuple[str, str]:
        return f"{split}.en.txt", f"{split}.de.txt"

    def insert(self, split: str, pair: tuple[bytes, bytes]) -> int:
        """Insert a pair at a random line and return the line number."""
        position = self.rng.randrange(len(self.files[self.names(split)[0]]) + 1)
        for name, line in zip(self.names(split), pair, strict=True):
            self.files[name].insert(position, line)
        return position + 1

    def add_odd_pair(self, split: str) -> None:
        line, reason = self.rng.choice(DROPPED_LINES)
        pair = (line, b"eins") if self.rng.random() < 0.5 else (b"one", line)
        if self.rng.random() < 0.2:
            pair, reason = (b"one", b"one " * 40), "ratio"
        if split == "train":
            self.dropped[reason] += 1
        elif len(line) > 65536:
            return
        self.insert(split, pair)

    def break_line(self) -> None:
        """Insert a line that is not valid UTF-8."""
        split = self.rng.choice(self.splits)
        side = self.rng.randrange(2)
        pair = [b"one", b"one"]
        pair[side] = self.rng.choice(INVALID_LINES)
        self.insert(split, (pair[0], pair[1]))
        self.faults.append((f"{self.names(split)[side]}, line ", "not UTF-8"))

    def break_sides(self) -> None:
        """Remove lines from one file of a split, add a line to it, or empty it."""
        names = self.names(self.rng.choice(self.splits))
        name = self.rng.choice(names)
        lines = self.files[name]
        if len({len(self.files[either]) for either in names}) > 1:
            return
        shorter = lines[: -self.rng.randint(1, len(lines))]
        self.files[name] = self.rng.choice([shorter, [*lines, b"more"], []])
        for either in names:
            self.faults.append((f"{either}, line ", "no such line in"))
            self.faults.append((f"{either} has no lines",))

    def break_file(self) -> None:
        """Remove a file, replace it with a non-regular file, corrupt it, or blank the train set."""
        name = self.rng.choice(list(self.files))
        kind = self.rng.choice([*NOT_FILES, "utf-16", "noise", "blank", "gzip"])
        if kind in NOT_FILES:
            self.no_files[name] = kind
            self.faults += [(name, "there is no file"), (name, ", not a text file")]
        elif kind == "utf-16":
            self.encoded[name] = "eins\nzwölf\n".encode("utf-16")
            self.faults.append((f"{name}, line 1: not UTF-8, byte 1 is 0xff",))
        elif kind == "noise":
            self.encoded[name] = b"\xfe" + self.rng.randbytes(3000)
            self.faults.append((f"{name}, line 1: not UTF-8",))
        elif kind == "blank":
            for either in (names := self.names("train")):
                self.files[either] = [b""] * 40
            self.faults.append(("no text to train a vocabulary on", " + ".join(names)))
        else:
            packed = gzip.compress(b"".join(line + b"\n" for line in self.files[name]))
            self.encoded[name] = packed[: self.rng.randrange(4, len(packed))]
            self.faults.append((f"{name}, after line ", "broken gzip"))

    def break_gzip(self) -> None:
        """Compress a file with gzip, and flip a bit in the checksum."""
        name = self.rng.choice(list(self.encoded))
        if not self.encoded[name].startswith(b"\x1f\x8b"):
            packed = bytearray(gzip.compress(self.encoded[name]))
            packed[-8] ^= 1
            self.encoded[name] = bytes(packed)
            self.faults.append((f"{name}, after line ", "broken gzip"))

    def lengthen(self) -> None:
        """Insert an overlong line into the dev or test set, where every line must be scored."""
        split = self.rng.choice(self.splits[1:])
        side = self.rng.randrange(2)
        pair = (LONG, b"eins") if side == 0 else (b"one", LONG)
        self.insert(split, pair)
        self.faults.append((f"{self.names(split)[side]}, line ", "more than 65536 bytes"))

    def encode(self, name: str) -> bytes:
        """Return a file's contents, randomly encoded in one of the ways that `prepare` accepts.

        For example, the contents may have a byte-order mark or CRLF line endings, and they may be
        compressed.
        """
        lines, rng = self.files[name], self.rng
        end = rng.choice([b"\n", b"\n", b"\r\n"])
        data = end.join([*lines, b""])
        if lines and lines[-1] and rng.random() < 0.3:
            data = data.removesuffix(end)
        if lines and rng.random() < 0.2:
            data = b"\xef\xbb\xbf" + data
        return gzip.compress(data, mtime=0) if rng.random() < 0.3 else data

    def write(self, folder: Path) -> None:
        for name, data in self.encoded.items():
            if name not in self.no_files:
                (folder / name).write_bytes(data)
        for name, kind in self.no_files.items():
            if kind == "folder":
                (folder / name).mkdir()
            elif kind == "pipe":
                os.mkfifo(folder / name)
            elif kind != "nothing":
                target = {"device": "/dev/zero", "dangling": "nowhere"}[kind]
                (folder / name).symlink_to(target)

    def command(self, folder: Path) -> list[str]:
        files = [part for s in self.splits for part in (f"--data.{s}", *self.names(s))]
        options = ["--data.corpus", "text", "--data.vocab-size", "400"]
        return ["prepare", "base", *options, "--data.folder", str(folder), *files]


def check(corpus: RandomCorpus, code: int, out: str, err: str) -> None:
    """Check that the command ended as expected."""
    *lines, last = err.splitlines()
    assert all(line.endswith(" ...") or line.startswith("note: ") for line in lines)
    if corpus.faults:
        assert code == 65, err
        assert last.startswith("transformer-jax: ")
        assert any(all(word in last for word in fault) for fault in corpus.faults), last
        assert out == ""
        return
    assert code == 0, err
    for split in corpus.splits:
        (counts,) = re.findall(
            rf"^{split} +(\d+) pairs, (\d+) kept(?:; dropped: (.*))?$", out, re.M
        )
        counted = {reason: int(n) for n, reason in re.findall(r"(\d+) ([a-z ]+)", counts[2])}
        assert int(counts[0]) == len(corpus.files[corpus.names(split)[0]])
        assert int(counts[0]) == int(counts[1]) + sum(counted.values())
        assert counted == (corpus.dropped if split == "train" else {})


@pytest.mark.slow
@pytest.mark.parametrize(
    "seeds", [range(20), pytest.param(range(20, 220), marks=pytest.mark.exhaustive)], ids=len
)
@pytest.mark.trials("a corpus with random mistakes", "seeds")
def test_any_corpus_is_prepared_and_counted_or_rejected_with_its_faulty_file(
    seeds: range,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TRANSFORMER_JAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "80")
    rejected = 0
    for seed in seeds:
        corpus = RandomCorpus(seed)
        folder = tmp_path / str(seed)
        folder.mkdir()
        corpus.write(folder)
        code = main(corpus.command(folder))
        try:
            check(corpus, code, *capsys.readouterr())
        except AssertionError as error:
            raise AssertionError(f"corpus {seed}") from error
        rejected += code != 0
    # Accepted and rejected corpora must both be common enough to exercise both checks.
    assert 0.3 * len(seeds) < rejected < 0.8 * len(seeds)
