"""A run is data from a stranger: nothing in it is executed, followed outside, or believed."""

import hashlib
import io
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from small import SMALL

import transformer_jax
from transformer_jax import console
from transformer_jax.cli import main
from transformer_jax.data import tokenizer
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.errors import DataError, StorageError, TransformerJaxError
from transformer_jax.runs.run_directory import MAX_DESCRIPTION, RunDirectory
from transformer_jax.training import loop
from transformer_jax.training.create_run import create_run
from transformer_jax.training.metric_writer import MetricWriter

PACKAGE = Path(transformer_jax.__file__).parent
QUIET = Console(quiet=True)
UNTOLD = "hunter2-and-more"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run, made where there are secrets around."""
    path = tmp_path_factory.mktemp("runs") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EXAMPLE_API_KEY", UNTOLD)
        patch.setenv("https_proxy", f"http://user:{UNTOLD}@localhost:1")
        loop.run_training(create_run(SMALL, path, QUIET), QUIET)
    return path


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    """The run once more, to be meddled with."""
    subprocess.run(["cp", "-r", str(run), str(tmp_path / "copy")], check=True)
    return tmp_path / "copy"


def test_nothing_in_the_package_executes_data() -> None:
    forbidden = re.compile(
        r"^\s*(import|from) (pickle|marshal|shelve|dill|cloudpickle|yaml)\b"
        r"|(?<![\w.])(?<!def )(eval|exec|compile|__import__)\("
        r"|shell=True|allow_pickle=True|os\.system\(",
        re.MULTILINE,
    )
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if forbidden.search(path.read_text("utf-8"))
    }
    assert not found


def test_neither_secrets_nor_homes_are_stored_with_a_run(run: Path) -> None:
    unwelcome = {UNTOLD.encode(), str(Path.home()).encode() + b"/", str(Path.cwd()).encode()}
    files = [path for path in run.rglob("*") if path.is_file()]
    assert len(files) > 20
    for path in files:
        content = path.read_bytes()
        assert not [word for word in unwelcome if word in content], path


def deep(path: Path) -> None:
    (path / "run.json").write_text('{"config":' * 100_000)


def payload(path: Path) -> None:
    (path / "run.json").write_bytes(b"cos\nsystem\n(S'touch owned'\ntR.")


def claim(section: str, **fields: Any) -> Callable[[Path], None]:
    """Return what makes a run claim something."""

    def change(path: Path) -> None:
        told = json.loads((path / "run.json").read_text())
        told["config"][section].update(fields)
        (path / "run.json").write_text(json.dumps(told))

    return change


def link(name: str, to: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).unlink(missing_ok=True)
        (path / name).symlink_to(to)

    return change


def model_of(content: bytes) -> Callable[[Path], None]:
    """Return what gives a run another vocabulary, with the digest that belongs to it."""

    def change(path: Path) -> None:
        (path / "tokenizer.model").write_bytes(content)
        told = json.loads((path / "run.json").read_text())
        told["vocabulary"]["sha256"] = hashlib.sha256(content).hexdigest()
        (path / "run.json").write_text(json.dumps(told))

    return change


MEDDLING: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a payload": (payload, "cannot be read"),
    "a deep one": (deep, "cannot be read"),
    "a long one": (lambda p: os.truncate(p / "run.json", MAX_DESCRIPTION + 1), "more than 1 MiB"),
    "a huge width": (claim("model", d_ff=10**12), "d_ff must be from 1 to"),
    "a large width": (claim("model", d_ff=10**6), "of another run: model.d_ff 32 -> 1000000"),
    "a tower": (claim("model", num_layers=10**6), "num_layers must be from 1 to"),
    "no number": (claim("model", dropout=float("nan")), "dropout must be"),
    "a linked lock": (link("lock", "/etc/passwd"), "lock is a link"),
    "linked reports": (link("metrics.jsonl", "/etc/passwd"), "metrics.jsonl is a link"),
    "a linked vocabulary": (link("tokenizer.model", "/dev/zero"), "tokenizer.model is a link"),
    "a linked sample": (link("samples/step-9.txt", "/etc/passwd"), "step-9.txt is a link"),
    "a linked evaluation": (
        link("evaluations/test-step8-average1-beam4-alpha0.6", "/etc"),
        "alpha0.6 is a link",
    ),
    "a linked checkpoint": (link("checkpoints/12", "8"), "checkpoints/12 is a link"),
    "a link to nowhere": (link("checkpoints/8/params/x", "/nowhere"), "params/x is a link"),
    "a pipe in a checkpoint": (lambda p: os.mkfifo(p / "checkpoints" / "8" / "x"), "no plain file"),
    "a pipe": (lambda p: os.mkfifo(p / "samples.txt"), "no plain file"),
    "an empty vocabulary": (model_of(b""), "tokenizer.model"),
    "a vocabulary of junk": (model_of(b"\xff" * 99), "not a SentencePiece model"),
}


@pytest.mark.parametrize("name", MEDDLING)
def test_what_was_meddled_with_is_refused_in_one_line(
    name: str, copy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(copy)
    meddle, told = MEDDLING[name]
    meddle(copy)
    before = Path("/etc/passwd").read_bytes()
    for verb in ("translate", "evaluate", "resume"):
        assert main([verb, str(copy)]) in (2, 74)
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert told in said
        assert "Traceback" not in said
    assert not (copy / "owned").exists()
    assert Path("/etc/passwd").read_bytes() == before


def fault_of(model: bytes) -> str:
    """Return why a vocabulary is refused; "" if it is not."""
    try:
        Tokenizer.load_untrusted(model, "tokenizer.model")
    except DataError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("tries", [12, pytest.param(2000, marks=pytest.mark.slow)])
def test_no_vocabulary_ends_this_process(tries: int) -> None:
    rng = random.Random(tries)
    whole = Tokenizer.train(["one two three", "eins zwei drei"], 24).model
    refused = 0
    for number in range(tries):
        model = bytearray(whole)
        for _ in range(rng.choice([1, 1, 5, 50])):
            model[rng.randrange(len(model))] = rng.randrange(256)
        if number % 4 == 0:
            # A piece that claims to be longer than the file, or is.
            model += b"\x0a\xff\xff\xff\x0f" + bytes(rng.choice([0, 10_000]))
        told = fault_of(bytes(model))
        refused += bool(told)
        assert "\n" not in told
        kinds = ("is not a SentencePiece model: ", "has other special tokens: ")
        assert not told or told.removeprefix("tokenizer.model ").startswith(kinds)
    assert refused > tries / 4


@pytest.fixture
def untried(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """A vocabulary that is tried, whatever was tried before."""
    monkeypatch.setattr(tokenizer, "TRIED", set())
    return Tokenizer.train(["one two three"], 20).model


@pytest.mark.parametrize("end", ["os.abort()", "bytearray(8 << 30)", "os._exit(3)"])
def test_a_vocabulary_that_ends_the_process_that_tries_it_is_refused(
    untried: bytes, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tokenizer.PROBE.replace("p = ", f"import os; {end} #")
    monkeypatch.setattr(tokenizer, "PROBE", program)
    for _ in range(2):
        with pytest.raises(DataError, match="x is not a SentencePiece model: "):
            Tokenizer.load_untrusted(untried, "x")


def test_a_vocabulary_is_tried_once(untried: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    Tokenizer.load_untrusted(untried, "x")
    monkeypatch.setattr(tokenizer, "PROBE", "raise SystemExit(1)")
    assert Tokenizer.load_untrusted(untried, "y").model == untried
    other = Tokenizer.train(["one two three"], 19).model
    with pytest.raises(TransformerJaxError):
        Tokenizer.load_untrusted(other, "x")


def test_a_vocabulary_is_tried_with_the_packages_that_are_here(
    untried: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tokenizer.PROBE.replace("import sentencepiece", "import sentencepiece, elsewhere")
    monkeypatch.setattr(tokenizer, "PROBE", program)
    # In a working directory that may be a stranger's they do not lie.
    (tmp_path / "elsewhere.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    with pytest.raises(TransformerJaxError, match=r"x cannot be tested in .*No module") as told:
        Tokenizer.load_untrusted(untried, "x")
    assert not isinstance(told.value, DataError)
    monkeypatch.syspath_prepend(tmp_path)
    Tokenizer.load_untrusted(untried, "x")


def test_terminals_are_shown_text_and_obey_none(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "runs/\x1b]0;owned\x07\x1b[2J\u202efdp\r[red]x[/red]"
    assert main(["translate", hostile]) == 2
    said = capsys.readouterr().err
    assert said == (
        "transformer-jax: runs/\\x1b]0;owned\\x07\\x1b[2J\\u202efdp\\r[red]x[/red] is no run: it "
        "has no run.json\n"
    )
    out = io.StringIO()
    shown = console.PlainConsole()
    shown.file = out
    shown.print(f"a\tb\n{hostile}", "größe 日本 ½")
    assert out.getvalue().startswith("a")
    assert not console.CONTROL_CHARACTERS.search(out.getvalue().replace("\t", " "))
    assert "größe 日本 ½" in out.getvalue()


def test_a_name_that_is_too_long_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in (["train", "tiny", "--out"], ["resume"], ["translate"]):
        assert main([*arguments, str(tmp_path / ("x" * 300))]) in (2, 74)
        assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    "report",
    [
        '{"step": -Infinity, "split": "dev", "loss": 1}',
        f'{{"step": -{10**400}, "split": "dev", "loss": 1}}',
        f'{{"step": 1, "split": "dev", "loss": {10**400}}}',
        '{"step": 1, "split": "dev", "loss": "low"}',
        '{"step": 1, "split": "dev", "loss": []}',
        '{"step": 1, "loss": 1}',
        "[]",
    ],
)
def test_a_report_that_is_not_as_ours_is_refused(report: str, copy: Path) -> None:
    folder = RunDirectory.open(copy)
    before = folder.metrics.read_text("utf-8")
    folder.metrics.write_text(f"{report}\n{before}", "utf-8")

    def begin() -> None:
        folder.truncate_metrics(8, {"train": 1, "dev": 1})
        MetricWriter(folder, QUIET, step=8).__enter__()

    with pytest.raises(StorageError, match=r"metrics.jsonl (has no report|cannot be read)"):
        begin()


def test_opening_a_run_imports_nothing_from_it(copy: Path) -> None:
    (copy / "sitecustomize.py").write_text("raise SystemExit(9)")
    (copy / "sentencepiece.py").write_text("raise SystemExit(9)")
    program = f"import transformer_jax; print(transformer_jax.load({str(copy)!r}).step)"
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        cwd=copy,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "8\n"
