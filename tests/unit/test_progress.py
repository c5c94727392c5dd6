import subprocess
import sys
import threading
import warnings

import pytest

from transformer_jax import progress
from transformer_jax.errors import storage_errors

Reports = list[tuple[str, int, int]]


def record(reports: Reports) -> progress.Reporter:
    return lambda activity, done, total: reports.append((activity, done, total))


def test_progress_goes_to_the_innermost_reporter() -> None:
    outer: Reports = []
    inner: Reports = []
    progress.report("before")
    with progress.report_to(record(outer)):
        progress.report("reading", 1, 3)
        with progress.report_to(record(inner)):
            progress.report("writing")
        progress.report("reading", 2, 3)
    progress.report("after")
    assert outer == [("reading", 1, 3), ("reading", 2, 3)]
    assert inner == [("writing", 0, 0)]


def test_advance_adds_to_the_innermost_task() -> None:
    reports: Reports = []
    progress.advance(1)
    with progress.report_to(record(reports)), progress.task("outer", total=5, done=1):
        progress.advance(2)
        with progress.task("inner", total=2):
            progress.advance(1)
        progress.advance(2)
    progress.advance(1)
    assert reports == [
        *(("outer", 1, 5), ("outer", 3, 5)),
        *(("inner", 0, 2), ("inner", 1, 2)),
        ("outer", 5, 5),
    ]


def test_another_thread_does_not_report_to_this_one() -> None:
    reports: Reports = []
    with progress.report_to(record(reports)), progress.task("here", total=2):
        thread = threading.Thread(target=lambda: (progress.report("there"), progress.advance(1)))
        thread.start()
        thread.join()
    assert reports == [("here", 0, 2)]


def test_listeners_receive_the_progress_of_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    reports: Reports = []
    monkeypatch.setattr(progress, "listeners", [record(reports)])
    thread = threading.Thread(target=lambda: progress.report("there"))
    thread.start()
    thread.join()
    progress.report("here")
    assert [activity for activity, _, _ in reports] == ["there", "here"]


def test_the_location_of_a_note_is_the_line_that_called_the_package() -> None:
    with (
        warnings.catch_warnings(record=True) as caught,
        progress.report_to(lambda activity, *_: progress.note(activity)),
    ):
        warnings.simplefilter("always")
        progress.note("direct")
        with progress.task("nested", total=1):
            pass
        storage_errors("a problem")(progress.note)("decorated")
    assert [(str(x.message), x.category, x.filename) for x in caught] == [
        ("direct", progress.Note, __file__),
        ("nested", progress.Note, __file__),
        ("decorated", progress.Note, __file__),
    ]


def test_a_note_in_a_script_without_a_package_is_a_warning() -> None:
    code = "from transformer_jax.progress import note; note('one line')"
    command = [sys.executable, "-W", "always", "-c", code]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "<string>:1: Note: one line" in process.stderr
