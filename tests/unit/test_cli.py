"""The command line: a mistake is one line and an exit code, before JAX and before any file."""

import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small import SMALL

import transformer_jax
from transformer_jax.cli import main
from transformer_jax.commands import COMMANDS
from transformer_jax.commands.inference import _decode_lines
from transformer_jax.config import DataConfig, DecodeConfig, ModelConfig, TrainConfig
from transformer_jax.config.loading import load_rows
from transformer_jax.data.prepare import prepare
from transformer_jax.errors import DataError
from transformer_jax.runs.run_directory import RunDirectory

SECTIONS = (ModelConfig, DataConfig, TrainConfig, DecodeConfig)
OPTIONS = [
    f"--{kind.name}.{field.name.replace('_', '-')}"
    for kind in SECTIONS
    for field in dataclasses.fields(kind)
]

# Commands that cannot be meant, and words of the line that says why.
MISTAKES: dict[tuple[str, ...], str] = {
    ("trian", "tiny"): "no verb 'trian'; did you mean 'train'?",
    ("--verbose",): "no verb '--verbose'",
    ("train",): "train begins with a config",
    ("prepare", "--data.vocab-size", "9"): "prepare begins with a config",
    ("resume",): "resume begins with a run",
    ("evaluate",): "evaluate begins with a run",
    ("train", "tinny"): "no config file tinny; did you mean 'tiny'?",
    ("prepare", "nowhere/x.py"): "no config file nowhere/x.py",
    ("train", "table3"): "name one: table3:base",
    ("params", "table3:A11"): "did you mean 'A1'?",
    ("resume", "nowhere"): "nowhere is no run",
    ("train", "tiny", "extra"): "extra",
    ("train", "tiny", "--model.num-haeds", "4"): "did you mean --model.num-heads?",
    ("train", "tiny", "--num-heads", "4"): "did you mean --model.num-heads?",
    ("train", "tiny", "--train.steps"): "--train.steps",
    ("train", "tiny", "--model.d-model", "wide"): "'wide'",
    ("train", "tiny", "--model.dropout", "much"): "'much'",
    ("train", "tiny", "--train.steps", "1.5"): "'1.5'",
    ("train", "tiny", "--model.remat", "perhaps"): "perhaps",
    ("train", "tiny", "--model.positions", "sinus"): "'sinus'",
    ("train", "tiny", "--model.dtype", "float16"): "'float16'",
    ("evaluate", "runs/x", "--split", "tset"): "got 'tset'; did you mean 'test'?",
    (
        "evaluate",
        "runs/x",
        "--average-checkpoints",
        "0",
    ): "--average-checkpoints must be positive, got 0",
    ("translate", "runs/x", "--beam-size", "wide"): "--beam-size must be {None}|INT, got 'wide'",
    ("evaluate", "runs/x", "--beam", "wide"): "--beam-size must be {None}|INT, got 'wide'",
    ("evaluate", "runs/x", "--step", "last"): "--step must be {None}|INT, got 'last'",
    ("prepare", "text", "--data.train", "a.en"): "--data.train must be two strings, got 'a.en'",
    ("evaluate", "runs/x", "--baseline"): "--baseline",
    ("evaluate", "runs/x", "--singels"): "--singels",
    ("train", "tiny", "--model.d-model", "129"): "model.d_model must be even",
    ("train", "tiny", "--model.d-k", "0"): "model.d_k must be from 1 to 1000000",
    ("train", "tiny", "--model.dropout", "1.0"): "model.dropout must be",
    ("train", "tiny", "--data.max-length", "65"): "data.max_length must be at most",
    ("train", "tiny", "--model.max-length", "63"): "data.max_length must be at most",
    (
        "train",
        "tiny",
        "--decode.average_checkpoints",
        "21",
    ): "decode.average_checkpoints must be at most",
    (
        *("params", "tiny", "--model.positions", "learned"),
        *("--decode.max-extra-length", "51"),
    ): "decode.max_extra_length must be at most 50",
}


def run_python(
    code: str, *arguments: str, cwd: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run code in a Python of its own, without the test's checks of shapes."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=cwd,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def mistake(capsys: pytest.CaptureFixture[str], arguments: Sequence[str], code: int = 2) -> str:
    """Run a command that fails; return the one line that it says."""
    assert main(arguments) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.endswith("\n")
    assert len(err.splitlines()) == 1
    assert err.startswith("transformer-jax: ")
    return err


@pytest.mark.parametrize("arguments", MISTAKES, ids=" ".join)
def test_a_mistake_is_one_line_that_says_why(
    arguments: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for columns in ("200", "20"):  # of the terminal
        monkeypatch.setenv("COLUMNS", columns)
        assert MISTAKES[arguments] in mistake(capsys, arguments)


def test_a_mistake_comes_before_jax_and_leaves_nothing_on_disk(tmp_path: Path) -> None:
    code = (
        "import json, sys\n"
        "from transformer_jax.cli import main\n"
        "for arguments in json.loads(sys.argv[1]):\n"
        "    assert main(arguments) == 2, arguments\n"
        "    assert 'jax' not in sys.modules, arguments\n"
    )
    ended = run_python(
        code,
        json.dumps(list(MISTAKES)),
        cwd=tmp_path,
        TRANSFORMER_JAX_CACHE=str(tmp_path / "cache"),
    )
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
def test_a_mistake_is_told_whatever_the_terminals_encoding(encoding: str, tmp_path: Path) -> None:
    ended = run_python(
        "import sys; from transformer_jax.cli import main; sys.exit(main())",
        *("train", "tiny", "--model.num-haeds", "4"),
        cwd=tmp_path,
        PYTHONIOENCODING=encoding,
    )
    assert ended.returncode == 2
    assert "did you mean --model.num-heads?" in ended.stderr


def test_a_run_is_not_begun_where_something_lies(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    monkeypatch.chdir(tmp_path)
    assert "--out mine-2" in mistake(capsys, ["train", "tiny", "--out", "mine"])
    for place in (".", str(tmp_path), "mine/../mine"):
        assert "is there already" in mistake(capsys, ["train", "tiny", "--out", place])
    assert [path.name for path in tmp_path.rglob("*")] == ["mine", "notes.txt"]


@pytest.mark.parametrize("option", OPTIONS)
def test_a_slip_in_an_option_is_told_with_the_one_that_was_meant(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = mistake(capsys, ["params", "tiny", option + option[-1], "1"])
    assert line.endswith(f"; did you mean {option}?\n")


@pytest.mark.parametrize(
    "arguments",
    [[], ["-h"], ["--help"], *([verb, "--help"] for verb in COMMANDS), ["params", "tiny", "-h"]],
    ids=" ".join,
)
def test_help_goes_to_standard_output(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert "usage: transformer-jax" in out
    assert err == ""


def test_help_tells_every_verb_and_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--help"])
    out = capsys.readouterr().out
    assert all(re.search(rf"^ +{verb} +\w+", out, re.MULTILINE) for verb in COMMANDS)
    main(["train", "--help"])
    told = set(re.findall(r"--[\w.-]+", capsys.readouterr().out))
    assert {*OPTIONS, "--out", "--init-from"} <= told


def test_help_needs_no_jax(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from transformer_jax.cli import main\n"
        "for arguments in ([], *([verb, '--help'] for verb in sys.argv[1:])):\n"
        "    assert main(arguments) == 0, arguments\n"
        "    assert 'jax' not in sys.modules, arguments\n"
    )
    ended = run_python(code, *COMMANDS, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(
    ("arguments", "code"), [(["--help"], 0), (["train", "--help"], 0), (["train", "tinny"], 2)]
)
def test_help_and_mistakes_come_at_once(arguments: list[str], code: int, tmp_path: Path) -> None:
    seconds: list[float] = []
    for _ in range(3):
        start = time.perf_counter()
        ended = run_python(
            "import sys; from transformer_jax.cli import main; sys.exit(main())",
            *arguments,
            cwd=tmp_path,
        )
        seconds.append(time.perf_counter() - start)
        assert ended.returncode == code
    # Half a second where nothing else runs.
    assert min(seconds) < 1.5


def test_the_package_is_imported_without_jax(tmp_path: Path) -> None:
    code = "import sys, transformer_jax; sys.exit('jax' in sys.modules)"
    assert run_python(code, cwd=tmp_path).returncode == 0
    code = "import sys, transformer_jax; transformer_jax.load; sys.exit('jax' in sys.modules)"
    assert run_python(code, cwd=tmp_path).returncode == 1


def test_the_package_has_what_it_says_and_no_more() -> None:
    assert callable(transformer_jax.load)
    assert dataclasses.is_dataclass(transformer_jax.Run)
    with pytest.raises(AttributeError, match="module 'transformer_jax' has no attribute 'nope'"):
        transformer_jax.nope  # noqa: B018


def test_the_module_is_the_command(tmp_path: Path) -> None:
    def ended(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "transformer_jax", *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )

    assert "usage: transformer-jax VERB" in ended("--help").stdout
    failed = ended("trian")
    assert (failed.returncode, failed.stdout) == (2, "")
    assert "did you mean 'train'?" in failed.stderr


def counts(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["params", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", ["tiny", "base", "big"])
def test_the_modules_parameters_sum_to_the_total(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    modules = counts(capsys, name)
    total = modules.pop("total")
    assert sum(modules.values()) == total
    assert main(["params", name]) == 0
    printed = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert printed == {name: f"{count:,}" for name, count in {**modules, "total": total}.items()}


def test_the_base_model_has_as_many_parameters_as_its_equations(
    capsys: pytest.CaptureFixture[str],
) -> None:
    d_model, d_ff, layers, vocabulary = 512, 2048, 6, 37_000
    attention = 4 * d_model * d_model
    feed_forward = 2 * d_model * d_ff + d_ff + d_model
    norm = 2 * d_model
    encoder = layers * (attention + feed_forward + 2 * norm)
    decoder = layers * (2 * attention + feed_forward + 3 * norm)
    assert counts(capsys, "base")["total"] == vocabulary * d_model + encoder + decoder


def test_a_sweep_prints_each_row_beside_the_papers(capsys: pytest.CaptureFixture[str]) -> None:
    rows = load_rows("table3")
    assert len(rows) == 20
    # One layer each is enough to see, and fast.
    assert main(["params", "table3", "--model.num-layers", "1"]) == 0
    header, *lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert header[:2] == ["row", "parameters"]
    assert [line[0] for line in lines] == list(rows)
    for line, row in zip(lines, rows.values(), strict=True):
        paper = row.paper.parameters
        assert line[4:5] == ([f"{paper:g}"] if paper else [])
    totals = counts(capsys, "table3", "--model.num-layers", "1")
    assert [line[1] for line in lines] == [f"{row['total']:,}" for row in totals.values()]


@pytest.mark.parametrize(
    "override", [["--model.num-heads", "4"], ["--model.num_heads=4"], ["--model.num-heads=4"]]
)
def test_an_option_overrides_the_configs_field(
    override: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    eight, four = counts(capsys, "base"), counts(capsys, "base", *override)
    assert four["encoder.self_attention"] * 2 == eight["encoder.self_attention"]
    assert four["encoder.feed_forward"] == eight["encoder.feed_forward"]


def test_an_option_overrides_the_field_in_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["params", "heads", "--json", "--data.vocab-size", "100"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["embedding"] for row in rows.values()} == {100 * 512}
    assert len(rows) == 5


def test_what_may_not_be_meant_is_noted_beside_the_result(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["params", "tiny", "--json", "--model.d-k", "16"]) == 0
    out, err = capsys.readouterr()
    assert err == "note: num_heads x d_k is 64, not d_model (128)\n"
    assert json.loads(out)["total"] > 0


@pytest.mark.parametrize("verb", ["resume", "evaluate", "translate"])
@pytest.mark.parametrize("place", ["nowhere", "file", "folder"])
def test_a_path_that_is_no_run_is_told(
    verb: str, place: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("{}")
    (tmp_path / "folder").mkdir()
    path = tmp_path / place
    assert f"{path} is no run" in mistake(capsys, [verb, str(path)])


@pytest.mark.parametrize("verb", ["resume", "evaluate", "translate"])
@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": "one"}', '{"format": 2}'])
def test_a_run_with_a_broken_description_is_told(
    verb: str, text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "run.json").write_text(text)
    line = mistake(capsys, [verb, str(tmp_path)], code=74)
    assert str(tmp_path / "run.json") in line


@given(st.lists(st.text(st.characters(exclude_characters="\r\n\ufeff", codec="utf-8"))))
@settings(deadline=None, derandomize=True)
def test_lines_come_back_as_they_were_joined(lines: list[str]) -> None:
    assert _decode_lines("".join(f"{line}\n" for line in lines).encode()) == lines
    assert _decode_lines("".join(f"{line}\r\n" for line in lines).encode()) == lines
    last_line_has_words = bool(lines and lines[-1])
    if last_line_has_words:
        assert _decode_lines("\n".join(lines).encode()) == lines


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"", []),
        (b"\n", [""]),
        (b"\n\n", ["", ""]),
        (b"one", ["one"]),
        (b"one\n", ["one"]),
        (b"one\n\ntwo\n", ["one", "", "two"]),
        (b"one\r\ntwo\r\n", ["one", "two"]),
        (b"one\rtwo\n", ["one\rtwo"]),
        ("\ufeffone\n\ufefftwo\n".encode(), ["one", "\ufefftwo"]),
        ("one\u2028two\u0085three\x0cfour\n".encode(), ["one\u2028two\u0085three\x0cfour"]),
    ],
)
def test_only_a_newline_ends_a_line(data: bytes, lines: list[str]) -> None:
    assert _decode_lines(data) == lines


def test_a_line_that_is_no_utf_8_is_told_by_number() -> None:
    with pytest.raises(DataError, match=r"^line 2 is not UTF-8: "):
        _decode_lines(b"one\nzw\xffei\nthree\n")


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (("table3:A1", "base"), ["model.num_heads", "model.d_k", "model.d_v"]),
        (("table3:D3", "base"), ["train.label_smoothing"]),
        (("base", "base"), []),
    ],
)
def test_diff_names_the_fields_that_differ(
    names: tuple[str, str], told: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", *names, "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)) == told
    assert main(["diff", *names]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in told or ["no difference"])


def test_diff_of_runs_tells_what_they_were_made_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared = prepare(SMALL.data)
    for name, seed in (("a", 0), ("b", 1)):
        config = SMALL.change(train={"seed": seed})
        RunDirectory.create(tmp_path / name, config, prepared.vocabulary, prepared.fingerprint)
    description = tmp_path / "b" / "run.json"
    stored = json.loads(description.read_text())
    stored["versions"]["jax"] = "0.0.1"
    description.write_text(json.dumps(stored))
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"train.seed", "made with jax"}
    assert found["made with jax"][1] == "0.0.1"
    assert main(["diff", str(tmp_path / "a"), str(tmp_path)]) == 2
    assert "is no run" in capsys.readouterr().err
