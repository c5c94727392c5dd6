"""Test that an untrusted run cannot execute code, access other files, or crash the process."""

import hashlib
import io
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from example_configs import FOLDER
from training_runs import PRIVATE, QUIET

import transformer_jax
from transformer_jax import console
from transformer_jax.cli import main
from transformer_jax.data import tokenizer
from transformer_jax.data.tokenizer import Tokenizer, check_model
from transformer_jax.errors import DataError, StorageError, TransformerJaxError
from transformer_jax.files import MAX_JSON_BYTES, read_json, write_json
from transformer_jax.runs.metrics_file import truncate_metrics
from transformer_jax.runs.run_folder import RunFolder
from transformer_jax.training.metric_writer import MetricWriter

PACKAGE = Path(transformer_jax.__file__).parent


@pytest.fixture
def copy(whole_run: Path, tmp_path: Path) -> Path:
    """The path to a copy of `whole_run` that tests may modify."""
    subprocess.run(["cp", "-r", str(whole_run), str(tmp_path / "copy")], check=True)
    return tmp_path / "copy"


def test_nothing_in_the_package_executes_data() -> None:
    forbidden = re.compile(
        r"^\s*(import|from) (?!pickle import UnpicklingError$)"
        r"(pickle|marshal|shelve|dill|cloudpickle)\b"
        # PyYAML may only write files.
        r"|from yaml|\byaml\.\w*[lL]oad"
        r"|(?<![\w.])(?<!def )(eval|exec|compile|__import__)\("
        r"|shell=True|allow_pickle=True|os\.system\(",
        re.MULTILINE,
    )
    offenders = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if forbidden.search(path.read_text("utf-8"))
    }
    assert not offenders


def test_a_run_contains_neither_secrets_nor_paths_that_its_config_does_not_name(
    whole_run: Path,
) -> None:
    forbidden = {PRIVATE.encode(), str(Path.home()).encode() + b"/", str(Path.cwd()).encode()}
    files = [path for path in whole_run.rglob("*") if path.is_file()]
    assert len(files) > 20
    for path in files:
        content = path.read_bytes().replace(str(FOLDER).encode(), b"")
        assert not [word for word in forbidden if word in content], path


def nest_deeply(path: Path) -> None:
    (path / "run.json").write_text('{"config":' * 100_000)


def write_pickle(path: Path) -> None:
    (path / "run.json").write_bytes(b"cos\nsystem\n(S'touch owned'\ntR.")


def change_config(section: str, **fields: Any) -> Callable[[Path], None]:
    """Return a function that changes fields in the stored config."""

    def change(path: Path) -> None:
        description = read_json(path / "run.json")
        description["config"][section].update(fields)
        write_json(path / "run.json", description)

    return change


def link(name: str, to: str) -> Callable[[Path], None]:
    """Return a function that replaces a file with a symbolic link."""

    def change(path: Path) -> None:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).unlink(missing_ok=True)
        (path / name).symlink_to(to)

    return change


def replace_vocabulary(content: bytes) -> Callable[[Path], None]:
    """Return a function that replaces the vocabulary and updates its digest."""

    def change(path: Path) -> None:
        (path / "tokenizer.model").write_bytes(content)
        description = read_json(path / "run.json")
        description["vocabulary"]["sha256"] = hashlib.sha256(content).hexdigest()
        write_json(path / "run.json", description)

    return change


MANIPULATIONS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a pickle": (write_pickle, "cannot be read"),
    "deep nesting": (nest_deeply, "cannot be read"),
    "a long description": (
        lambda p: os.truncate(p / "run.json", MAX_JSON_BYTES + 1),
        "more than 16 MiB",
    ),
    "a huge width": (change_config("model", d_ff=10**12), "d_ff must be from 1 to"),
    "a large width": (
        change_config("model", d_ff=10**6),
        "belongs to another run: model.d_ff 32 -> 1000000",
    ),
    "a huge depth": (change_config("model", num_layers=10**6), "num_layers must be from 1 to"),
    "NaN": (change_config("model", dropout=float("nan")), "dropout must be"),
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
    "a pipe in a checkpoint": (
        lambda p: os.mkfifo(p / "checkpoints" / "8" / "x"),
        "or a special file",
    ),
    "a pipe": (lambda p: os.mkfifo(p / "samples.txt"), "or a special file"),
    "an empty vocabulary": (replace_vocabulary(b""), "tokenizer.model"),
    "a vocabulary of junk": (replace_vocabulary(b"\xff" * 99), "not a SentencePiece model"),
}


@pytest.mark.parametrize("name", MANIPULATIONS)
@pytest.mark.trials("a run folder that was tampered with")
def test_a_manipulated_run_is_rejected_in_one_line(
    name: str, copy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(copy)
    manipulate, message = MANIPULATIONS[name]
    manipulate(copy)
    before = Path("/etc/passwd").read_bytes()
    for command in ("translate", "evaluate", "resume"):
        assert main([command, str(copy)]) in (2, 74)
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert message in error
        assert "Traceback" not in error
    assert not (copy / "owned").exists()
    assert Path("/etc/passwd").read_bytes() == before


def test_a_run_is_read_although_other_programs_leave_files_in_it(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for parent in (copy, *(path for path in copy.rglob("*") if path.is_dir())):
        for path in parent.iterdir():
            if path.is_file() and " " not in path.name:
                (parent / f"{path.name} (1)").write_bytes(b"stray")
                path.with_name(f"{path.stem}-LAPTOP{path.suffix}").write_bytes(b"stray")
        for name in (".DS_Store", ".nfs00af", "Thumbs.db"):
            (parent / name).write_bytes(b"stray")
        for name in (".ipynb_checkpoints", "lost+found"):
            (parent / name).mkdir()
            (parent / name / "loss").write_bytes(b"stray")
        (parent / ".#run.json").symlink_to("user@host.1234")
    assert main(["evaluate", str(copy), "--split", "dev"]) == 0
    assert main(["resume", str(copy)]) == 0
    assert main(["package", str(copy), "--out", str(copy.parent / "package")]) == 0
    assert "damaged" not in capsys.readouterr().err
    assert (copy / "checkpoints" / ".nfs00af").exists()


def rejection_of(model: bytes) -> str:
    """Return the reason why a vocabulary is rejected, or "" if it is accepted."""
    try:
        check_model(model, "tokenizer.model")
        Tokenizer(model, "tokenizer.model")
    except DataError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("tries", [12, pytest.param(200, marks=pytest.mark.exhaustive)])
@pytest.mark.trials("a damaged vocabulary", "tries")
def test_no_vocabulary_crashes_the_process(tries: int) -> None:
    rng = random.Random(tries)
    valid = Tokenizer.train(["one two three", "eins zwei drei"], 24).model
    rejected = 0
    for number in range(tries):
        model = bytearray(valid)
        for _ in range(rng.choice([1, 1, 5, 50])):
            model[rng.randrange(len(model))] = rng.randrange(256)
        if number % 4 == 0:
            # Append a SentencePiece entry whose stated length extends far past the end of the file.
            model += b"\x0a\xff\xff\xff\x0f" + bytes(rng.choice([0, 10_000]))
        message = rejection_of(bytes(model))
        rejected += bool(message)
        assert "\n" not in message
        kinds = ("is not a SentencePiece model: ", "has different special tokens: ")
        assert not message or message.removeprefix("tokenizer.model ").startswith(kinds)
    assert rejected > tries / 4


@pytest.fixture
def unverified(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """A vocabulary that has not been verified yet."""
    monkeypatch.setattr(tokenizer, "TRIED", set())
    return Tokenizer.train(["one two three"], 20).model


@pytest.mark.parametrize("end", ["os.abort()", "bytearray(8 << 30)", "os._exit(3)"])
def test_a_vocabulary_that_crashes_the_verifying_process_is_rejected(
    unverified: bytes, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tokenizer.PROBE.replace("p = ", f"import os; {end} #")
    monkeypatch.setattr(tokenizer, "PROBE", program)
    for _ in range(2):
        with pytest.raises(DataError, match="x is not a SentencePiece model: "):
            check_model(unverified, "x")


def test_a_vocabulary_with_a_special_token_that_is_not_utf8_is_rejected(unverified: bytes) -> None:
    assert b"\n\x05<pad>" in unverified
    with pytest.raises(DataError, match="x is not a SentencePiece model: UnicodeDecodeError"):
        check_model(unverified.replace(b"\n\x05<pad>", b"\n\x05\xffpad>"), "x")


def test_a_vocabulary_is_verified_once(unverified: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    check_model(unverified, "x")
    monkeypatch.setattr(tokenizer, "PROBE", "raise SystemExit(1)")
    check_model(unverified, "y")
    other = Tokenizer.train(["one two three"], 19).model
    with pytest.raises(TransformerJaxError):
        check_model(other, "x")


def test_a_vocabulary_is_verified_with_the_packages_of_this_process(
    unverified: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tokenizer.PROBE.replace("import sentencepiece", "import sentencepiece, elsewhere")
    monkeypatch.setattr(tokenizer, "PROBE", program)
    # The working directory may be untrusted, so packages must not be imported from it.
    (tmp_path / "elsewhere.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    with pytest.raises(TransformerJaxError, match=r"x cannot be tested in .*No module") as caught:
        check_model(unverified, "x")
    assert not isinstance(caught.value, DataError)
    monkeypatch.syspath_prepend(tmp_path)
    check_model(unverified, "x")


def test_terminals_show_control_sequences_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "runs/\x1b]0;owned\x07\x1b[2J\u202efdp\r[red]x[/red]"
    assert main(["translate", hostile]) == 2
    assert capsys.readouterr().err == (
        "transformer-jax: runs/\\x1b]0;owned\\x07\\x1b[2J\\u202efdp\\r[red]x[/red] is not a run: "
        "it has no run.json\n"
    )
    out = io.StringIO()
    shown = console.PlainConsole()
    shown.file = out
    shown.print(f"a\tb\n{hostile}", "größe 日本 ½")
    assert out.getvalue().startswith("a")
    assert not console.CONTROL_CHARACTERS.search(out.getvalue().replace("\t", " "))
    assert "größe 日本 ½" in out.getvalue()


def test_a_name_that_is_too_long_is_reported_in_one_line(
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
def test_an_invalid_report_is_rejected(report: str, copy: Path) -> None:
    folder = RunFolder.open(copy)
    before = folder.metrics.read_text("utf-8")
    folder.metrics.write_text(f"{report}\n{before}", "utf-8")

    def resume() -> None:
        truncate_metrics(folder.metrics, 8, {"train": 1, "dev": 1})
        MetricWriter(folder, QUIET, step=8).__enter__()

    with pytest.raises(
        StorageError, match=r"metrics.jsonl (line 1 is not a report|cannot be read)"
    ):
        resume()


def test_loading_a_run_imports_nothing_from_its_directory(copy: Path) -> None:
    (copy / "sitecustomize.py").write_text("raise SystemExit(9)")
    (copy / "sentencepiece.py").write_text("raise SystemExit(9)")
    program = f"import transformer_jax; print(transformer_jax.load({str(copy)!r}).step)"
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    ended = subprocess.run(
        [sys.executable, "-P", "-c", program],
        cwd=copy,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout == "8\n"


def test_the_help_of_a_hostile_run_is_plain_text(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change_config("data", languages=["[/b]\x1b]0;owned\x07", "[red]de"])(copy)
    assert main(["resume", str(copy), "--help-all"]) == 0
    printed = capsys.readouterr().out
    assert r"[/b]\x1b]0;owned\x07" in printed
    assert "[red]de" in printed
    assert "\x1b" not in printed
