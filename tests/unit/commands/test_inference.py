"""Test the `translate` command and how it splits its input into lines."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from example_configs import SMALL, read_pairs
from hypothesis import given, settings
from hypothesis import strategies as st
from run_files import write_untrained_run

from transformer_jax.cli import main
from transformer_jax.commands.inference import _decode_lines, write_lines
from transformer_jax.errors import DataError, StorageError
from transformer_jax.inference.sampling import Sampling
from transformer_jax.inference.trained_run import Run, load
from transformer_jax.inference.translate import ROWS

WIDTH = 32


@given(st.lists(st.text(st.characters(exclude_characters="\r\n\ufeff", codec="utf-8"))))
@settings(deadline=None, derandomize=True, max_examples=30)
def test_lines_are_read_as_they_were_written(lines: list[str]) -> None:
    assert _decode_lines("".join(f"{line}\n" for line in lines).encode()) == lines
    assert _decode_lines("".join(f"{line}\r\n" for line in lines).encode()) == lines
    last_line_has_words = bool(lines and lines[-1])
    if last_line_has_words:
        assert _decode_lines("\n".join(lines).encode()) == lines


def test_only_a_newline_ends_a_line() -> None:
    cases: dict[bytes, list[str]] = {
        b"": [],
        b"\n": [""],
        b"\n\n": ["", ""],
        b"one": ["one"],
        b"one\n": ["one"],
        b"one\n\ntwo\n": ["one", "", "two"],
        b"one\r\ntwo\r\n": ["one", "two"],
        b"one\rtwo\n": ["one\rtwo"],
        "\ufeffone\n\ufefftwo\n".encode(): ["one", "\ufefftwo"],
        "one\u2028two\u0085three\x0cfour\n".encode(): ["one\u2028two\u0085three\x0cfour"],
    }
    for data, lines in cases.items():
        assert _decode_lines(data) == lines


def test_a_line_that_is_not_utf_8_is_reported_by_number() -> None:
    with pytest.raises(DataError, match=r"^line 2 is not UTF-8: "):
        _decode_lines(b"one\nzw\xffei\nthree\n")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """An untrained run that produces different translations for different lines.

    The model rarely predicts the end-of-sentence token, so this run allows every hypothesis in the
    beam to finish.
    """
    path = tmp_path_factory.mktemp("runs") / "run"
    config = SMALL.change(decode={"beam_end": "any"})
    return load(write_untrained_run(path, config, steps=(8,), scale=3.0).path)


@pytest.fixture(scope="module")
def lines(run: Run) -> list[str]:
    """Lines that are padded to the same width, to limit the number of XLA compilations."""
    translator = run.translator()
    sources = [source for source, _ in [*read_pairs("dev"), *read_pairs("train")]]
    widths = [translator.width(len(tokens)) for tokens in translator.encode(sources)]
    assert len(set(widths)) > 1
    return [x for x, width in zip(sources, widths, strict=True) if width == WIDTH][: 2 * ROWS + 4]


def test_the_command_line_translates_standard_input(
    run: Run, lines: list[str], monkeypatch: pytest.MonkeyPatch, capfdbinary: Any, tmp_path: Path
) -> None:
    text = tmp_path / "in.txt"
    text.write_text(f"{lines[0]}\n\n{lines[1]}", "utf-8")
    path = str(run.folder.path)

    def translate(*options: str) -> bytes:
        with text.open() as file:
            monkeypatch.setattr("sys.stdin", file)
            assert main(["translate", path, *options]) == 0
        return capfdbinary.readouterr().out

    first, second = run.translate(lines[:2])
    assert translate().decode() == f"{first}\n\n{second}\n"
    ranked = [line.split("\t") for line in translate("--n-best", "4").decode().splitlines()]
    assert [number for number, *_ in ranked] == ["1"] * 4 + ["2"] + ["3"] * 4
    assert ranked[0][2] == first
    assert translate("--beam-size", "1").decode().split("\n")[1] == ""


def test_a_line_with_fewer_translations_than_requested_has_one_and_is_counted(
    run: Run, lines: list[str], monkeypatch: pytest.MonkeyPatch, capfd: Any, tmp_path: Path
) -> None:
    text = tmp_path / "in.txt"
    text.write_text("".join(f"{line}\n" for line in ["", *lines[:9]]), "utf-8")
    options = ["--n-best", "4", "--beam-end", "tensor2tensor"]
    with text.open() as file:
        monkeypatch.setattr("sys.stdin", file)
        assert main(["translate", str(run.folder.path), *options]) == 0
    out, err = capfd.readouterr()
    numbers = [int(line.split("\t", 2)[0]) for line in out.splitlines()]
    counts = [numbers.count(number) for number in range(1, 11)]
    assert numbers == sorted(numbers)
    assert counts[0] == 1
    assert min(counts) >= 1
    assert max(counts) <= 4
    num_short = sum(count < 4 for count in counts[1:])
    assert num_short
    assert f"note: {num_short} of 10 lines have fewer than 4 translations" in " ".join(err.split())


@pytest.fixture
def translate(
    run: Run, monkeypatch: pytest.MonkeyPatch, capfd: Any, tmp_path: Path
) -> Callable[..., tuple[int, str, str]]:
    """Translate lines with options; return the exit code, the output, and the errors."""

    def translate(lines: list[str], *options: str) -> tuple[int, str, str]:
        (tmp_path / "in.txt").write_text("".join(f"{line}\n" for line in lines), "utf-8")
        with (tmp_path / "in.txt").open() as file:
            monkeypatch.setattr("sys.stdin", file)
            code = main(["translate", str(run.folder.path), *options])
        return code, *capfd.readouterr()

    return translate


def test_the_command_line_draws_the_samples_that_python_draws(
    run: Run, lines: list[str], translate: Callable[..., tuple[int, str, str]]
) -> None:
    sampling = Sampling(0.7, 20, 0.9, seed=5)
    given = ["--temperature", "0.7", "--top-k", "20", "--top-p", "0.9", "--seed", "5"]
    some = [lines[0], "", lines[1]]
    code, out, _ = translate(some, "--sample", *given)
    assert (code, out.split("\n")[:-1]) == (0, run.translate(some, sampling=sampling))
    code, out, err = translate(some, "--sample", "--n-best", "6", *given)
    expected = [
        f"{number}\t{sample.score:.4f}\t{sample.text}"
        for number, samples in enumerate(run.translate_best(some, 6, sampling=sampling), start=1)
        for sample in samples
    ]
    assert (code, out.split("\n")[:-1], err) == (0, expected, "")
    code, out, _ = translate(some, "--mbr", "6", *given)
    assert (code, out.split("\n")[:-1]) == (
        0,
        run.translate_minimum_risk(some, 6, sampling=sampling),
    )


def test_markup_in_the_input_is_noted(translate: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = translate(["one", '<seg id="1">two</seg>'])
    assert (code, len(out.splitlines())) == (0, 2)
    note = (
        """note: standard input contains markup, which is read as text: '<seg id="1">two</seg>'"""
    )
    assert note in " ".join(err.split())


def test_the_command_line_reads_prefixes_from_a_file(
    run: Run, lines: list[str], translate: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    file, some = tmp_path / "prefixes.txt", [lines[0], "", lines[1]]
    file.write_text("zwei\n\n\n", "utf-8")
    code, out, _ = translate(some, "--prefixes", str(file))
    assert (code, out.split("\n")[:-1]) == (0, run.translate(some, prefixes=["zwei", "", ""]))
    assert out.startswith("zwei")
    code, out, err = translate(lines[:2], "--prefixes", str(file))
    assert (code, out) == (65, "")
    assert "prefixes.txt and standard input differ: 3 and 2" in err
    file.write_bytes(b"ein\n\xff\n\n")
    code, _, err = translate(some, "--prefixes", str(file))
    assert (code, "prefixes.txt, line 2" in err) == (65, True)
    os.mkfifo(tmp_path / "pipe")
    for name, message in [("none", "none cannot be read"), ("pipe", "is a device or pipe")]:
        code, _, err = translate(some, "--prefixes", str(tmp_path / name))
        assert (code, message in err) == (65, True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--temperature", "2"], "--temperature needs --sample or --mbr"),
        (["--sample", "--beam-size", "2"], "--beam-size cannot be used with sampling"),
        (["--beam-size", "0"], "transformer-jax: --beam-size must be from 1 to 1000, got 0"),
        (["--alpha", "-1"], "transformer-jax: --alpha must be from 0 to 5, got -1.0"),
        (["--mbr", "4", "--n-best", "2"], "--mbr prints one translation of each line"),
        (["--mbr", "0"], "--mbr must be positive, got 0"),
        (["--n-best", "0"], "--n-best must be positive, got 0"),
        (["--sample", "--top-p", "2"], "jax: --top-p must be above 0 and at most 1, got 2.0"),
    ],
)
def test_invalid_options_of_a_search_or_of_samples_are_reported(
    translate: Callable[..., tuple[int, str, str]], options: list[str], message: str
) -> None:
    code, out, err = translate(["one"], *options)
    assert (code, out) == (2, "")
    assert message in " ".join(err.split())


@pytest.fixture(scope="module")
def short_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two of the three checkpoints that its config averages."""
    path = tmp_path_factory.mktemp("short") / "run"
    config = SMALL.change(decode={"average_checkpoints": 3, "beam_size": 1})
    return write_untrained_run(path, config).path


@pytest.mark.parametrize(
    "command",
    [
        ("translate",),
        ("attention", "one", "eins", "--out", "page.html"),
        ("evaluate", "--split", "dev"),
        ("package", "--license", "mit", "--out", "package"),
        ("plot", "--kind", "positions", "--out", "positions.svg"),
    ],
    ids=lambda command: command[0],
)
def test_a_command_averages_the_checkpoints_that_a_short_run_has_and_says_so_once(
    command: tuple[str, ...],
    short_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "in.txt").write_text("one\n", "utf-8")
    name, *options = command

    def run_in(folder: str, *more: str) -> tuple[int, str]:
        """Run the command in a new folder; return the exit code and the standard error."""
        (tmp_path / folder).mkdir()
        monkeypatch.chdir(tmp_path / folder)
        with (tmp_path / "in.txt").open() as file:
            monkeypatch.setattr("sys.stdin", file)
            return main([name, str(short_run), *options, *more]), capfd.readouterr().err

    note = (
        f"note: {short_run} does not have 3 checkpoints to average (decode.average_checkpoints), "
        "so the mean of 2 is used\n"
    )
    code, error = run_in("default")
    assert (code, error.count(note)) == (0, 1)
    code, error = run_in("explicit", "--average-checkpoints", "2")
    assert (code, error.count("checkpoints to average")) == (0, 0)
    mistake = f"transformer-jax: cannot average 3 checkpoints: {short_run} has only 2 that can be"
    code, error = run_in("too_many", "--average-checkpoints", "3")
    assert (code, error.startswith(mistake), error.count("\n")) == (2, True, 1)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EPIPE])
def test_only_a_full_output_is_an_error_of_storage(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise OSError(code, os.strerror(code))

    stream = SimpleNamespace(buffer=SimpleNamespace(writelines=fail))
    monkeypatch.setattr("sys.stdout", stream)
    # A closed pipe ends the command without a message.
    error = BrokenPipeError if code == errno.EPIPE else StorageError
    with pytest.raises(error, match=os.strerror(code)):
        write_lines(["zwei"])
