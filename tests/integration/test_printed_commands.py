"""Test that each command that the program prints or writes into a file can be executed as is.

A function that prints a command calls `shell_command`. Each such function has a case in `CASES`,
whose commands are executed, or an entry in `ELSEWHERE`.
"""

import ast
import dataclasses
import html
import io
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# Importing submitit creates a logging handler that keeps a reference to the current standard error
# stream, so import it before a test replaces that stream.
import submitit  # noqa: F401
from pages import ROOT
from run_files import set_status
from training_runs import signal_at_step

from transformer_jax.cli import main
from transformer_jax.commands import COMMANDS
from transformer_jax.errors import LostProcessError
from transformer_jax.sweeps.plan import Sweep

PACKAGE = ROOT / "transformer_jax"
NAME = rf"(?:{'|'.join(COMMANDS)})\b"
COMMAND = re.compile(rf"transformer-jax {NAME}(?:[^\n`;|<(]|<(?= ))*")
# Matches literals that contain a command, or that an f-string can continue with its name.
LITERAL = re.compile(rf"transformer-jax ({NAME}|$)")
# The tests quote the name of this run, and they do not mistake it for an option.
RUN = "./-a run"


@dataclasses.dataclass(frozen=True)
class Case:
    """A way to make a function print a command."""

    words: str | Callable[[], str] = ""
    """The command whose output is searched, or a function that returns the output."""
    code: int = 0
    """The command's exit code."""
    writes: str | None = None
    """Files, as a pattern, that are also searched."""
    prints: tuple[str, ...] = ()
    """The names of the printed commands."""
    before: str = ""
    """A command that is executed first."""


def stop() -> str:
    """Let SIGTERM end a run, and return its output."""
    with pytest.MonkeyPatch.context() as patch:
        signal_at_step(patch, 3, signal.SIGTERM)
        return run("train", "mine.py:base", "--out=-stopped run", code=75)


def lose() -> str:
    return str(LostProcessError("a process is lost", Path("-a run")))


CASES = {
    "api.py:report": Case(
        f"report '{RUN}' --out report",
        writes="report/report/*",
        prints=("evaluate", "report"),
        before=f"evaluate '{RUN}'",
    ),
    "commands/evaluation.py:Evaluate.run": Case(f"evaluate '{RUN}'", prints=("translate",)),
    "commands/evaluation.py:Evaluate._run_grid": Case(
        f"evaluate '{RUN}' --grid --averages 2 --beam-sizes 1 --alphas 0.3", prints=("evaluate",)
    ),
    "commands/inference.py:Package.run": Case(
        "package './-unscored run' --average-checkpoints 1 --out=-package",
        prints=("evaluate", "translate"),
    ),
    "commands/sharing.py:Export.run": Case(
        f"export '{RUN}' --format safetensors --out=-export", prints=("import",)
    ),
    "commands/sharing.py:Import.run": Case(
        "import ./-exported --out=-import",
        prints=("translate",),
        before=f"export '{RUN}' --format safetensors --out=-exported",
    ),
    "commands/training.py:_print_next": Case(f"resume '{RUN}'", prints=("evaluate", "translate")),
    "errors.py:LostProcessError.__init__": Case(lose, prints=("resume",)),
    "reports/collect.py:read_adhoc_status": Case(
        "report './-another unscored run' --out=unscored", 2, prints=("evaluate",)
    ),
    "reports/report.py:make_run_table": Case(
        f"report '{RUN}' --out report",
        writes="report/report/runs.csv",
        prints=("evaluate", "report"),
        before=f"evaluate '{RUN}'",
    ),
    "runs/run_folder.py:_advise": Case(
        f"train mine.py:base '--out={RUN[2:]}'", 2, prints=("resume",)
    ),
    "sharing/model_card.py:write_card": Case(
        f"package '{RUN}' --license mit --out=-carded", writes="-carded/*.md", prints=("translate",)
    ),
    "training/loop.py:run_training": Case(stop, prints=("resume",)),
}
ELSEWHERE = {
    "commands/arguments.py:_missing": "The words are placeholders.",
    "commands/help.py:print_help": "test_the_example_in_the_help_can_be_executed",
    "commands/sweeps.py:Sweep.run": "test_the_commands_of_a_sweep_can_be_executed",
    "commands/sweeps.py:Sweep._launch": "test_the_commands_of_a_sweep_can_be_executed",
    "commands/sweeps.py:Sweep._submit": "test_the_commands_of_a_sweep_can_be_executed",
    "commands/sweeps.py:Sweep._write_manifest": "test_buckets, because it needs a bucket",
    "distributed/rendezvous.py:ProcessSpec.handshake": "This is not a command.",
}


def functions_that_print_commands() -> set[str]:
    """Return the functions that call `shell_command`, or that contain a command in a literal."""
    found: set[str] = set()

    def search(node: ast.AST, place: str) -> None:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            dot = "" if place.endswith(":") else "."
            place = f"{place}{dot}{node.name}"
            if isinstance(node.body[0], ast.Expr):
                node.body.pop(0)
        match node:
            case ast.Call(func=ast.Name(id="shell_command" | "translate_command")):
                found.add(place)
            case ast.Constant(value=str(text)) if LITERAL.search(text) and ":" in place[:-1]:
                found.add(place)
        for child in ast.iter_child_nodes(node):
            search(child, place)

    for path in PACKAGE.rglob("*.py"):
        search(ast.parse(path.read_text("utf-8")), f"{path.relative_to(PACKAGE).as_posix()}:")
    makers = {"console.py:shell_command", "commands/base.py:translate_command"}
    return {x for x in found if not x.endswith(":")} - makers


def test_each_function_that_prints_a_command_has_a_case() -> None:
    assert functions_that_print_commands() == CASES.keys() | ELSEWHERE.keys()


def printed_commands(text: str) -> list[list[str]]:
    """Return the words of each command in a text, without `transformer-jax`."""
    found = [match[0].split(" < ")[0] for match in COMMAND.finditer(html.unescape(text))]
    return [shlex.split(command)[1:] for command in found]


def run(*words: str, code: int = 0) -> str:
    """Run a command, check its exit code, and return its output."""
    stream = io.BytesIO()
    out = io.TextIOWrapper(stream, "utf-8", write_through=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"one\n"), encoding="utf-8"))
        patch.setattr("sys.stdout", out)
        patch.setattr("sys.stderr", out)
        exit_code = main(words)
    text = stream.getvalue().decode()
    assert exit_code == code, f"{words}\n{text}"
    return text


def read(pattern: str) -> str:
    """Return the contents of the text files that match a pattern."""
    pictures = (".pdf", ".png", ".svg")
    paths = (path for path in sorted(Path().glob(pattern)) if path.suffix not in pictures)
    return "\n".join(path.read_text("utf-8") for path in paths)


@pytest.fixture(scope="module")
def folder(whole_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs whose names begin with a dash and contain spaces."""
    folder = tmp_path_factory.mktemp("printed")
    for name in ("-a run", "-unscored run", "-another unscored run"):
        shutil.copytree(whole_run, folder / name)
        shutil.rmtree(folder / name / "evaluations", ignore_errors=True)
    (folder / "mine.py").write_text(
        "from example_configs import SMALL\nSWEEP = {'base': SMALL}\n", "utf-8"
    )
    return folder


@pytest.fixture
def places(folder: Path, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The functions that have called `shell_command` in `folder`, the working directory."""
    monkeypatch.chdir(folder)
    found: set[str] = set()
    join = shlex.join

    def record(words: list[str]) -> str:
        frame = sys._getframe(2)
        if frame.f_code.co_name == "translate_command" and frame.f_back is not None:
            frame = frame.f_back
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE):
            found.add(f"{path.relative_to(PACKAGE).as_posix()}:{frame.f_code.co_qualname}")
        return join(words)

    monkeypatch.setattr(shlex, "join", record)
    return found


def print_of(case: Case) -> str:
    """Return what a case prints and writes."""
    if callable(case.words):
        return case.words()
    printed = run(*shlex.split(case.words), code=case.code)
    return printed + (read(case.writes) if case.writes is not None else "")


@pytest.mark.parametrize("place", CASES)
def test_a_printed_command_can_be_executed(place: str, places: set[str]) -> None:
    case = CASES[place]
    if case.before:
        run(*shlex.split(case.before))
        places.clear()
    found = printed_commands(print_of(case))
    assert {command[0] for command in found} == set(case.prints)
    assert place in places or callable(case.words)
    for command in set(map(tuple, found)):
        run(*command)


def test_the_code_and_the_commands_of_a_model_card_can_be_executed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    run("package", RUN, "--license", "mit", "--out=-coded")
    card = Path("-coded/README.md").read_text("utf-8")
    [code] = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    Path("card.py").write_text(code, "utf-8")
    runpy.run_path("card.py")
    assert capsys.readouterr().out
    [command] = re.findall("`(sha256sum.*?)`", card)
    subprocess.run(shlex.split(command), cwd="-coded", check=True, capture_output=True)


@pytest.mark.slow
def test_the_example_in_the_help_can_be_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # The first line describes the usage.
    usage, *commands = printed_commands(run("train", "--help"))
    assert usage[:2] == ["train", "[-h]"]
    assert [command[:2] for command in commands] == [["train", "tiny"], ["train", "--help-all"]]
    for command in commands:
        # Two steps are enough to show that the command works.
        run(*("2" if word == "200" else word for word in command))


# `sbatch` stores the script, and `srun` runs its program here.
CLUSTER = {
    "sbatch": '#!/bin/sh\ncp "$1" submitted.sh\necho "Submitted batch job 7"\n',
    "squeue": "#!/bin/sh\n",
    "srun": '#!/bin/sh\nuntil [ -f "$1" ] && [ -x "$1" ]; do shift; done\nexec "$@"\n',
}


@pytest.mark.slow
def test_the_commands_of_a_sweep_can_be_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, script in CLUSTER.items():
        (tmp_path / name).write_text(script, "utf-8")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "mine.py").write_text(
        "from example_configs import SMALL\nSWEEP = {'base': SMALL}\n", "utf-8"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    support = Path(__file__).parents[1] / "support"
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{support}")
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    words = ["sweep", "mine.py", "--seeds", "1", "--launcher", "slurm", "--slurm.gpus", "0"]
    [status] = printed_commands(run(*words))
    run(*status)
    # After a failure, a message says which option trains the run again.
    set_status(Sweep.open(Path("sweeps/mine")).runs[0], "failed", note="a fault")
    [option] = re.findall(r"repeat the sweep with (\S+)", run(*words, code=1))
    assert printed_commands(run(*words, option)) == [status]
    # The script trains and scores the run.
    job = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    numbers = {"SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "here"}
    environment = {**os.environ, **job, **numbers}
    subprocess.run(["bash", "submitted.sh"], check=True, env=environment, capture_output=True)
    assert "1 done" in run(*status)
    [report] = printed_commands(run(*words[:4]))
    run(*report)
    commands = set(map(tuple, printed_commands(read("sweeps/mine/report/*.*"))))
    assert {command[0] for command in commands} == {"evaluate", "report", "sweep"}
    for command in sorted(commands):
        run(*command)
