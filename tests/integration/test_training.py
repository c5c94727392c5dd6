"""Test that training commands suggest the next command, save on a signal, and reproduce a run."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from shutil import copytree, rmtree

import jax
import pytest
from corpora import write_treebank
from example_configs import FILES, SMALL, metrics_of
from training_runs import QUIET, assert_same, signal_at_step, state_of

from transformer_jax.cli import main
from transformer_jax.data.splits import SPLITS
from transformer_jax.errors import DataError
from transformer_jax.files import read_json, write_json
from transformer_jax.runs.checkpoint_manager import CheckpointManager
from transformer_jax.runs.run_folder import RunFolder
from transformer_jax.runs.versions import installed_versions, source_commit
from transformer_jax.training.components import build_run_components
from transformer_jax.training.create_run import create_run

SUPPORT = Path(__file__).parents[1] / "support"


def test_train_and_resume_name_the_next_commands_and_these_commands_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(SUPPORT))
    Path("mine.py").write_text("from example_configs import SMALL as CONFIG\n", encoding="utf-8")
    # The run has fewer scheduled checkpoints than `decode.average_checkpoints`, and no test set.
    short = ["--train.steps", "2", "--decode.average_checkpoints", "3", "--decode.beam-size", "1"]
    folder = write_treebank(tmp_path / "trees", test=0)
    treebank = ["--data.corpus", "trees", "--data.folder", str(folder)]
    no_files = [word for split in SPLITS for word in (f"--data.{split}", "None")]
    assert main(["train", "mine.py", *short, *treebank, *no_files]) == 0
    command = capsys.readouterr().out.split("next: transformer-jax ")[1].splitlines()[0]
    assert command == "evaluate runs/mine --split dev"
    assert main(["evaluate", "runs/mine"]) == 2
    assert "runs/mine has no test set" in (message := capsys.readouterr().err)
    assert "use --split dev" in message
    assert main(command.split()) == 0
    capsys.readouterr()

    assert main(["train", "mine.py"]) == 2
    message = capsys.readouterr().err
    assert "transformer-jax resume runs/mine" in message
    assert "--out runs/mine-2" in message
    assert main(["resume", "runs/mine", "--train.steps", "3"]) == 0
    assert state_of(Path("runs/mine"))[0] == 3
    assert main(["resume", "runs/mine", "--model.d-k", "4"]) == 2
    assert "model.d_k 8 -> 4" in capsys.readouterr().err


@pytest.mark.slow
def test_train_with_resume_starts_continues_and_leaves_a_finished_run_alone(
    whole_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(SUPPORT))
    Path("mine.py").write_text("from example_configs import SMALL as CONFIG\n", encoding="utf-8")
    command = ["train", "mine.py", "--out", "run", "--resume"]
    with monkeypatch.context() as patch:
        signal_at_step(patch, 5, signal.SIGTERM)
        assert main(command) == os.EX_TEMPFAIL
    assert 0 < state_of(Path("run"))[0] < 8
    assert main(command) == 0
    step, arrays = state_of(Path("run"))
    assert (step, metrics_of(Path("run"))) == (8, metrics_of(whole_run))
    assert_same(arrays, state_of(whole_run)[1])

    assert main(["resume", "run", "--train.steps", "9"]) == 0
    every = [path for path in Path("run").rglob("*") if path.is_file() and path.name != "lock"]
    files = {path: path.read_bytes() for path in every}
    capsys.readouterr()
    for steps in ("8", "9"):
        assert main([*command, "--train.steps", steps]) == 0
        assert "run is already at step 9: nothing to do" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in files} == files


def test_train_with_resume_names_the_fields_that_differ_from_the_run(
    half_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(SUPPORT))
    Path("mine.py").write_text("from example_configs import SMALL as CONFIG\n", encoding="utf-8")
    copytree(half_run, "run")
    changes = ["--model.d-k", "4", "--data.vocab-size", "63", "--train.seed", "7"]
    assert main(["train", "mine.py", "--out", "run", "--resume", *changes]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    fields = "model.d_k 8 -> 4, data.vocab_size 64 -> 63, train.seed 0 -> 7"
    assert line == f"transformer-jax: run cannot resume with changes in {fields}"


@pytest.mark.parametrize("options", [[], ["--init-from", "other"]])
def test_train_with_resume_continues_a_run_whose_vocabulary_is_smaller_than_requested(
    options: list[str], half_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(SUPPORT))
    size = 5000 if not options else 65
    Path("mine.py").write_text(
        "from example_configs import SMALL\n"
        f"CONFIG = SMALL.change(data={{'vocab_size': {size}}}, train={{'steps': 1}})\n",
        encoding="utf-8",
    )
    copytree(half_run, "other")
    command = ["train", "mine.py", "--out", "run", "--resume", *options]
    assert main(command) == 0
    assert RunFolder.open(Path("run")).config.data.vocab_size < size
    assert main(command) == 0


@pytest.mark.slow
def test_reproduce_trains_the_same_parameters_or_names_what_differs(
    whole_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    copytree(whole_run, "original")
    files = {path: path.read_bytes() for path in Path("original").rglob("*") if path.is_file()}
    assert main(["reproduce", "original"]) == 0
    out = capsys.readouterr().out
    digests = re.findall(r"^step (\d+)  sha256 [0-9a-f]{64}$", out, re.MULTILINE)
    assert digests == ["4", "8"]
    assert "original was reproduced: all parameters are bit-identical" in out
    # `reproduce` does not change the original run, not even its lock file.
    assert all(path.read_bytes() == content for path, content in files.items())
    assert_same(state_of(Path("original"))[1], state_of(Path("original-reproduced"))[1])
    # Repeating the command resumes the finished run, which has no steps left.
    assert main(["reproduce", "original"]) == 0
    assert "nothing to do" in capsys.readouterr().out

    folder = RunFolder.open(Path("original"))
    arrays = state_of(folder.path)[1]
    arrays["params"] = jax.tree.map(lambda x: x + 1, arrays["params"])
    versions = {**installed_versions(), "jax": "0.0.1"}
    description = read_json(Path("original/run.json"))
    description["versions"]["commit"] = "abc"
    write_json(Path("original/run.json"), description)
    rmtree(folder.checkpoints / "8")
    with CheckpointManager(folder.checkpoints, folder.identity, keep=9) as checkpoints:
        checkpoints.prepare_save(8, arrays)
        environment = {**versions, "devices": "8 x P100", "cpu_threads": "96"}
        checkpoints.save(8, arrays, 2.0, {"environment": environment})
    assert main(["reproduce", "original"]) == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert (
        "original was not reproduced: the parameters differ at step 8; other differences: "
        in message
    )
    assert "jax 0.0.1 -> " in message
    assert ("commit abc -> " in message) is bool(source_commit())
    assert "devices 8 x P100 -> " in message
    assert "cpu_threads 96 -> " in message


def test_reproduce_needs_a_trained_run_its_text_and_a_free_folder(
    half_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", "nowhere"]) == 2
    assert "nowhere is not a run" in capsys.readouterr().err
    create_run(SMALL, Path("new"), QUIET)
    assert main(["reproduce", "new"]) == 2
    assert "new has no checkpoint" in capsys.readouterr().err
    copytree(half_run, "done")
    assert main(["package", "done", "--average-checkpoints", "1", "--out", "packaged"]) == 0
    capsys.readouterr()
    assert main(["reproduce", "packaged"]) == 2
    assert "packaged is a package: reproduce the original run" in capsys.readouterr().err
    Path("done-reproduced").mkdir()
    Path("done-reproduced/mine").touch()
    assert main(["reproduce", "done"]) == 2
    assert "done-reproduced already exists" in capsys.readouterr().err
    assert main(["reproduce", "done", "--out", "done"]) == 2
    assert "done already exists" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path / "done")
    for path in (".", "checkpoints/.."):
        assert main(["reproduce", path]) == 2
        assert f"{tmp_path / 'done-reproduced'} already exists" in capsys.readouterr().err
    # If the text is not in the cache, the files must still contain the original text.
    source, target = FILES["train"]
    Path("train.en").write_text(Path(source).read_text("utf-8").replace("one", "two"), "utf-8")
    description = read_json(Path("run.json"))
    description["config"]["data"]["train"] = [str(tmp_path / "done" / "train.en"), target]
    write_json(Path("run.json"), description)
    monkeypatch.setenv("TRANSFORMER_JAX_CACHE", str(tmp_path / "cache"))
    assert main(["reproduce", ".", "--out", "../other"]) == DataError.exit_code
    assert "is not the text that the run was created with" in capsys.readouterr().err
    assert not Path("../other").exists()


def test_a_run_that_reads_its_text_more_than_100_times_begins_with_a_warning(
    tmp_path: Path,
) -> None:
    for steps, is_warned in ((8, False), (405, True)):
        folder = create_run(SMALL.change(train={"steps": steps}), tmp_path / str(steps), QUIET)
        lines = build_run_components(folder).summary()
        assert any("warning: 405 steps are 101 passes" in line for line in lines) is is_warned


# This test takes minutes. For a faster check of all signals, `test_faults` uses forked processes.
@pytest.mark.exhaustive
def test_a_signal_saves_and_exits_with_75(tmp_path: Path) -> None:
    (tmp_path / "long.py").write_text(
        "from example_configs import SMALL\nCONFIG = SMALL.change(train={'steps': 100000})\n"
    )
    command = [sys.executable, "-m", "transformer_jax", "train", "long.py", "--out", "run"]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{SUPPORT.parents[1]}:{SUPPORT}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while not (metrics.exists() and metrics.stat().st_size):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, message = process.communicate(timeout=300)
    assert process.returncode == 75
    note, line = message.splitlines()
    assert note.startswith("note: training uses only ")
    assert line.endswith("`transformer-jax resume run`")
    step, _ = state_of(tmp_path / "run")
    assert f"SIGINT: saved at step {step};" in message
