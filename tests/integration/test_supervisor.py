"""A supervisor ends a trainer that is stuck or gone, in time, with one line and exit code 75."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from small import SMALL, metrics_of
from test_cli import mistake, run_python
from test_loop import assert_same, state_of

from transformer_jax.distributed import heartbeat
from transformer_jax.distributed.supervisor import Heartbeats, supervise
from transformer_jax.errors import LostProcessError
from transformer_jax.training import loop
from transformer_jax.training.create_run import create_run

TRAINER = """
    import os, signal, sys, time
    from transformer_jax.distributed import heartbeat
    step = 0
    def train(steps, pause=0.02):
        global step
        for _ in range(steps):
            time.sleep(pause)
            step += 1
            heartbeat.beat(step)
    assert heartbeat.connect()
"""


def trainer(folder: Path, *code: str) -> list[str]:
    """Return the command of a trainer that learns nothing: it beats, and does what is given."""
    path = folder / "trainer.py"
    path.write_text("\n".join(map(textwrap.dedent, (TRAINER, *code))))
    return [sys.executable, str(path)]


def watch(folder: Path, *code: str, hang: float = 1.0, busy: float = 60.0) -> int:
    return supervise(trainer(folder, *code), folder, step_timeout=hang, phase_timeout=busy)


def lost(folder: Path, *code: str, **seconds: float) -> str:
    """Return what is said of a trainer that is lost."""
    with pytest.raises(LostProcessError) as caught:
        watch(folder, *code, **seconds)
    assert caught.value.exit_code == 75
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("code", [0, 1, 2, 65, 70, 71, 74, 75, 130])
def test_an_exit_code_is_handed_on(tmp_path: Path, code: int) -> None:
    assert watch(tmp_path, f"train(9); sys.exit({code})") == code


def test_a_trainer_that_is_stuck_tells_where_and_is_ended_in_time(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    began = time.monotonic()
    said = lost(tmp_path, "def in_a_collective(): time.sleep(60)\ntrain(9); in_a_collective()")
    assert time.monotonic() - began < 10
    assert "nothing came for 1 s after step 9" in said
    assert "in in_a_collective" in capfd.readouterr().err


@pytest.mark.parametrize(
    "stuck",
    [
        "os.kill(os.getpid(), signal.SIGSTOP)",
        "for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2): "
        "signal.signal(n, signal.SIG_IGN)\ntime.sleep(60)",
    ],
    ids=["stopped", "deaf"],
)
def test_a_trainer_that_heeds_no_signal_is_ended_too(tmp_path: Path, stuck: str) -> None:
    assert "nothing came for 1 s" in lost(tmp_path, f"train(9)\n{stuck}")


def test_a_phase_may_take_longer_than_a_step(tmp_path: Path) -> None:
    assert watch(tmp_path, "train(9); heartbeat.busy('scoring'); time.sleep(3); train(9)") == 0


def test_a_phase_lasts_until_the_slowest_process_is_through(tmp_path: Path) -> None:
    # This one had nothing to score: two steps are begun at once, and the first one is late.
    code = "train(10); heartbeat.busy('scoring'); train(2); time.sleep(3); train(9)"
    assert watch(tmp_path, code) == 0


def test_after_a_phase_silence_is_a_bad_sign_again(tmp_path: Path) -> None:
    said = lost(tmp_path, "train(9); heartbeat.busy('scoring'); train(3); time.sleep(60)")
    assert "nothing came for 1 s after step 12" in said


@pytest.mark.parametrize(
    ("code", "doing"),
    [("", "while starting after step 0"), ("train(9); heartbeat.busy('saving');", "while saving")],
)
def test_a_phase_has_a_limit_too(tmp_path: Path, code: str, doing: str) -> None:
    assert doing in lost(tmp_path, f"{code} time.sleep(60)", busy=2.0)


def test_long_steps_may_be_silent_for_longer() -> None:
    pulse = Heartbeats(step_timeout=30, phase_timeout=1800)
    assert pulse.limit == 1800
    for step, silent in ((3, 500.0), (6, 20.0), (9, 10.0)):
        # How long three steps take is not known before they were done, compilation aside.
        assert pulse.limit == (80 if step > 6 else 1800)
        pulse.silent = silent
        pulse.hear(f"step {step}")
    pulse.hear("busy compiling")
    assert pulse.limit == 1800
    pulse.silent = 600.0
    pulse.hear("step 12")
    assert pulse.limit == 80
    brisk = Heartbeats(30, 1800, doing="")
    brisk.silent = 0.1
    brisk.hear("step 3")
    assert brisk.limit == 30


def test_a_stall_is_forgotten_in_time() -> None:
    pulse = Heartbeats(step_timeout=30, phase_timeout=1800, doing="")
    for beat, silent in enumerate([10.0, 300.0, *[10.0] * 100]):
        pulse.silent = silent
        pulse.hear(f"step {3 * beat}")
        # As long as one of the last hundred was so long.
        assert pulse.limit == (1200 if 1 <= beat <= 100 else 40)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV, 40])
def test_a_trainer_that_dies_by_a_signal_can_be_resumed(
    tmp_path: Path, number: int, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "my run"
    run.mkdir()
    (run / "run.json").touch()
    code = (
        f"train(9); sys.stderr.write('a dump'); sys.stderr.flush(); os.kill(os.getpid(), {number})"
    )
    name = number.name if isinstance(number, signal.Signals) else "signal 40"
    assert lost(run, code) == (
        f"{name} ended training after step 9; resume with `transformer-jax resume '{run}'`"
    )
    assert "a dump" in capfd.readouterr().err


def test_a_run_that_is_not_there_yet_is_not_to_be_resumed(tmp_path: Path) -> None:
    said = lost(tmp_path, "os.abort()")
    assert "resume" not in said
    assert "the same command" in said


@pytest.fixture
def parents() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for parent in started:
        parent.kill()
        parent.communicate()


def started(
    parents: list[subprocess.Popen[str]], folder: Path, *code: str, hang: float = 1.0
) -> subprocess.Popen[str]:
    """Start a supervisor in a process of its own, and wait until its trainer trains."""
    command = trainer(folder, "train(9); print(os.getpid(), flush=True)", *code)
    call = f"supervise({command!r}, Path('run'), hang_seconds={hang}, busy_seconds=60.0)"
    parent = subprocess.Popen(
        [
            *(sys.executable, "-c"),
            f"import sys\nfrom pathlib import Path\n"
            f"from transformer_jax.distributed.supervisor import supervise\nsys.exit({call})",
        ],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    parents.append(parent)
    return parent


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_signals_reach_the_trainer_once_each(
    tmp_path: Path, parents: list[subprocess.Popen[str]]
) -> None:
    code = """
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, lambda n, _: print(signal.Signals(n).name, flush=True))
        print("ready", flush=True)
        train(150)
    """
    parent = started(parents, tmp_path, code)
    pid = int(line_of(parent))
    assert line_of(parent) == "ready"
    # Two that come at the same time would look like one.
    assert os.getpgid(pid) != os.getpgid(parent.pid)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        # As a terminal does: to all processes of the group.
        os.killpg(parent.pid, number)
        assert line_of(parent) == number.name
    out, _ = parent.communicate(timeout=30)
    assert (out, parent.returncode) == ("", 0)


@pytest.mark.parametrize("code", ["train(3000)", "time.sleep(60)"], ids=["training", "stuck"])
@pytest.mark.parametrize("is_deaf", [False, True])
def test_no_trainer_outlives_its_supervisor(
    tmp_path: Path, parents: list[subprocess.Popen[str]], code: str, is_deaf: bool
) -> None:
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN);" if is_deaf else ""
    code = f"heartbeat.ORPHAN_SECONDS = 1; {deaf} print('ready', flush=True); {code}"
    parent = started(parents, tmp_path, code)
    pid = int(line_of(parent))
    assert line_of(parent) == "ready"
    parent.kill()
    until = time.monotonic() + 20
    while is_alive(pid) and time.monotonic() < until:
        time.sleep(0.1)
    assert not is_alive(pid)


def is_alive(pid: int) -> bool:
    try:
        # A zombie that no one has asked for yet is gone all the same.
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_time_in_which_the_supervisor_was_stopped_too_is_no_silence(
    tmp_path: Path, parents: list[subprocess.Popen[str]]
) -> None:
    parent = started(parents, tmp_path, "train(50)", hang=3.0)
    pid = int(line_of(parent))
    os.kill(pid, signal.SIGSTOP)
    # So that all that the trainer said was heard.
    time.sleep(0.5)
    os.kill(parent.pid, signal.SIGSTOP)
    time.sleep(5)
    os.kill(parent.pid, signal.SIGCONT)
    time.sleep(0.5)
    os.kill(pid, signal.SIGCONT)
    assert parent.wait(30) == 0


def test_a_supervisor_that_does_not_listen_does_not_hold_up_training(tmp_path: Path) -> None:
    ours, theirs = os.pipe()
    command = trainer(tmp_path, "train(3 * 65536 // 5, pause=0)")
    environment = {**os.environ, heartbeat.VARIABLE: str(theirs)}
    subprocess.run(command, env=environment, pass_fds=(theirs,), check=True, timeout=30)
    os.close(theirs)
    os.close(ours)


def test_without_a_supervisor_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "write", None)
    assert not heartbeat.connect()
    for step in range(9):
        heartbeat.beat(step)
    heartbeat.busy("scoring")


def test_the_supervisor_needs_no_jax(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from transformer_jax.cli import main\n"
        "from transformer_jax.training import supervisor\n"
        "supervisor.supervise = lambda command, run, **seconds: print(*command, run, seconds)\n"
        "main(['train', 'tiny', '--supervise', '--step-timeout', '7'])\n"
        "sys.exit('jax' in sys.modules)"
    )
    ended = run_python(code, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip().endswith(
        "-m transformer_jax train tiny --supervise --step-timeout 7 "
        "runs/tiny {'hang_seconds': 7.0, 'busy_seconds': 1800.0}"
    )


@pytest.mark.parametrize("seconds", ["0", "-1", "nan"])
def test_a_limit_that_is_none_is_refused(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("hang", "busy"):
        arguments = ["train", "tiny", "--supervise", f"--{name}-seconds", seconds]
        assert f"--{name}-seconds must be positive" in mistake(capsys, arguments)


LIMITS = ("--step-timeout", "3", "--phase-timeout", "120")
LONGER = SMALL.change(train={"steps": 120, "checkpoint_every": 40})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing disturbed."""
    quiet = Console(quiet=True)
    folder = create_run(LONGER, tmp_path_factory.mktemp("runs") / "whole", quiet)
    loop.run_training(folder, quiet)
    return folder.path


def command_line(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "transformer_jax", *arguments],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": f"{Path(__file__).parents[2]}:{Path(__file__).parents[1]}",
        },
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "when", "told"),
    [
        # Long enough after a phase that its steps are timed.
        (signal.SIGSTOP, "step > 45 and heartbeat._beats > 6", "nothing came for 3 s after step"),
        pytest.param(
            *(signal.SIGKILL, "step == 1", "SIGKILL ended training after step 0"),
            id="nothing saved yet",
        ),
    ],
)
def test_a_lost_run_goes_on_to_the_same_bits(
    whole: Path, tmp_path: Path, number: signal.Signals, when: str, told: str
) -> None:
    (tmp_path / "mine.py").write_text(
        textwrap.dedent(f"""
            import os
            from test_supervisor import LONGER as CONFIG
            from transformer_jax.distributed import heartbeat
            beat = heartbeat.beat
            def disturbed(step):
                beat(step)
                if {when}:
                    os.kill(os.getpid(), {number})
            heartbeat.beat = disturbed
        """)
    )
    ended = command_line(tmp_path, "train", "mine.py", "--supervise", *LIMITS)
    assert ended.returncode == 75, ended.stderr
    *_, last = ended.stderr.splitlines()
    assert last.startswith(f"transformer-jax: {told}")
    assert last.endswith("resume with `transformer-jax resume runs/mine`")
    resumed = command_line(tmp_path, "resume", "runs/mine", "--supervise")
    assert resumed.returncode == 0, resumed.stderr
    assert "next: transformer-jax evaluate runs/mine" in resumed.stdout
    run = tmp_path / "runs" / "mine"
    assert_same(state_of(run), state_of(whole))
    assert metrics_of(run) == metrics_of(whole)
