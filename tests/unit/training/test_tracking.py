"""Test what trackers receive from runs that start, fail, resume, and belong to sweeps."""

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from example_configs import SMALL

import transformer_jax as tj
from transformer_jax.progress import Note
from transformer_jax.training import tracking
from transformer_jax.training.tracking import RunTrackers, check_trackers

pytestmark = pytest.mark.usefixtures("forget_parts")
FIRST = [
    {"step": 2, "split": "train", "time": 7.0, "loss": 3.0, "learning_rate": 0.1},
    {"step": 4, "split": "train", "time": 8.0, "loss": 2.0, "learning_rate": 0.2},
    {"step": 4, "split": "dev", "time": 9.0, "perplexity": 9.0},
]
LAST = {"step": 6, "split": "train", "time": 10.0, "loss": 1.0}


class Recorder(tj.Tracker):
    """A tracker that stores what it receives."""

    given_id: ClassVar[str] = ""
    runs: ClassVar[list["Recorder"]] = []

    def __init__(self, run: tj.TrackedRun) -> None:
        self.run, self.id = run, run.id or self.given_id
        self.received: list[tuple[object, ...]] = []
        self.endings: list[bool] = []
        self.threads = {threading.get_ident()}
        Recorder.runs.append(self)

    def log(self, step: int, values: Mapping[str, float], seconds: float) -> None:
        self.threads.add(threading.get_ident())
        self.received.append((step, dict(values), seconds))

    def log_samples(self, step: int, text: str) -> None:
        self.received.append((step, text))

    def finish(self, *, is_complete: bool) -> None:
        self.endings.append(is_complete)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Recorder]:
    """Register a recorder, and return the recorders that runs create."""
    tj.register("train.trackers", "recorder")(Recorder)
    monkeypatch.setattr(Recorder, "runs", [])
    monkeypatch.setattr(Recorder, "given_id", "assigned")
    return Recorder.runs


def send(
    path: Path,
    lines: list[dict[str, Any]],
    *names: str,
    earlier: list[dict[str, Any]] | None = None,
    step: int = 0,
) -> None:
    config = SMALL.change(train={"trackers": names or ("recorder",)})
    trackers = RunTrackers(path, config, step=step, earlier=earlier or [])
    for line in lines:
        trackers.log(line)
    trackers.finish(is_complete=True)


def test_a_tracker_receives_every_report_in_order_in_one_separate_thread(
    tmp_path: Path, runs: list[Recorder]
) -> None:
    send(tmp_path, FIRST)
    [recorder] = runs
    assert recorder.received == [
        (2, {"train/loss": 3.0, "train/learning_rate": 0.1}, 7.0),
        (4, {"train/loss": 2.0, "train/learning_rate": 0.2}, 8.0),
        (4, {"dev/perplexity": 9.0}, 9.0),
    ]
    assert recorder.endings == [True]
    assert len(recorder.threads) == 1
    assert threading.get_ident() not in recorder.threads
    assert recorder.run.config.model == SMALL.model


def test_a_resumed_run_continues_with_the_stored_id_and_sends_no_report_twice(
    tmp_path: Path, runs: list[Recorder]
) -> None:
    send(tmp_path, FIRST)
    # The process was killed after step 4, and the last checkpoint is from step 2.
    send(tmp_path, [*FIRST[1:], LAST], earlier=FIRST[:1], step=2)
    assert [x.run.id for x in runs] == ["", "assigned"]
    assert runs[1].received == [(6, {"train/loss": 1.0}, 10.0)]


def test_a_tracker_without_an_id_and_a_tracker_that_is_added_later_receive_all_reports(
    tmp_path: Path, runs: list[Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Recorder, "given_id", "")
    send(tmp_path, FIRST)
    (tmp_path / "samples").mkdir()
    for step in (4, 12):
        (tmp_path / "samples" / f"step-{step}.txt").write_text(f"step {step}", "utf-8")
    send(tmp_path, [LAST], earlier=FIRST, step=4)
    assert [x[0] for x in runs[1].received] == [2, 4, 4, 4, 6]
    # The samples of step 12 are those of a killed process, and the run repeats that step.
    assert runs[1].received[3] == (4, "step 4")
    assert not (tmp_path / "trackers.json").exists()


def test_a_damaged_state_starts_new_curves(tmp_path: Path, runs: list[Recorder]) -> None:
    send(tmp_path, FIRST)
    (tmp_path / "trackers.json").write_text("{", "utf-8")
    with pytest.warns(Note, match=r"trackers\.json cannot be read.*; the file is ignored"):
        send(tmp_path, [LAST], earlier=FIRST, step=4)
    assert runs[1].run.id == ""
    assert len(runs[1].received) == 4


def test_a_report_to_one_tracker_does_not_change_the_state_that_another_is_storing(
    tmp_path: Path, runs: list[Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    tj.register("train.trackers", "second")(Recorder)
    stored: list[Any] = []
    monkeypatch.setattr(tracking, "write_json", lambda _, content: stored.append(content))
    send(tmp_path, FIRST, "recorder", "second")
    assert len(runs) == 2
    # The first file contains only the first report of the tracker that wrote it.
    assert {"train": 2} in [state["steps"] for state in stored[0].values()]
    assert [state["steps"] for state in stored[-1].values()] == [{"train": 4, "dev": 4}] * 2


@pytest.mark.parametrize("when", ["start", "log", "finish"])
def test_a_tracker_that_fails_issues_one_note_and_does_not_affect_others(
    tmp_path: Path, runs: list[Recorder], when: str
) -> None:
    class Failing(tj.Tracker):
        def __init__(self, run: tj.TrackedRun) -> None:  # noqa: ARG002
            self.check("start")

        def log(self, step: int, values: Mapping[str, float], seconds: float) -> None:  # noqa: ARG002
            self.check("log")

        def finish(self, *, is_complete: bool) -> None:  # noqa: ARG002
            self.check("finish")

        def check(self, now: str) -> None:
            if now == when:
                raise SystemExit("no connection\nin detail")

    tj.register("train.trackers", "failing")(Failing)
    with pytest.warns(Note) as notes:
        send(tmp_path, FIRST, "failing", "recorder")
    [text] = [str(x.message) for x in notes]
    assert text == ("the tracker failing no longer receives reports: SystemExit: no connection")
    assert len(runs[0].received) == len(FIRST)


def test_a_run_waits_only_for_a_limited_time_for_a_tracker_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    event = threading.Event()

    class Hanging(tj.Tracker):
        def log(self, step: int, values: Mapping[str, float], seconds: float) -> None:  # noqa: ARG002
            event.wait()

    tj.register("train.trackers", "hanging")(Hanging)
    monkeypatch.setattr(tracking, "FINISH_SECONDS", 0.1)
    with pytest.warns(
        Note, match="the tracker hanging no longer receives reports: it did not respond in time"
    ):
        send(tmp_path, FIRST, "hanging")
    event.set()


def test_a_run_in_a_sweep_has_the_sweep_as_its_group(tmp_path: Path, runs: list[Recorder]) -> None:
    run, trial = (tmp_path / "heads" / x for x in ("A1/seed-0", "tune/A1/0.5/seed-0"))
    (tmp_path / "alone").mkdir()
    for path in (run, trial):
        path.mkdir(parents=True)
    (tmp_path / "heads" / "sweep.json").touch()
    for path in (tmp_path / "alone", run, trial):
        send(path, FIRST)
    names = [(x.run.name, x.run.group) for x in runs]
    assert names == [("alone", ""), ("A1/seed-0", "heads"), ("tune/A1/0.5/seed-0", "heads")]


def test_an_unknown_tracker_is_rejected_before_a_run_is_created(tmp_path: Path) -> None:
    config = SMALL.change(train={"trackers": ("tensorbord",)})
    with pytest.raises(tj.ConfigError) as error:
        tj.train(config, tmp_path / "run")
    assert str(error.value) == (
        "train.trackers must be among 'tensorboard', 'wandb', 'mlflow', 'aim', got 'tensorbord'; "
        "did you mean 'tensorboard'? If your own file registers it, import that file (on the "
        "command line: --import)"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_missing_library_is_reported_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("transformer_jax.optional.find_spec", lambda _: None)
    with pytest.raises(tj.UsageError, match="needs wandb: pip install wandb"):
        check_trackers(("tensorboard", "wandb"))


def test_the_processes_of_a_sweep_cannot_use_a_tracker_from_a_notebook(tmp_path: Path) -> None:
    code = compile(
        "import transformer_jax as tj\n"
        "@tj.register('train.trackers', 'mine')\n"
        "class Mine(tj.Tracker): pass\n",
        "<cell>",
        "exec",
    )
    exec(code, {})  # noqa: S102 (a notebook executes cells in this way)
    config = SMALL.change(train={"trackers": ("mine",)})
    with pytest.raises(tj.UsageError, match=r"train\.trackers 'mine' is not registered by a file"):
        tj.sweep({"base": config}, tmp_path / "sweep")
