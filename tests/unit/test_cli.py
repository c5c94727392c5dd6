"""Test that the command line reports mistakes before it imports JAX or writes files."""

import dataclasses
import inspect
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import counts, mistake, run_python

import transformer_jax
from transformer_jax.cache import cache_folder
from transformer_jax.cli import main
from transformer_jax.commands import COMMANDS
from transformer_jax.commands.arguments import parse
from transformer_jax.config import Config, DataConfig, DecodeConfig, ModelConfig, TrainConfig
from transformer_jax.config.loading import load_config, shipped_configs
from transformer_jax.data.text_files import data_folder
from transformer_jax.errors import UsageError
from transformer_jax.runs.run_folder import FORMAT

SECTIONS = (ModelConfig, DataConfig, TrainConfig, DecodeConfig)
OPTIONS = [
    f"--{kind.name}.{field.name.replace('_', '-')}"
    for kind in SECTIONS
    for field in dataclasses.fields(kind)
]
SLOW_IMPORTS = ("jax", "flax", "optax", "orbax", "tensorflow_datasets", "matplotlib", "scipy")

# Each invalid command is mapped to the part of its error message that explains the problem.
MISTAKES: dict[tuple[str, ...], str] = {
    ("trian", "tiny"): "unknown command 'trian'; did you mean 'train'?",
    ("--verbose",): "unknown command '--verbose'",
    ("train",): "train needs a config: transformer-jax train CONFIG [OPTIONS]",
    ("prepare", "--data.vocab-size", "9"): "prepare needs a config",
    ("resume",): "resume needs a run",
    ("evaluate",): "evaluate needs a run: transformer-jax evaluate RUN [OPTIONS]",
    ("plot",): "plot needs a run: transformer-jax plot RUN... [OPTIONS]",
    ("plot", "nowhere", "--out", "x.svg"): "nowhere is not a run",
    ("plot", "runs/x", "--kind", "head"): "got 'head'; did you mean 'heads'?",
    ("attention",): "needs a run and a source sentence: transformer-jax attention RUN SOURCE",
    ("attention", "runs/x"): "attention RUN SOURCE [TARGET] [OPTIONS]",
    ("attention", "runs/x", "a", ""): "TARGET needs a value",
    ("attention", "runs/x", ""): "attention RUN SOURCE [TARGET] [OPTIONS]",
    ("attention", "runs/x", "a", "b", "c"): "attention got an unexpected argument 'c'",
    ("attention", "runs/x", "a", "--kind", "crosss"): "got 'crosss'; did you mean 'cross'?",
    ("attention", "runs/x", "a", "--layer", "last"): "--layer must be an integer, got 'last'",
    ("attention", "runs/x", "a", "--out", "x.pdf"): "must end in .html, .svg, or .png, got 'x.pdf'",
    ("attention", "nowhere", "a"): "nowhere is not a run",
    ("diff", "tiny"): "diff needs two configs or runs",
    ("sweep", "--seeds", "2"): "sweep needs",
    ("train", "tinny"): "no config file tinny; did you mean 'tiny'?",
    ("train", "tiny", "--out", "runs/\udcff"): r"the path runs/\udcff is not UTF-8: choose another",
    ("train", "tiny", "--data.folder", "\udcff"): r"data.folder must be UTF-8, got '\udcff'",
    (
        "import",
        "nowhere",
    ): "nowhere is not an exported model: it has no run.json and no config.json",
    ("prepare", "nowhere/x.py"): "no config file nowhere/x.py",
    ("train", "big", "--data-from", "tinny"): "no config file tinny; did you mean 'tiny'?",
    ("train", "table3"): "choose one, such as table3:base",
    ("params", "table3:A11"): "did you mean 'A1'?",
    ("resume", "nowhere"): "nowhere is not a run",
    ("train", "tiny", "extra"): "train got an unexpected argument 'extra'",
    ("train", "tiny", "b.py"): "unexpected argument 'b.py'; repeat --import for each file",
    ("sweep", "tiny", "--seed", "3"): "unknown option --seed; did you mean --seeds?",
    ("train", "tiny", "--model.num-haeds", "4"): "did you mean --model.num-heads?",
    ("train", "tiny", "--model.num_haeds=4"): "did you mean --model.num-heads?",
    ("train", "tiny", "--num-heads", "4"): "did you mean --model.num-heads?",
    ("train", "tiny", "--modle.num_head", "4"): "did you mean --model.num-heads?",
    ("sweep", "tiny", "--data", "smoke"): "unknown option --data; did you mean --data-from?",
    ("train", "tiny", "-x"): "unknown option -x",
    ("train", "tiny", "--train.steps"): "--train.steps needs a value",
    ("train", "tiny", "--out", ""): "--out needs a value\n",
    ("train", "tiny", "--init_from", ""): "--init-from needs a value\n",
    ("train", "tiny", "--init_from="): "--init-from needs a value\n",
    ("evaluate", "runs/x", "--baseline="): "--baseline needs a value\n",
    ("sweep", "table3", "--rows", "--seeds", "1"): "--rows needs a value",
    ("sweep", "heads", "--grid", "model.d_k=8,16"): "--grid needs a config with one row, such as",
    ("sweep", "tiny", "--grid", "model.dk=8,16"): "unknown field 'dk' of the section model; did",
    ("sweep", "tiny", "model.d_k=8"): "unexpected argument 'model.d_k=8': write --model.d-k 8",
    ("sweep", "tiny", "--tune", "model.d_k", "8"): "tuning model.d_k needs at least two different",
    ("sweep", "tiny", "--tune-seeds", "2"): "--tune-seeds needs --tune",
    ("train", "tiny", "--train.steps", "--supervise"): "--train.steps needs a value",
    ("train", "tiny", "--model.d-model", "wide"): "--model.d-model must be an integer, got 'wide'",
    ("train", "tiny", "--model.dropout", "much"): "--model.dropout must be a number, got 'much'",
    ("train", "tiny", "--train.steps", "1.5"): "--train.steps must be an integer, got '1.5'",
    ("train", "tiny", "--model.remat", "perhaps"): "unexpected argument 'perhaps'",
    ("train", "tiny", "--model.remat=perhaps"): "--model.remat takes no value, got 'perhaps'",
    ("train", "tiny", "--model.positions", "sinus"): "got 'sinus'; did you mean 'sinusoidal'?",
    (
        "train",
        "tiny",
        "--model.dtype",
        "float16",
    ): "must be one of float32, bfloat16, float64, got 'float16'",
    ("evaluate", "runs/x", "--split", "tset"): "got 'tset'; did you mean 'test'?",
    (
        *("evaluate", "runs/x", "--average-checkpoints", "0"),
    ): "--average-checkpoints must be positive, got 0",
    (
        *("translate", "runs/x", "--beam-size", "wide"),
    ): "--beam-size must be an integer, got 'wide'",
    ("evaluate", "runs/x", "--beam", "wide"): "--beam must be an integer, got 'wide'",
    ("evaluate", "runs/x", "--step", "last"): "--step must be an integer, got 'last'",
    ("prepare", "text:300", "--data.train", "a.en"): "--data.train must be two strings, got",
    ("evaluate", "runs/x", "--baseline"): "--baseline needs a value",
    ("evaluate", "runs/x", "--singels"): "unknown option --singels\n",
    ("evaluate", "runs/x", "--split", "x"): "--split must be dev or test, got 'x'\n",
    ("train", "tiny", "--tabel", "3"): "unknown option --tabel\n",
    ("train", "tiny", "--arguments", "x"): "unknown option --arguments\n",
    ("--help", "trian"): "unknown command 'trian'; did you mean 'train'?",
    ("list",): "unknown command 'list' (available: prepare, train,",
    ("train", "tiny", "model.num_heads=4"): (
        "unexpected argument 'model.num_heads=4': write --model.num-heads 4\n"
    ),
    ("completion",): "completion needs one shell, such as bash (available: bash, zsh, fish)\n",
    ("completion", "tcsh"): "no completion for 'tcsh' (available: bash, zsh, fish)\n",
    ("train", "--import"): "--import needs a value\n",
    ("compile",): "compile needs a config: transformer-jax compile CONFIG [OPTIONS]",
    ("compile", "tiny"): "compile needs --target, such as --target v5e:2x4 (available: v4, v5e,",
    ("compile", "tiny", "--target", "v5e:2x4", "h300"): "no target 'h300'; did you mean 'h200'?",
    ("compile", "tiny", "--target", "v5e", "--fit", "--largest"): "leave out --largest",
    (
        *("compile", "tiny", "--target", "v5e", "--parallelism", "fspd"),
    ): "--parallelism must be one of data, fsdp, pmap, got 'fspd'; did you mean 'fsdp'?",
    ("evaluate", "runs/x", "--beam-sizes", "4", "x"): "--beam-sizes must be integers, got '4 x'",
    ("sweep", "tiny", "--target", "v5e"): "--target needs --dry-run",
    ("sweep", "tiny", "--dry-run", "--target", "v5e:8"): "a v5e slice has 2 dimensions",
    ("train", "tiny", "--model.d-model", "129"): "model.d_model must be even",
    ("train", "tiny", "--model.d-k", "0"): "model.d_k must be from 1 to 1000000",
    ("train", "tiny", "--model.d-k", "-1"): "model.d_k must be from 1 to 1000000, got -1",
    ("train", "tiny", "--model.dropout", "1.0"): "model.dropout must be",
    ("train", "tiny", "--data.max-length", "65"): "data.max_length must be at most",
    ("train", "tiny", "--model.max-length", "63"): "data.max_length must be at most",
    (
        *("train", "tiny", "--decode.average_checkpoints", "21"),
    ): "decode.average_checkpoints must be at most",
    (
        *("params", "tiny", "--model.positions", "learned"),
        *("--decode.max-extra-length", "51"),
    ): "decode.max_extra_length must be at most 50",
}


# Mistakes


def test_a_misspelled_option_is_reported_with_the_closest_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    # Each option takes a tenth of a second, so test a sample.
    for option in OPTIONS[::6]:
        line = mistake(capsys, ["params", "tiny", option + option[-1], "1"])
        assert line.endswith(f"; did you mean {option}?\n")


def test_a_mistake_is_reported_in_one_line_before_slow_imports_and_writes_no_file(
    tmp_path: Path,
) -> None:
    code = (
        "import json, sys\n"
        "from transformer_jax.cli import main\n"
        "mistakes, helps, slow = map(json.loads, sys.argv[1:])\n"
        "for code, commands in ((2, mistakes), (0, helps)):\n"
        "    for arguments in commands:\n"
        "        assert main(arguments) == code, arguments\n"
        "        assert not {*slow} & {*sys.modules}, arguments\n"
        "    print('end of commands with exit code', code)\n"
    )
    helps: list[list[str]] = [
        [],
        ["train", "tiny", "--help"],
        *([name, "--help"] for name in COMMANDS),
    ]
    ended = run_python(
        code,
        *map(json.dumps, (list(MISTAKES), helps, SLOW_IMPORTS)),
        cwd=tmp_path,
        TRANSFORMER_JAX_CACHE=str(tmp_path / "cache"),
        # An error message must not wrap, even in a narrow terminal.
        COLUMNS="20",
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("end of commands with exit code 2\n")
    lines = ended.stderr.splitlines(keepends=True)
    for line, (arguments, reason) in zip(lines, MISTAKES.items(), strict=True):
        assert line.startswith("transformer-jax: "), arguments
        assert reason in line, arguments
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "encoding", ["ascii", *(pytest.param(x, marks=pytest.mark.slow) for x in ("utf-8", "latin-1"))]
)
def test_results_and_mistakes_are_printed_in_any_encoding(encoding: str, tmp_path: Path) -> None:
    (tmp_path / "größe.json").write_text("{}")
    code = (
        "from transformer_jax.cli import main\n"
        "assert main(['diff', 'größe.json', 'tiny']) == 0\n"
        "assert main(['train', 'größe.json', '--model.num-haeds', '4']) == 2\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONUTF8": "1", "PYTHONIOENCODING": encoding},
        capture_output=True,
        check=False,
        encoding=encoding,
    )
    assert ended.returncode == 0, ended.stderr
    assert "did you mean --model.num-heads?" in ended.stderr
    assert (r"gr\xf6\xdfe.json" if encoding == "ascii" else "größe.json") in ended.stdout


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_a_command_runs_with_closed_streams(closed: str, tmp_path: Path) -> None:
    code = (
        "import sys; from transformer_jax.cli import main\n"
        "sys.exit(main(['diff', 'tiny', 'base']) or len(sys.stdin.read()))"
    )
    command = ["sh", "-c", f'"$1" -c "$2" {closed}', "sh", sys.executable, code]
    null = subprocess.DEVNULL
    ended = subprocess.run(command, cwd=tmp_path, stdin=null, capture_output=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_an_error_about_undecodable_text_keeps_its_exit_code_if_stderr_is_closed() -> None:
    command = ["sh", "-c", '"$1" -m transformer_jax train "$2" 2>&-', "sh", sys.executable, b"\xff"]
    assert subprocess.run(command, check=False).returncode == 2


def test_train_does_not_write_to_a_path_that_exists(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    monkeypatch.chdir(tmp_path)
    assert "--out mine-2" in mistake(capsys, ["train", "tiny", "--out", "mine"])
    for path in (".", str(tmp_path), "mine/../mine"):
        assert "already exists" in mistake(capsys, ["train", "tiny", "--out", path])
    assert [path.name for path in tmp_path.rglob("*")] == ["mine", "notes.txt"]


@pytest.mark.parametrize("command", ["resume", "evaluate", "translate", "plot"])
def test_a_path_without_a_run_is_reported(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("{}")
    (tmp_path / "folder").mkdir()
    for name in ("nowhere", "file", "folder"):
        assert f"{tmp_path / name} is not a run" in mistake(capsys, [command, str(tmp_path / name)])


@pytest.mark.parametrize("command", ["resume", "evaluate", "translate", "plot"])
def test_a_run_with_an_invalid_description_is_reported(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    only_format = json.dumps({"format": FORMAT})
    for text in ("", "{", "[]", "{}", '{"format": "one"}', only_format):
        (tmp_path / "run.json").write_text(text)
        line = mistake(capsys, [command, str(tmp_path)], code=os.EX_IOERR)
        assert str(tmp_path / "run.json") in line


# Help


def test_help_goes_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    of_commands = ([name, "--help"] for name in COMMANDS)
    helps: list[list[str]] = [[], ["-h"], ["--help"], *of_commands, ["params", "tiny", "-h"]]
    for arguments in helps:
        assert main(arguments) == 0
        out, err = capsys.readouterr()
        assert "usage: transformer-jax" in out
        assert err == ""


def test_help_lists_every_command_and_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--help"])
    out = capsys.readouterr().out
    assert all(re.search(rf"^ +{name} +\w+", out, re.MULTILINE) for name in COMMANDS)
    main(["train", "--help-all"])
    listed = set(re.findall(r"--[\w.-]+", capsys.readouterr().out))
    assert {*OPTIONS, "--out", "--init-from", "--data-from", "--train-from"} <= listed
    main(["sweep", "--help"])
    listed = set(re.findall(r"--[\w.-]+", capsys.readouterr().out))
    assert {*OPTIONS, "--data-from", "--train-from", "--decode-from", "--scale"} <= listed


def test_help_breaks_lines_only_where_the_next_word_does_not_fit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for name in COMMANDS:
        main([name, "--help"])
        lines = [line[1:-1].rstrip() for line in capsys.readouterr().out.splitlines()]
        for line, following in itertools.pairwise(lines):
            indent = len(line) - len(line.lstrip())
            if indent > 1 and indent == len(following) - len(following.lstrip()):
                assert len(f"{line} {following.split()[0]}") > 77, (name, line, following)


def test_help_omits_defaults_of_none(capsys: pytest.CaptureFixture[str]) -> None:
    for name in COMMANDS:
        main([name, "--help-all"])
        out = capsys.readouterr().out
        assert "None" not in out, name
        assert not re.search(r"\(default:\W+\)", out), name
    main(["evaluate", "--help"])
    assert "(default: False)" in capsys.readouterr().out


def test_help_shows_the_most_used_options_an_example_and_the_shipped_configs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["train", "--help"])
    out = capsys.readouterr().out
    options = re.findall(r"^\W (--[\w.-]+)", out, re.MULTILINE)
    assert len(options) == 10
    assert options[0] == "--out"
    assert {path.stem for path in shipped_configs().glob("*.py")} <= {*re.findall(r"\w+", out)}
    example = re.search("example: transformer-jax (.*)", out)
    assert example is not None
    words = example[1].split()
    assert isinstance(parse(words[0], COMMANDS[words[0]], words[1:]), COMMANDS["train"])


def test_help_and_version_are_also_commands(capsys: pytest.CaptureFixture[str]) -> None:
    outputs: dict[str, set[str]] = {}
    for same in (
        ("--help", "help", "help help", "help --help", "completion --help", "help completion"),
        ("train --help", "help train", "--help train"),
        ("train --help-all", "help train --help-all", "--help-all train"),
        ("--version", "-v", "version"),
    ):
        for words in same:
            assert main(words.split()) == 0
            outputs.setdefault(same[0], set()).add(capsys.readouterr().out)
    assert [len(texts) for texts in outputs.values()] == [1, 1, 1, 1]


COMPLETIONS = {
    "trai": {"train"},
    "train tin": {"tiny"},
    "sweep table3 table": {"table3", "table3_multi30k"},
    "train tiny --train.st": {"--train.steps"},
    "train tiny --model.dtype b": {"bfloat16"},
    "train tiny --data-from smo": {"smoke"},
}


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_shells_complete_commands_options_values_and_configs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, shell: str
) -> None:
    if shutil.which(shell) is None or shutil.which("bash") is None:
        pytest.skip(f"needs {shell} and bash")
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for words in COMPLETIONS:
        script += {
            "bash": f"\nCOMP_WORDS=(transformer-jax {words})\n"
            "COMP_CWORD=$((${#COMP_WORDS[@]} - 1))\n"
            "$(complete -p transformer-jax | sed 's/.*-F //; s/ .*//')\n"
            'echo "${COMPREPLY[@]}"\n',
            "fish": f"\necho (complete -C 'transformer-jax {words}')\n",
        }[shell]
    (tmp_path / "script").write_text(script, "utf-8")
    ended = subprocess.run(
        [shell, tmp_path / "script"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    found = [set(line.split()) for line in ended.stdout.splitlines()]
    assert (found, ended.stderr) == (list(COMPLETIONS.values()), "")


@pytest.mark.slow
def test_zsh_completes_with_the_script_for_bash(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "zsh"]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines[1].endswith("&& bashcompinit")
    assert lines[-1] == "complete -o default -F _transformer_jax transformer-jax"


def test_help_for_a_config_shows_its_values(capsys: pytest.CaptureFixture[str]) -> None:
    main(["params", "tiny", "--help"])
    out = capsys.readouterr().out
    steps = re.search(r"--train\.steps INT.*?default: (\d+)", out, re.DOTALL)
    assert steps is not None
    assert int(steps[1]) == load_config("tiny").train.steps


# The package


def test_only_a_name_that_needs_jax_imports_it_and_none_imports_matplotlib(tmp_path: Path) -> None:
    code = (
        "import sys, transformer_jax\n"
        "for name in ('Config', 'load'):\n"
        "    getattr(transformer_jax, name)\n"
        "    print(name, *sorted({'jax', 'matplotlib'} & {*sys.modules}))\n"
    )
    assert run_python(code, cwd=tmp_path).stdout == "Config\nload jax\n"


def test_the_package_exports_the_names_that_it_documents() -> None:
    for name in transformer_jax.__all__:
        assert getattr(transformer_jax, name).__doc__
    assert transformer_jax.Config is Config
    assert callable(transformer_jax.load)
    names = dir(transformer_jax)
    assert set(transformer_jax.__all__) <= set(names)
    assert len(names) == len(set(names))
    with pytest.raises(AttributeError, match="module 'transformer_jax' has no attribute 'nope'"):
        transformer_jax.nope  # noqa: B018


def test_running_the_module_runs_the_command(tmp_path: Path) -> None:
    def run_module(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-OO", "-m", "transformer_jax", *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )

    # Without docstrings, as with -OO, the help is the same.
    assert re.search(r"train +Train a model from a config, and", run_module("--help").stdout)
    failed = run_module("trian")
    assert (failed.returncode, failed.stdout) == (2, "")
    assert "did you mean 'train'?" in failed.stderr


# Options


def test_an_option_overrides_a_field_of_the_config(capsys: pytest.CaptureFixture[str]) -> None:
    four = counts(capsys, "tiny", "--model.num-heads", "4")
    for override in (
        ["--model.num-heads", "2"],
        ["--model.num_heads=2"],
        ["--model.num-heads=2"],
    ):
        two = counts(capsys, "tiny", *override)
        assert two["encoder.self_attention"] * 2 == four["encoder.self_attention"]
        assert two["encoder.feed_forward"] == four["encoder.feed_forward"]


def test_an_option_overrides_the_field_in_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    rows = counts(capsys, "heads", "--data.vocab-size", "100", "--model.num-layers", "1")
    assert {row["embedding"] for row in rows.values()} == {100 * 512}
    assert len(rows) == 5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["tiny", "--grid", "model.num_heads=2", "--model.num-heads", "4"],
            "--grid already sets model.num_heads: remove --model.num-heads",
        ),
        (
            ["table3", "--train.label-smoothing", "0", "--rows", "D3"],
            "rows base and D3 would be equal: they differ only in train.label_smoothing, and an "
            "option sets the same value in all rows",
        ),
    ],
)
def test_an_option_that_overrides_what_defines_a_row_of_a_sweep_is_rejected(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", *words, "--dry-run"]) == 2
    assert capsys.readouterr().err == f"transformer-jax: {message}\n"


def test_an_optional_value_can_be_none(capsys: pytest.CaptureFixture[str]) -> None:
    options = [
        "--train.clip-norm=None",
        "--train.patience",
        "None",
        "--model.max-positions",
        "None",
    ]
    assert counts(capsys, "tiny", *options) == counts(capsys, "tiny")


def test_options_may_precede_the_config(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model.num-heads", "2", "--model.attention-bias"]
    assert counts(capsys, "tiny", *options) == counts(capsys, *options, "tiny")


def test_an_unusual_config_gets_a_warning_on_standard_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["params", "tiny", "--json", "--model.d-k", "16"]) == 0
    out, err = capsys.readouterr()
    assert err == "note: num_heads x d_k is 64, not d_model (128)\n"
    assert json.loads(out)["total"] > 0


def test_a_sweep_prints_warnings_only_for_the_rows_that_it_trains(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", "table3", "--rows", "ZZ"]) == 2
    assert capsys.readouterr().err.startswith("transformer-jax: no row 'ZZ' (available: base, A1")
    given: list[str] = []
    monkeypatch.setattr(COMMANDS["sweep"], "run", lambda _, rows: given.extend(rows))
    assert main(["sweep", "table3", "--rows", "B2", "C1"]) == 0
    assert given[:2] == ["base", "A1"]
    assert capsys.readouterr().err == "B2: note: num_heads x d_k is 256, not d_model (512)\n"


def test_the_package_exports_every_error_that_its_documentation_names() -> None:
    objects = {getattr(transformer_jax, name) for name in transformer_jax.__all__}
    modules = {module for x in objects if (module := inspect.getmodule(x)) is not None}
    documented = re.compile(r"^ +([A-Z]\w+Error): ", re.MULTILINE)
    text = "".join(map(inspect.getsource, modules))
    errors = {name for name in documented.findall(text) if hasattr(transformer_jax.errors, name)}
    assert errors
    assert errors <= set(transformer_jax.__all__)


URLS = ("HDFS://x/run", "https://x.org/run", "file://run/x")
BUCKETS = ("gs://bucket/run", "s3://bucket/run")
# Wherever a command expects a run or a sweep, a bucket URL is also accepted.
COMMANDS_FOR_RUNS = (
    "train tiny --out {}",
    "sweep tiny --out {}",
    "train tiny --init-from={}",
    "resume {}",
    "translate {}",
    "evaluate x --baseline {}",
    "export {}",
    "status {}",
    "report {} x",
    "diff tiny {}",
    "plot {} --out a.svg",
)


@pytest.mark.parametrize(
    ("command", "url"),
    [
        *itertools.product(COMMANDS_FOR_RUNS, URLS),
        *itertools.product(
            [
                "train {}",
                "train tiny --data-from {}",
                "train tiny --data.corpus text --data.train {} b --data.dev a b",
                "train tiny --data.folder {}",
                "sweep tiny {}",
                "evaluate x --on {} y",
                "package x --out {}",
                "import {}",
                "report x --out {}",
                "attention x 'one' --out {}",
                "--import {} train tiny",
            ],
            (*URLS, *BUCKETS),
        ),
    ],
)
def test_a_url_is_rejected_at_once_wherever_a_path_is_expected(
    command: str,
    url: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    error = mistake(capsys, shlex.split(command.format(url)))
    assert url in error
    assert "URL" in error
    assert list(tmp_path.iterdir()) == []


def test_a_tilde_means_the_home_folder_wherever_a_path_is_expected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "x").touch()
    (tmp_path / "c.py").write_text(
        "from transformer_jax.config import Config\n"
        "CONFIG = Config().change(data={'corpus': 'text', 'train': ('~/a', '~/b'),"
        " 'dev': ('a', 'b'), 'folder': '~/texts'})\n"
    )
    for command, place in (
        ("train ~/c.py --out=~/run", f"{tmp_path}/run already exists"),
        ("prepare ~/c.py", f"there is no file {tmp_path}/a"),
        ("prepare base --data-from=~/c.py", f"there is no file {tmp_path}/a"),
        ("prepare tiny --data.corpus=trees --data.folder=~/no", f"{tmp_path}/no has no train"),
        ("translate ~/run", f"{tmp_path}/run is not a run"),
        ("status ~/run", f"{tmp_path}/run is not a sweep"),
        ("report ~/run", f"{tmp_path}/run is not a sweep"),
        ("import ~/no", f"{tmp_path}/no"),
        ("--import=~/no.py params tiny", "no.py"),
    ):
        assert main(command.split()) in (2, 65, 74), command
        assert place in capsys.readouterr().err
    for variable in ("TRANSFORMER_JAX_DATA", "TRANSFORMER_JAX_CACHE"):
        monkeypatch.setenv(variable, "~/of variable")
    assert cache_folder("x") == tmp_path / "of variable" / "x"
    assert data_folder(None) == tmp_path / "of variable"
    assert not (tmp_path / "~").exists()


def test_python_functions_expand_paths_and_reject_urls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    functions: list[Callable[[str], object]] = [
        transformer_jax.load,
        transformer_jax.compare,
        transformer_jax.report,
        transformer_jax.load_config,
        lambda path: transformer_jax.train(Config(), path),
        lambda path: transformer_jax.sweep("tiny", path),
    ]
    for function in functions:
        with pytest.raises(UsageError, match="https://bucket/x is a URL"):
            function("https://bucket/x")
    with pytest.raises(UsageError, match="gs://bucket/x is a URL"):
        transformer_jax.load_config("gs://bucket/x")
    for function in functions[:3]:
        with pytest.raises(UsageError, match=f"{tmp_path}/x is not a"):
            function("~/x")
