"""Test that output cannot control the terminal, and that each error prints one line."""

import errno
import io
import os
import pty
import shlex
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path

import pytest
from rich.table import Table

from transformer_jax import console, errors
from transformer_jax.cli import main
from transformer_jax.console import (
    PlainConsole,
    escape_control_characters,
    format_for_shell,
    message_and_exit_code,
    progress_bar,
    run_and_report,
    shell_command,
)
from transformer_jax.errors import Setting, TransformerJaxError, UsageError
from transformer_jax.files import new_folder
from transformer_jax.progress import note, report


def test_control_characters_are_escaped_and_all_other_text_is_unchanged() -> None:
    assert escape_control_characters("\x1b[2J\x07\r\x9b\u202e") == r"\x1b[2J\x07\r\x9b\u202e"
    plain = "größe\t日本\n½ [bold]red[/bold] :smile:"
    assert escape_control_characters(plain) == plain


def test_a_console_prints_text_without_markup_or_wrapping() -> None:
    out = io.StringIO()
    plain = PlainConsole()
    plain.file = out
    text = "[bold]a[/bold] :smile: \x1b[2J " + "word " * 100
    plain.print(text)
    assert out.getvalue() == escape_control_characters(text) + "\n"


def test_a_table_shows_control_characters_escaped_and_text_without_markup() -> None:
    out = io.StringIO()
    plain = PlainConsole()
    plain.file = out
    table = Table("a\x1b[2Jb", box=None)
    table.add_row("[bold]\x1b]0;owned\x07[/bold]")
    plain.print(table)
    lines = [line.strip() for line in out.getvalue().splitlines()]
    assert lines == [r"a\x1b[2Jb", r"[bold]\x1b]0;owned\x07[/bold]"]


def test_the_shell_splits_a_shell_command_into_its_words() -> None:
    words = ["resume", "my run/größe", "--out", "it's"]
    assert shlex.split(shell_command(*words)) == ["transformer-jax", *words]


def test_a_name_with_a_leading_dash_is_not_an_option_in_a_command() -> None:
    assert shell_command("translate", Path("-run")) == "transformer-jax translate ./-run"
    error = UsageError("", Setting("out", "-run-2"))
    assert format_for_shell(error) == "--out=-run-2"


@pytest.mark.parametrize(
    ("error", "line", "code"),
    [
        (UsageError("no run"), "transformer-jax: no run", 2),
        (errors.SweepFailedError("two failed"), "transformer-jax: two failed", 1),
        (errors.DataError("not UTF-8"), "transformer-jax: not UTF-8", 65),
        (errors.ConnectionFailedError("alone"), "transformer-jax: alone", 69),
        (errors.DivergedError("step 3"), "transformer-jax: step 3", 70),
        (errors.OutOfMemoryError("full"), "transformer-jax: full", 71),
        (MemoryError(), "transformer-jax: this machine is out of memory", 71),
        (errors.StorageError("disk"), "transformer-jax: disk", 74),
        (OSError("disk"), "transformer-jax: disk", 74),
        (
            FileNotFoundError(errno.ENOENT, "No such file or directory", "run/checkpoints"),
            "transformer-jax: run/checkpoints does not exist: it may have been moved or deleted",
            74,
        ),
        (errors.RunInterrupted("saved"), "transformer-jax: saved", 75),
        (KeyboardInterrupt(), "", 130),
    ],
)
def test_an_error_is_one_line_and_the_exit_code_of_its_kind(
    error: BaseException, line: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise error

    assert message_and_exit_code(error) == (line, code)
    assert run_and_report(fail) == code
    assert capsys.readouterr().err == (f"{line}\n" if line else "")


@pytest.mark.parametrize("error", [ImportError("jaxlib"), errors.StorageError("unreadable")])
def test_an_error_that_ctrl_c_caused_in_a_library_ends_a_command_quietly(error: Exception) -> None:
    error.__cause__ = RuntimeError()
    error.__cause__.__context__ = KeyboardInterrupt()
    assert message_and_exit_code(error) == ("", 130)


def test_ctrl_c_during_an_import_does_not_raise_an_exception_in_it(tmp_path: Path) -> None:
    library = (
        "import os, signal\n"
        "try:\n    os.kill(os.getpid(), signal.SIGINT)\n"
        "except KeyboardInterrupt:\n    os.abort()\n"
    )
    (tmp_path / "library.py").write_text(library)
    # A shell starts background processes with SIGINT ignored, and their child processes inherit
    # this setting.
    code = (
        "import signal\n"
        "from transformer_jax.console import run_and_report\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "run_and_report(lambda: __import__('library'))"
    )
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, b"", b"")


def test_a_bug_keeps_its_traceback() -> None:
    assert message_and_exit_code(ZeroDivisionError()) is None
    with pytest.raises(ZeroDivisionError):
        run_and_report(lambda: 1 // 0)


def test_advice_is_worded_for_python_or_for_the_shell() -> None:
    error = UsageError("too few: use ", Setting("average_checkpoints", 1), ", please")
    assert str(error) == "too few: use average_checkpoints=1, please"
    line = "transformer-jax: too few: use --average-checkpoints 1, please"
    assert message_and_exit_code(error) == (line, 2)
    flag = TransformerJaxError("allow ", Setting("truncate", True))
    assert format_for_shell(flag) == "allow --truncate"
    off = TransformerJaxError("use ", Setting("model.output_bias", False))
    assert format_for_shell(off) == "use --model.no-output-bias"
    quoted = TransformerJaxError("", Setting("out", "my run"))
    assert format_for_shell(quoted) == "--out 'my run'"


def test_a_closed_pipe_ends_a_command_quietly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise BrokenPipeError

    monkeypatch.setattr(console.sys, "stderr", io.StringIO())
    assert run_and_report(fail) == 1
    assert capsys.readouterr().err == ""


def test_a_closed_pipe_ends_a_command_quietly_even_if_messages_are_already_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> None:
        console.stderr.print("a message")
        raise BrokenPipeError

    with Path("/dev/full").open("w", encoding="utf-8") as full:
        monkeypatch.setattr(console.sys, "stderr", full)
        assert run_and_report(fail) == 1
    # A later command in this process has an open stream.
    assert run_and_report(lambda: console.stderr.print("a message")) == 0
    sys.stderr.close()
    out = io.StringIO()
    monkeypatch.setattr(console.sys, "stderr", out)
    assert run_and_report(lambda: console.stderr.print("another message")) == 0
    assert out.getvalue() == "another message\n"


def test_a_command_continues_if_the_reader_of_its_output_exits() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w") as out:
        plain = PlainConsole()
        plain.file = out
        plain.print("first line")
        plain.print("second line")


def test_a_command_continues_after_its_terminal_is_closed(tmp_path: Path) -> None:
    code = """
        import os, signal, sys
        from pathlib import Path
        from transformer_jax.console import progress_bar, run_and_report, stderr, stdout
        from transformer_jax.progress import note, report

        def work():
            with progress_bar():
                report("working", 1, 2)
                Path("started").touch()
                try:
                    os.read(0, 1)
                except OSError:
                    pass
                for console in (stdout, stderr):
                    console.print("the terminal is closed")
                note("it is closed")
                report("working", 2, 2)
            Path("finished").touch()

        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        sys.exit(run_and_report(work))
    """
    terminal, stream = pty.openpty()
    command = [sys.executable, "-c", textwrap.dedent(code)]
    environment = {**os.environ, "TERM": "xterm"}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdin=stream, stdout=stream, stderr=stream
    ) as process:
        os.close(stream)
        while not (tmp_path / "started").exists():
            assert process.poll() is None
            time.sleep(0.01)
        os.close(terminal)
        assert process.wait() == 0
    assert (tmp_path / "finished").exists()


def test_a_full_disk_for_messages_changes_no_exit_code_and_one_for_results_does() -> None:
    command = [sys.executable, "-m", "transformer_jax"]
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        assert subprocess.run([*command, "nothing"], stderr=full, check=False).returncode == 2
        done = subprocess.run(
            [*command, "version"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 74
    assert done.stderr == (
        "transformer-jax: standard output could not be written: No space left on device\n"
    )


def test_a_command_whose_output_cannot_be_written_stores_its_results_and_the_next_one_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work() -> None:
        console.stdout.print("step 1")
        (tmp_path / "results").touch()

    with Path("/dev/full").open("w", encoding="utf-8") as full:
        monkeypatch.setattr(console, "stdout", PlainConsole(file=full))
        assert run_and_report(work) == 74
        assert (tmp_path / "results").exists()
        with (tmp_path / "output").open("w") as file:
            os.dup2(file.fileno(), full.fileno())
        assert run_and_report(work) == 0
    assert (tmp_path / "output").read_text() == "step 1\n"


@pytest.mark.parametrize("command", ["train tiny --out x", "sweep tiny --dry-run", "status x"])
def test_an_error_says_that_the_working_directory_was_deleted(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "deleted"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert main(command.split()) in (2, 74)
    assert capsys.readouterr().err.endswith("; the working directory was deleted\n")


def test_progress_outside_a_terminal_names_each_task_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with progress_bar():
        for done in range(3):
            report("reading", done, 3)
        report("writing", 1, 0)
    assert capsys.readouterr().err == "reading ...\nwriting ...\n"


def test_a_command_prints_each_note_once_on_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run() -> None:
        for _ in range(2):
            note("something \x1b[31m happened")
        warnings.warn("something else", stacklevel=1)

    with pytest.warns(UserWarning, match="something else"):
        assert run_and_report(run) == 0
    assert capsys.readouterr().err == "note: something \\x1b[31m happened\n"


def test_names_in_a_progress_bar_are_neither_markup_nor_control_characters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    out, terminal = io.StringIO(), PlainConsole()
    terminal.file, terminal._force_terminal, terminal.is_interactive = out, True, True
    monkeypatch.setattr(console, "stderr", terminal)
    name = "scoring a[/b] [red]c\x1b]0;owned\x07\nd"
    with progress_bar():
        report(name, 1, 3)
    assert r"scoring a[/b] [red]c\x1b]0;owned\x07\nd" in out.getvalue()
    assert "\x1b]" not in out.getvalue()


def test_a_name_with_a_newline_does_not_break_the_line_of_an_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail() -> None:
        note("a\nb")
        report("a\nb")
        raise UsageError("no file a\nb")

    with progress_bar():
        assert run_and_report(fail) == 2
    err = capsys.readouterr().err
    assert err.splitlines() == [r"note: a\nb", r"a\nb ...", r"transformer-jax: no file a\nb"]


@pytest.mark.filterwarnings("default")
def test_a_cache_of_programs_that_cannot_be_used_is_noted_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run() -> None:
        for name in ("jit_f", "jit_g"):
            reason = f"PermissionError: [Errno 13] Permission denied: '/x/{name}-1-cache'"
            warnings.warn(
                f"Error writing persistent compilation cache entry for '{name}': {reason}",
                stacklevel=1,
            )

    assert run_and_report(run) == 0
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("note: JAX cannot use its cache of compiled programs")
    assert line.endswith(": Permission denied")


def test_a_warning_cannot_control_the_terminal() -> None:
    with pytest.warns(UserWarning, match=r"x\\x1b\[2J"):
        run_and_report(lambda: warnings.warn("x\x1b[2J", stacklevel=1))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_ends_a_command_with_a_message_after_it_cleans_up(
    number: signal.Signals, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def create() -> None:
        with new_folder(tmp_path / "run"):
            signal.raise_signal(number)

    assert run_and_report(create) == 75
    message = f"transformer-jax: {number.name}: stopped; run the same command again\n"
    assert capsys.readouterr().err == message
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(number) == signal.SIG_DFL


def test_a_signal_during_an_import_ends_a_command_with_a_message(tmp_path: Path) -> None:
    (tmp_path / "library.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n"
    )
    code = (
        "from transformer_jax.console import run_and_report\n"
        "run_and_report(lambda: __import__('library'))"
    )
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    message = b"transformer-jax: SIGTERM: stopped; run the same command again\n"
    assert (ended.returncode, ended.stderr) == (75, message)
