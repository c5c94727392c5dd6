"""A sweep does every run it can, tells why others failed, and goes on where it ended."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from small import SMALL, metrics_of

from transformer_jax.cli import main
from transformer_jax.config import Config, Paper, Row
from transformer_jax.config.loading import load_rows
from transformer_jax.errors import ConfigError, StorageError, UsageError
from transformer_jax.sweeps.launch import slots
from transformer_jax.sweeps.plan import Sweep, plan_sweep, scaled, with_sections
from transformer_jax.sweeps.status import read_status

TESTS = Path(__file__).parents[1]
ROWS = {
    "base": Row(SMALL, Paper(4.92, 25.8, 65)),
    "wide": Row(SMALL.change(model={"num_heads": 1, "d_k": 16, "d_v": 16})),
    "E": Row(SMALL.change(model={"positions": "learned"})),
}
# Whatever runs with this on its path does as the name of its run says.
FAULTS = """
    import os, signal, sys, time
    from transformer_jax.distributed import heartbeat
    beat, words = heartbeat.beat, " ".join(sys.argv)
    is_training = any(word in sys.argv[1:2] for word in ("train", "resume"))
    if is_training and "/C/seed-2" in words:
        from transformer_jax.training import optimizer
        rate = optimizer.learning_rate
        optimizer.learning_rate = lambda *a, **k: 1e30 * rate(*a, **k)
    def disturbed(step):
        beat(step)
        if step < 6 or os.path.exists("mended"):
            return
        if "/base/seed-1" in words:
            raise RuntimeError("of no kind we know")
        if "/B/seed-0" in words:
            os.kill(os.getpid(), signal.SIGKILL)
        # Not before the supervisor knows how long a step takes.
        if "/B/seed-2" in words and heartbeat._beats > 6:
            time.sleep(600)
    heartbeat.beat = disturbed
"""
MINE = """
    from small import SMALL
    BASE = SMALL.change(train={"steps": 24, "checkpoint_every": 12}, data={"num_pairs": 100})
    SWEEP = {
        "base": BASE,
        "B": BASE.change(model={"d_k": 4}),
        "C": BASE.change(model={"d_ff": 48}),
    }
"""


def test_seeds_come_one_after_the_other_and_rows_within_them(tmp_path: Path) -> None:
    sweep = plan_sweep(tmp_path / "s", ROWS, 2)
    assert [run.name for run in sweep.runs] == [
        *("base/seed-0", "wide/seed-0", "E/seed-0"),
        *("base/seed-1", "wide/seed-1", "E/seed-1"),
    ]
    assert [run.config.train.seed for run in sweep.runs] == [0, 0, 0, 1, 1, 1]


def test_some_rows_are_chosen_beside_the_first() -> None:
    assert list(plan_sweep(Path("s"), ROWS, 1, only=["E"]).rows) == ["base", "E"]
    with pytest.raises(UsageError, match="no row 'F' \\(there are base, wide, E\\)"):
        plan_sweep(Path("s"), ROWS, 1, only=["F"])
    with pytest.raises(UsageError, match="--seeds must be positive, got 0"):
        plan_sweep(Path("s"), ROWS, 0)


@pytest.mark.parametrize("name", ["..", "a/b", "", ".hidden", "a b", "-x"])
def test_a_row_is_named_as_a_folder_can_be(name: str) -> None:
    with pytest.raises(UsageError, match="a row's name is made of"):
        plan_sweep(Path("s"), {"base": ROWS["base"], name or " ": ROWS["E"]}, 1)


def test_a_plan_is_kept_and_may_grow_but_not_change(tmp_path: Path) -> None:
    path = tmp_path / "s"
    two = {name: ROWS[name] for name in ("base", "wide")}
    plan_sweep(path, two, 1).store()
    assert Sweep.open(path).rows == two
    plan_sweep(path, {"base": ROWS["base"], "E": ROWS["E"]}, 2).store()
    grown = Sweep.open(path)
    assert grown.rows == ROWS
    assert list(grown.seeds) == [0, 1]
    other = {"base": Row(SMALL.change(model={"d_ff": 48}))}
    with pytest.raises(UsageError, match=r"row base with another model.d_ff 32 -> 48: name"):
        plan_sweep(path, other, 1).store()
    assert Sweep.open(path) == grown


def test_what_is_no_plan_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is no sweep: it has no sweep\.json"):
        Sweep.open(tmp_path)
    for content in ("", "[]", "{}", '{"format": 2}', '{"format": 1, "rows": {"..": {}}}'):
        (tmp_path / "sweep.json").write_text(content)
        with pytest.raises((StorageError, UsageError), match=r"sweep\.json|a row's name"):
            Sweep.open(tmp_path)


def test_an_ablation_moves_to_another_corpus_and_budget_and_rows_keep_their_difference() -> None:
    other = Config().change(
        data={"vocab_size": 99, "batch_tokens": 77},
        train={"steps": 5, "label_smoothing": 0.3, "warmup_steps": 2},
    )
    rows = with_sections(load_rows("table3"), {"data": other, "train": other})
    assert {row.config.data for row in rows.values()} == {other.data}
    assert {row.config.train.warmup_steps for row in rows.values()} == {2}
    assert rows["A1"].config.train == other.train
    assert rows["D3"].config.train.label_smoothing == 0.0
    assert rows["D4"].config.train.label_smoothing == 0.2
    # Three times as long as base, on any budget.
    assert rows["big"].config.train.steps == 15


def test_sections_are_moved_together() -> None:
    # Neither is possible without the other.
    other = Config().change(train={"keep_checkpoints": 1}, decode={"average_checkpoints": 1})
    row = Row(Config().change(decode={"average_checkpoints": 10}))
    moved_row = with_sections({"base": row}, {"train": other, "decode": other})["base"]
    assert (
        moved_row.config.decode.average_checkpoints == moved_row.config.train.keep_checkpoints == 1
    )


@pytest.mark.parametrize("scale", ["half", "small", "tiny"])
def test_in_a_smaller_table_every_row_keeps_its_ratio_to_base(scale: str) -> None:
    whole, small = load_rows("table3"), scaled(load_rows("table3"), scale)
    base, small_base = whole["base"].config.model, small["base"].config.model
    for name in whole:
        for key in ("d_model", "d_ff", "d_k", "d_v", "num_heads"):
            theirs = getattr(whole[name].config.model, key) / getattr(base, key)
            ours = getattr(small[name].config.model, key) / getattr(small_base, key)
            assert ours == theirs, (name, key)
        layers = small[name].config.model.num_layers / small_base.num_layers
        assert layers == whole[name].config.model.num_layers / base.num_layers or scale == "full"


def test_cores_are_dealt_out_and_none_twice() -> None:
    found = slots()
    cores = [slot.cores for slot in found if slot.cores is not None]
    assert sum(map(len, cores)) == len(frozenset().union(*cores)) > 0
    [one] = slots(1)
    assert one.cores == frozenset().union(*cores)
    with pytest.raises(UsageError, match=r"--devices must be from 1 to \d+, or all, got 99"):
        slots(99)


def sweep_in(folder: Path, *options: str) -> subprocess.Popen[str]:
    (folder / "mine.py").write_text(textwrap.dedent(MINE))
    (folder / "sitecustomize.py").write_text(textwrap.dedent(FAULTS))
    return subprocess.Popen(
        [sys.executable, "-m", "transformer_jax", "sweep", "mine.py", *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{folder}:{TESTS.parent}:{TESTS}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def states_of(folder: Path) -> dict[str, Any]:
    return {run.name: read_status(run) for run in Sweep.open(folder / "sweeps" / "mine").runs}


def called(folder: Path, *options: str) -> tuple[int, str, str]:
    """Return exit code, output and notes of a sweep there, to whose end is waited."""
    process = sweep_in(folder, "--step-timeout", "5", *options)
    out, err = process.communicate(timeout=800)
    return process.returncode, out, err


def test_what_failed_is_told_and_only_that_is_done_again_when_asked(tmp_path: Path) -> None:
    few = ("--rows", "base", "--seeds", "2")
    code, out, err = called(tmp_path, *few)
    assert code == 1, err
    found = states_of(tmp_path)
    assert {name: state.name for name, state in found.items()} == {
        "base/seed-0": "done",
        "base/seed-1": "failed",
    }
    assert found["base/seed-1"].note.endswith("RuntimeError: of no kind we know")
    assert "1 done, 1 failed" in out
    assert "1 of 2 runs failed: base/seed-1; the same command with --retry-failed" in err
    assert set(found["base/seed-0"].scores) == {"dev", "test"}
    (tmp_path / "mended").touch()
    kept = found["base/seed-0"].run.state.read_text()
    assert called(tmp_path, *few, "--retry-failed")[0] == 0
    assert {state.name for state in states_of(tmp_path).values()} == {"done"}
    assert found["base/seed-0"].run.state.read_text() == kept


@pytest.mark.slow
def test_of_nine_runs_five_do_not_notice_that_four_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = called(tmp_path)
    assert code == 1, err
    found = states_of(tmp_path)
    failed = {name: state.note for name, state in found.items() if state.name == "failed"}
    assert set(failed) == {"base/seed-1", "B/seed-0", "B/seed-2", "C/seed-2"}
    assert {state.name for name, state in found.items() if name not in failed} == {"done"}
    assert failed["base/seed-1"].endswith("RuntimeError: of no kind we know")
    assert "SIGKILL ended training after step" in failed["B/seed-0"]
    assert "nothing came for" in failed["B/seed-2"]
    assert found["C/seed-2"].code == 70
    assert "smaller --train.learning-rate-scale" in failed["C/seed-2"]
    assert "4 of 9 runs failed" in err.splitlines()[-1]
    # What is done is not done again, and what failed only when asked.
    began = {name: state.run.state.read_text() for name, state in found.items()}
    assert called(tmp_path)[0] == 1
    assert began == {name: s.run.state.read_text() for name, s in states_of(tmp_path).items()}
    (tmp_path / "mended").touch()
    assert called(tmp_path, "--retry-failed")[0] == 1
    again = states_of(tmp_path)
    assert {name for name, state in again.items() if state.name != "done"} == {"C/seed-2"}
    assert all(began[n] == again[n].run.state.read_text() for n in began if n not in failed)
    capsys.readouterr()
    assert main(["status", str(tmp_path / "sweeps" / "mine")]) == 1
    shown = capsys.readouterr()
    assert "8 done, 1 failed" in shown.out
    assert "--retry-failed" in shown.err
    assert main(["report", str(tmp_path / "sweeps" / "mine")]) == 0
    for run in Sweep.open(tmp_path / "sweeps" / "mine").runs:
        if run.name in failed and run.row == "C":
            continue
        dev = [x for x in metrics_of(run.path) if x["split"] == "dev"][-1]
        scored = again[run.name].scores["dev"]
        assert scored["perplexity"] == pytest.approx(dev["perplexity"], rel=1e-5)


def test_a_sweep_that_is_asked_to_stop_saves_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "mended").touch()
    options = ["--seeds", "1", "--rows", "base", "--train.steps", "4000"]
    process = sweep_in(tmp_path, *options)
    metrics = tmp_path / "sweeps" / "mine" / "base" / "seed-0" / "metrics.jsonl"
    until = time.monotonic() + 200
    while not (metrics.exists() and metrics.stat().st_size):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.1)
    assert states_of(tmp_path)["base/seed-0"].name == "running"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 75, err
    assert "the same command goes on" in err
    state = states_of(tmp_path)["base/seed-0"]
    assert state.name == "stopped"
    assert 0 < state.step < 4000
    run = json.loads((state.run.path / "run.json").read_text())
    assert run["config"]["train"]["steps"] == 4000


def test_a_run_that_is_stopped_before_its_first_step_goes_on(tmp_path: Path) -> None:
    (tmp_path / "mended").touch()
    options = ["--seeds", "1", "--rows", "base"]
    process = sweep_in(tmp_path, *options)
    state = tmp_path / "sweeps" / "mine" / "base" / "seed-0.state"
    until = time.monotonic() + 200
    while not (state.exists() and "running" in state.read_text()):
        assert time.monotonic() < until
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 75, err
    assert states_of(tmp_path)["base/seed-0"].name == "stopped", err
    assert called(tmp_path, *options)[0] == 0


def test_a_run_whose_process_is_gone_is_not_running(tmp_path: Path) -> None:
    sweep = plan_sweep(tmp_path / "s", ROWS, 1)
    sweep.store()
    run = sweep.runs[0]
    assert read_status(run).status == "queued"
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    known = {"name": "running", "pid": gone.pid, "host": os.uname().nodename, "doing": "train"}
    run.state.write_text(json.dumps(known))
    assert (read_status(run).status, read_status(run).note) == ("stopped", "its process is gone")
    # The number may be another process's by now.
    own = {"pid": os.getpid(), "began": "1"}
    run.state.write_text(json.dumps({**known, **own}))
    assert read_status(run).note == "its process is gone"
    # On another machine a process is judged by what it writes.
    run.state.write_text(json.dumps({**known, "host": "elsewhere"}))
    assert read_status(run).status == "running"
    os.utime(run.state, (1, 1))
    assert read_status(run).note.startswith("nothing was written for ")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["table3", "--rows", "A9"], "no row 'A9'"),
        (["table3", "--seeds", "0"], "--seeds must be positive"),
        (["table3", "--devices", "many"], "--devices must be a number, or all, got 'many'"),
        (["table3", "--step-timeout", "nan"], "--step-timeout must be positive, got nan"),
        (["table3", "--scale", "huge"], "must be one of full, half, small, tiny, got 'huge'"),
        (["table3", "--data-from", "nowhere"], "no config file nowhere"),
        (["nothing"], "no config file nothing"),
        ([], "sweep begins with"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_made(
    arguments: list[str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", *arguments]) == 2
    err = capsys.readouterr().err
    assert told in err
    assert [line for line in err.splitlines() if "note:" not in line] == [err.splitlines()[-1]]
    assert not any(tmp_path.iterdir())


def test_a_dry_run_says_what_it_takes_and_makes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", "table3", "--scale", "tiny", "--data-from", "tiny", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "20 rows x 3 seeds = 60 runs" in out
    assert re.search(r"^  A1 +about [\dh ]+ min and 0\.\d\d GB a run$", out, re.MULTILINE), out
    assert re.search(r"^about .* in all, at 30% of what is here", out, re.MULTILINE)
    assert re.search(r"^about \d+\.\d GB on disk \(free: \d+\)$", out, re.MULTILINE)
    assert not any(tmp_path.iterdir())


def test_a_config_of_json_is_read_and_none_is_executed(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(SMALL.to_dict()))
    assert load_rows(str(path)) == {"": Row(SMALL)}
    for content in ("", "{", '{"modle": {}}', "[]", "[" * 10**5):
        path.write_text(content)
        with pytest.raises(ConfigError):
            load_rows(str(path))
