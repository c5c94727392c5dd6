"""Send a run's reports to its trackers.

Each tracker runs in its own thread of the primary process, so that a slow server does not delay
training. If a tracker raises an error, training continues without it. The file `trackers.json` in
the run's folder stores the ID that a tracker assigned to the run and the latest step that the
tracker received, so a resumed run continues its curves without repeating points.
"""

import contextlib
import itertools
import queue
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from transformer_jax.config import Config
from transformer_jax.config.validation import advise_import
from transformer_jax.errors import ConfigError, summarize_error
from transformer_jax.files import read_json_if_valid, read_limited, write_json
from transformer_jax.optional import require_library
from transformer_jax.progress import note
from transformer_jax.training.trackers import SAMPLES, TRACKERS, TrackedRun, Tracker

# At the end of a run, wait this many seconds for its trackers to send their remaining reports.
FINISH_SECONDS = 30.0
# A run in a sweep is at most this many folders below the sweep's folder.
MAX_DEPTH = 4
# The libraries that are optional dependencies. TensorBoard is always installed.
CLIENTS = ("wandb", "mlflow", "aim")
STATE = "trackers.json"

Report: TypeAlias = Mapping[str, Any]
"""A line of metrics.jsonl."""


def check_trackers(names: Sequence[str]) -> None:
    """Check that each tracker is registered and that its library is installed."""
    for name in names:
        if name not in TRACKERS:
            known = ", ".join(map(repr, TRACKERS))
            advice = advise_import(name, TRACKERS)
            raise ConfigError.from_field("train.trackers", f"among {known}", name, advice)
        if name in CLIENTS:
            require_library(name)


class RunTrackers:
    """The trackers of a run that this process trains."""

    def __init__(self, path: Path, config: Config, *, step: int, earlier: Iterable[Report]) -> None:
        """Start the trackers, and send each one the reports up to `step` that it is missing."""
        self._state_file, self._lock = path / STATE, threading.Lock()
        stored = read_json_if_valid(self._state_file)
        self._states = {name: _parse_state(stored.get(name)) for name in config.train.trackers}
        self._others = {name: x for name, x in stored.items() if name not in self._states}
        name, group = _name_run(path)
        self._feeds = [
            _Feed(key, TrackedRun(path, name, group, config, state["id"]), state, self._store)
            for key, state in self._states.items()
        ]
        scored = set[int]()
        for line in earlier if self._feeds else ():
            self.log(line)
            scored |= {line["step"]} if line["split"] == "dev" else set()
        for sample_step, text in _read_samples(path) if self._feeds else ():
            if sample_step <= step and sample_step in scored:
                self.log_samples(sample_step, text)

    def log(self, line: Report) -> None:
        """Send a line of metrics.jsonl to all trackers."""
        names = line.keys() - {"step", "split", "time"}
        values = {f"{line['split']}/{name}": float(line[name]) for name in sorted(names)}
        step, seconds = int(line["step"]), float(line.get("time", 0.0))
        for feed in self._feeds:
            feed.send(str(line["split"]), step, lambda x: x.log(step, values, seconds))

    def log_samples(self, step: int, text: str) -> None:
        """Send sample translations to all trackers."""
        for feed in self._feeds:
            feed.send(SAMPLES, step, lambda x: x.log_samples(step, text))

    def finish(self, *, is_complete: bool) -> None:
        """Stop all trackers. Wait up to `FINISH_SECONDS` for them to send their reports."""
        for feed in self._feeds:
            feed.end(is_complete=is_complete)
        deadline = time.monotonic() + FINISH_SECONDS
        for feed in self._feeds:
            feed.wait(max(0.0, deadline - time.monotonic()))

    def _store(self) -> None:
        with self._lock:
            # Other threads change the steps while the file is written and its digest is computed.
            copies = {name: {**x, "steps": {**x["steps"]}} for name, x in self._states.items()}
            known = {name: state for name, state in copies.items() if state["id"]}
            if known:
                write_json(self._state_file, {**self._others, **known})


class _Feed:
    """Sends the reports of a run to one tracker, in a separate thread."""

    def __init__(
        self, name: str, run: TrackedRun, state: dict[str, Any], store: Callable[[], None]
    ) -> None:
        self._name, self._run, self._state, self._store = name, run, state, store
        self._queue = queue.SimpleQueue[tuple[str, int, Callable[[Tracker], object]] | None]()
        self._failure, self._is_noted, self._is_complete = "", False, False
        # A daemon thread does not keep the process alive if its tracker hangs.
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def send(self, kind: str, step: int, action: Callable[[Tracker], object]) -> None:
        """Queue a call of `action`, which is skipped if the tracker already has the report."""
        self._note_failure()
        if not self._failure:
            self._queue.put((kind, step, action))

    def end(self, *, is_complete: bool) -> None:
        """Let the thread send the remaining reports and then exit."""
        self._is_complete = is_complete
        self._queue.put(None)

    def wait(self, seconds: float) -> None:
        """Wait up to this many seconds for the thread to exit."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._failure = self._failure or "it did not respond in time"
        self._note_failure()

    def _note_failure(self) -> None:
        if self._failure and not self._is_noted:
            self._is_noted = True
            note(f"the tracker {self._name} no longer receives reports: {self._failure}")

    def _work(self) -> None:
        try:
            tracker = TRACKERS[self._name](self._run)
            if not tracker.id or tracker.id != self._state["id"]:
                self._state.update(id=tracker.id, steps={})
            while (item := self._queue.get()) is not None:
                kind, step, action = item
                if step > self._state["steps"].get(kind, -1):
                    action(tracker)
                    self._state["steps"][kind] = step
                    self._store()
            tracker.finish(is_complete=self._is_complete)
        # A tracker can come from another package, so none of its errors may stop training.
        except BaseException as error:  # noqa: BLE001
            self._failure = f"{type(error).__name__}: {summarize_error(error)}"


def _parse_state(stored: object) -> dict[str, Any]:
    """Return the ID and the latest steps of a tracker. Ignore values of unexpected types."""
    state = stored if isinstance(stored, dict) else {}
    identity, steps = state.get("id"), state.get("steps")
    if not isinstance(identity, str) or not isinstance(steps, dict):
        return {"id": "", "steps": {}}
    return {"id": identity, "steps": {k: v for k, v in steps.items() if isinstance(v, int)}}


def _name_run(path: Path) -> tuple[str, str]:
    """Return the name of the run, and the name of its sweep or "" if there is none."""
    path = path.resolve()
    for parent in itertools.islice(path.parents, MAX_DEPTH):
        if (parent / "sweep.json").is_file():
            return path.relative_to(parent).as_posix(), parent.name
    return path.name, ""


def _read_samples(path: Path) -> Iterable[tuple[int, str]]:
    """Yield the step and the contents of each file in `samples`, ordered by step."""
    matches = (re.fullmatch(r"step-(\d{1,10})\.txt", x.name) for x in path.glob("samples/*"))
    for step in sorted(int(match[1]) for match in matches if match):
        with contextlib.suppress(OSError):
            content = read_limited(path / "samples" / f"step-{step}.txt")
            yield step, content.decode("utf-8", "replace")
