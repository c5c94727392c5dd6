"""Test that a supervisor reports a stuck or lost trainer with a one-line error and exit code 75."""

import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from example_configs import SMALL, metrics_of
from processes import mistake, run_python
from rich.console import Console

import transformer_jax
from transformer_jax.cli import main
from transformer_jax.commands.training import TrainingCommand
from transformer_jax.distributed import heartbeat
from transformer_jax.distributed.supervisor import TICK, Heartbeats, supervise
from transformer_jax.errors import LostProcessError
from transformer_jax.training.create_run import create_run
from transformer_jax.training.loop import run_training

TRAINER = """
    import os, signal, sys, time
    from transformer_jax import progress
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
# DEADLINE is much longer than any machine needs, so that tests pass on slow machines. STEP_TIMEOUT
# is short, because the tests of silent trainers wait that long.
STEP_TIMEOUT = 3.0
DEADLINE = 600.0
# In each of these programs, a process dies while it shows a progress bar.
KILLED = """
    import sys
    from pathlib import Path
    from transformer_jax.console import run_and_report
    from transformer_jax.distributed.supervisor import supervise
    trainer = (
        "import os, signal; from rich.progress import Progress\\n"
        "Progress().start(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    timeouts = {"step_timeout": 600.0, "phase_timeout": 600.0}
    command = [sys.executable, "-c", trainer]
    sys.exit(run_and_report(lambda: supervise(command, Path("run"), **timeouts)))
"""
ABANDONED = """
    import socket, time
    from pathlib import Path
    from rich.progress import Progress
    from transformer_jax.distributed.failure_propagation import FailurePropagation
    ours, theirs = socket.socketpair()
    Progress().start()
    FailurePropagation({0: ours}, Path("run"), is_primary=False)
    theirs.close()
    time.sleep(600)
"""


def trainer_command(folder: Path, *code: str) -> list[str]:
    """Write a program that simulates a trainer by running `code`, and return its command."""
    path = folder / "trainer.py"
    path.write_text("\n".join(map(textwrap.dedent, (TRAINER, *code))))
    return [sys.executable, str(path)]


def run_supervised(
    folder: Path, *code: str, step_timeout: float = DEADLINE, phase_timeout: float = DEADLINE
) -> int:
    command = trainer_command(folder, *code)
    return supervise(command, folder, step_timeout=step_timeout, phase_timeout=phase_timeout)


def lost_error(
    folder: Path,
    *code: str,
    step_timeout: float = STEP_TIMEOUT,
    phase_timeout: float = DEADLINE,
) -> str:
    """Run a trainer that hangs or is killed, and return the error message."""
    with pytest.raises(LostProcessError) as caught:
        run_supervised(folder, *code, step_timeout=step_timeout, phase_timeout=phase_timeout)
    assert caught.value.exit_code == 75
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_trainers_exit_code_is_returned(tmp_path: Path) -> None:
    for code in (0, 2, 75, 130):
        assert run_supervised(tmp_path, f"train(9); sys.exit({code})") == code


@pytest.mark.parametrize("program", [KILLED, ABANDONED])
def test_the_cursor_is_visible_after_a_process_with_a_progress_bar_was_lost(program: str) -> None:
    master, slave = pty.openpty()
    command = [sys.executable, "-c", textwrap.dedent(program)]
    environment = {**os.environ, "TERM": "xterm"}
    ended = subprocess.run(
        command, stdin=slave, stdout=slave, stderr=slave, env=environment, check=False
    )
    os.close(slave)
    # A read can return only a part of the output. After the last part, it raises an error.
    parts: list[bytes] = []
    with contextlib.suppress(OSError):
        while part := os.read(master, 1 << 16):
            parts.append(part)
    os.close(master)
    output = b"".join(parts).decode()
    assert ended.returncode == 75
    hide, show, erase_line = "\x1b[?25l", "\x1b[?25h", "\r\x1b[2K"
    assert hide in output.partition(show)[0]
    message = output.rpartition("transformer-jax: ")[0]
    assert message.endswith(show + erase_line)


def test_a_stuck_trainer_prints_its_stacks_and_is_killed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = "def wait_in_a_collective(): time.sleep(1000)\ntrain(9); wait_in_a_collective()"
    assert re.match(r"no heartbeat for \d+ s after step 9: ", lost_error(tmp_path, code))
    assert "in wait_in_a_collective" in capfd.readouterr().err


@pytest.mark.parametrize(
    "code",
    [
        "for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2): "
        "signal.signal(n, signal.SIG_IGN)\ntime.sleep(1000)",
        pytest.param("os.kill(os.getpid(), signal.SIGSTOP)", marks=pytest.mark.exhaustive),
    ],
    ids=["ignores signals", "stopped"],
)
def test_a_trainer_that_does_not_react_to_signals_is_killed(tmp_path: Path, code: str) -> None:
    assert "no heartbeat for" in lost_error(tmp_path, f"train(9)\n{code}")


def test_a_trainer_that_never_starts_is_killed(tmp_path: Path) -> None:
    error = lost_error(tmp_path, "time.sleep(1000)", phase_timeout=1.0)
    assert re.match(r"no heartbeat for \d+ s while starting after step 0: ", error)


def test_a_report_of_progress_starts_a_phase(tmp_path: Path) -> None:
    code = "progress.report('encoding train', 1, 2); time.sleep(1000)"
    error = lost_error(tmp_path, code, phase_timeout=1.0)
    assert re.match(r"no heartbeat for \d+ s while encoding train after step 0: ", error)


def test_silence_in_a_phase_may_last_longer_than_between_steps() -> None:
    heartbeats = Heartbeats(step_timeout=30, phase_timeout=1800)
    for message, limit in (
        # The time before the first message may include compilation, so it does not count as step
        # time.
        ("step 3", 1800),
        ("step 6", 80),
        ("busy scoring", 1800),
        # The time since the start of a phase does not count as step time.
        ("step 9", 80),
    ):
        heartbeats.silence = 500.0 if heartbeats.phase else 20.0
        heartbeats.receive(message)
        assert heartbeats.limit == limit
        assert heartbeats.silence == 0
    fast = Heartbeats(30, 1800, phase="", silence=0.1)
    fast.receive("step 3")
    assert fast.limit == 30


def test_a_long_step_extends_the_limit_for_a_hundred_messages() -> None:
    heartbeats = Heartbeats(step_timeout=30, phase_timeout=1800, phase="")
    for index, silence in enumerate([10.0, 300.0, *[10.0] * 100]):
        heartbeats.silence = silence
        heartbeats.receive(f"step {3 * index}")
        # A long interval affects the limit only while it is among the last hundred intervals.
        assert heartbeats.limit == (1200 if 1 <= index <= 100 else 40)


def test_time_while_the_supervisor_is_suspended_does_not_count_as_silence() -> None:
    heartbeats = Heartbeats(step_timeout=30, phase_timeout=1800)
    heartbeats.add_silence(TICK)
    heartbeats.add_silence(3600.0)
    assert heartbeats.silence == 3 * TICK


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT, 40])
def test_a_trainer_that_a_signal_ends_can_be_resumed(
    tmp_path: Path, number: int, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "my run"
    run.mkdir()
    (run / "run.json").touch()
    code = f"train(9); print('a dump', file=sys.stderr, flush=True); os.kill(os.getpid(), {number})"
    error = lost_error(run, code, step_timeout=DEADLINE)
    name = number.name if isinstance(number, signal.Signals) else "signal 40"
    assert error.startswith(f"{name} ended training after step 9; ")
    assert error.endswith(f"`transformer-jax resume '{run}'`")
    assert "a dump" in capfd.readouterr().err


def test_the_error_does_not_advise_to_resume_a_run_that_does_not_exist(tmp_path: Path) -> None:
    error = lost_error(tmp_path, "os.abort()")
    assert "resume" not in error
    assert "the same command" in error


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    """A list of processes to kill after the test."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def start_supervisor(
    processes: list[subprocess.Popen[str]],
    folder: Path,
    *code: str,
    step_timeout: float = DEADLINE,
) -> tuple[subprocess.Popen[str], int]:
    """Start a supervisor, and return it with the process ID of its trainer."""
    command = trainer_command(folder, "train(9); print(os.getpid(), flush=True)", *code)
    timeouts = f"step_timeout={step_timeout}, phase_timeout={DEADLINE}"
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from transformer_jax.distributed.supervisor import supervise\n"
        f"sys.exit(supervise({command!r}, Path('run'), {timeouts}))"
    )
    supervisor = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    processes.append(supervisor)
    return supervisor, int(read_line(supervisor))


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_signals_reach_the_trainer_once_each(
    tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    code = """
        received = []
        def receive(number, _):
            received.append(number)
            print(signal.Signals(number).name, flush=True)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, receive)
        print("ready", flush=True)
        while len(received) < 4:
            train(1)
        train(50)
    """
    supervisor, trainer = start_supervisor(processes, tmp_path, code)
    assert read_line(supervisor) == "ready"
    assert os.getpgid(trainer) != os.getpgid(supervisor.pid)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        # Send each signal to the whole process group, as a terminal does. Wait until the signal
        # is reported, because identical pending signals are merged into one.
        os.killpg(supervisor.pid, number)
        assert read_line(supervisor) == number.name
    out, _ = supervisor.communicate(timeout=DEADLINE)
    assert (out, supervisor.returncode) == ("", 0)


@pytest.mark.parametrize(
    "code",
    ["train(100_000)", "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)"],
    ids=["training", "stuck and ignores SIGTERM"],
)
def test_no_trainer_outlives_its_supervisor(
    tmp_path: Path, processes: list[subprocess.Popen[str]], code: str
) -> None:
    code = f"heartbeat.ORPHAN_SECONDS = 1; print('ready', flush=True); {code}"
    supervisor, trainer = start_supervisor(processes, tmp_path, code)
    assert read_line(supervisor) == "ready"
    supervisor.kill()
    deadline = time.monotonic() + DEADLINE
    while is_alive(trainer):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def is_alive(pid: int) -> bool:
    try:
        # A zombie process counts as ended, even if its new parent has not reaped it yet.
        return (
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0]
            != "Z"
        )
    except OSError:
        return False


@pytest.mark.exhaustive
def test_a_trainer_survives_when_its_supervisor_is_stopped_with_it(
    tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    timeout = 10.0
    supervisor, trainer = start_supervisor(processes, tmp_path, "train(50)", step_timeout=timeout)
    os.kill(trainer, signal.SIGSTOP)
    # Before stopping the supervisor, let it read all messages.
    time.sleep(1)
    os.kill(supervisor.pid, signal.SIGSTOP)
    time.sleep(timeout + 2)
    os.kill(supervisor.pid, signal.SIGCONT)
    os.kill(trainer, signal.SIGCONT)
    assert supervisor.wait(DEADLINE) == 0


def test_a_supervisor_that_does_not_read_does_not_block_training(tmp_path: Path) -> None:
    ours, theirs = os.pipe()
    # A pipe holds 65,536 bytes. Nearly all of the messages are at least 9 bytes long, so the pipe
    # cannot hold all of them.
    command = trainer_command(tmp_path, "train(3 * 65536 // 8, pause=0)")
    environment = {**os.environ, heartbeat.VARIABLE: str(theirs)}
    subprocess.run(command, env=environment, pass_fds=(theirs,), check=True, timeout=DEADLINE)
    os.close(theirs)
    os.close(ours)


def test_the_supervisor_does_not_import_jax(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from transformer_jax.cli import main\n"
        "from transformer_jax.commands import training\n"
        "training.supervise = lambda command, run, **timeouts: print(*command, run, timeouts)\n"
        "main(['train', 'tiny', '--supervise', '--step-timeout', '7'])\n"
        "sys.exit('jax' in sys.modules)"
    )
    ended = run_python(code, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip().endswith(
        "-m transformer_jax train tiny --supervise --step-timeout 7 "
        "runs/tiny {'step_timeout': 7.0, 'phase_timeout': 1800.0}"
    )


def test_the_supervisor_does_not_repeat_the_trainers_warnings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(TrainingCommand, "under_supervisor", lambda *_: 0)
    assert main(["train", "tiny", "--model.d-k", "16", "--supervise"]) == 0
    assert capsys.readouterr().err == ""


def test_timeouts_must_be_positive(capsys: pytest.CaptureFixture[str]) -> None:
    for option, seconds in (
        ("--step-timeout", "0"),
        ("--phase-timeout", "-1"),
        ("--step-timeout", "nan"),
    ):
        error = mistake(capsys, ["train", "tiny", "--supervise", option, seconds])
        assert "must be positive" in error


@pytest.mark.parametrize("option", ["--step-timeout", "--phase-timeout"])
def test_timeouts_need_a_supervisor(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", "tiny", "--out", str(tmp_path / "run"), option, "7"]
    assert mistake(capsys, command) == f"transformer-jax: {option} needs --supervise\n"
    assert not (tmp_path / "run").exists()


TIMEOUTS = ("--step-timeout", "3", "--phase-timeout", "120")
LONGER = SMALL.change(train={"steps": 120, "checkpoint_every": 40})


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path to an uninterrupted run."""
    quiet = Console(quiet=True)
    folder = create_run(LONGER, tmp_path_factory.mktemp("runs") / "undisturbed", quiet)
    run_training(folder, quiet)
    return folder.path


def run_command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[2]
    support = root / "tests" / "support"
    return subprocess.run(
        [sys.executable, "-m", "transformer_jax", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{root}:{support}"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("number", "condition", "error"),
    [
        # The supervisor knows the step time only after two consecutive messages report steps.
        (
            signal.SIGSTOP,
            "step > 45 and heartbeat._beats > 6",
            r"no heartbeat for \d+ s after step",
        ),
        (signal.SIGKILL, "step == 1", "SIGKILL ended training after step 0"),
    ],
    ids=["stopped", "killed before the first checkpoint"],
)
def test_a_lost_run_resumes_to_the_same_bits(
    undisturbed: Path, tmp_path: Path, number: signal.Signals, condition: str, error: str
) -> None:
    (tmp_path / "mine.py").write_text(
        textwrap.dedent(f"""
            import os
            from example_configs import SMALL
            from transformer_jax.distributed import heartbeat
            CONFIG = SMALL.change(train={{"steps": 120, "checkpoint_every": 40}})
            beat = heartbeat.beat
            def beat_and_fail(step):
                beat(step)
                if {condition}:
                    os.kill(os.getpid(), {number})
            heartbeat.beat = beat_and_fail
        """)
    )
    ended = run_command(tmp_path, "train", "mine.py", "--supervise", *TIMEOUTS)
    assert ended.returncode == 75, ended.stderr
    last_line = ended.stderr.splitlines()[-1]
    assert re.match(f"transformer-jax: {error}", last_line)
    assert last_line.endswith("`transformer-jax resume runs/mine`")
    resumed = run_command(tmp_path, "resume", "runs/mine", "--supervise")
    assert resumed.returncode == 0, resumed.stderr
    assert "next: transformer-jax evaluate runs/mine" in resumed.stdout
    run = tmp_path / "runs" / "mine"
    ours, theirs = (transformer_jax.load(path) for path in (run, undisturbed))
    jax.tree.map(np.testing.assert_array_equal, ours.params, theirs.params)
    assert metrics_of(run) == metrics_of(undisturbed)
