"""Terminal output: streams, the progress bar, and one-line error messages with exit codes."""

import contextlib
import errno
import io
import locale
import os
import re
import shlex
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from rich.console import Console
from rich.control import Control
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.segment import ControlType
from rich.text import Text

from transformer_jax.config.loading import import_arguments
from transformer_jax.errors import (
    BackendError,
    OutOfMemoryError,
    RunInterrupted,
    Setting,
    StorageError,
    TransformerJaxError,
    show_paths,
)
from transformer_jax.progress import Note, report_to
from transformer_jax.signals import STOP_SIGNALS, handle_signals

# Terminals interpret control characters, so a name or translation that contains them could corrupt
# the display.
CONTROL_CHARACTERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

# JAX's warning that it cannot read or write a compiled program, up to the name of the file.
CACHE_FAILURE = re.compile(
    r"Error \w+ing persistent compilation cache entry .*?: \w+: (?:\[Errno \d+\] )?([^:\n]*)"
)
INVALID_SETTING = re.compile(r"(?:for JAX flag |for environment ')(jax_\w+)", re.IGNORECASE)
CACHE_ADVICE = (
    "JAX cannot use its cache of compiled programs, so it compiles them again each time (to choose "
    "another folder, set TRANSFORMER_JAX_CACHE)"
)


def escape_control_characters(text: str) -> str:
    r"""Return the text with control characters replaced by escape sequences such as `\x1b`."""
    return CONTROL_CHARACTERS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    r"""Return the text on one line, with control characters escaped and newlines shown as `\n`."""
    return escape_control_characters(text).replace("\n", r"\n")


def shell_command(*words: object, imports: Sequence[str] | None = None) -> str:
    """Quote a `transformer-jax` command. Pass paths as `Path`, because they may begin with "-".

    The command imports the same files as this process, or the files in `imports`.
    """
    safe = (f"./{x}" if isinstance(x, Path) and str(x).startswith("-") else str(x) for x in words)
    named = [word for file in imports or () for word in ("--import", file)]
    end = import_arguments() if imports is None else named
    return shlex.join(["transformer-jax", *map(show_paths, safe), *end])


def _format_option(setting: Setting) -> str:
    """Return the setting as a command-line option, such as `--average-checkpoints 1`."""
    name = setting.name.replace("_", "-")
    if setting.value is True:
        return f"--{name}"
    if setting.value is False:
        section, dot, field = name.rpartition(".")
        return f"--{section}{dot}no-{field}"
    values = setting.value if isinstance(setting.value, list) else [setting.value]
    if str(values[0]).startswith("-"):
        return f"--{name}={shlex.quote(str(values[0]))}"
    return f"--{name} {shlex.join(map(str, values))}"


def format_for_shell(error: TransformerJaxError) -> str:
    """Return the error's message, with each setting formatted as a command-line option."""
    return "".join(_format_option(p) if isinstance(p, Setting) else p for p in error.parts)


class PlainConsole(Console):
    """A console that escapes control characters and otherwise prints text unchanged."""

    def __init__(self, *, stderr: bool = False, file: TextIO | None = None) -> None:
        """Print to `file`, which defaults to a standard stream."""
        plain = {"highlight": False, "markup": False, "emoji": False, "soft_wrap": True}
        super().__init__(**plain, stderr=stderr, file=file)
        self.failure: OSError | None = None
        self._lost: int | None = None

    def render_str(self, text: str, **options: Any) -> Text:  # noqa: ANN401 (Rich's options)
        """Escape control characters, and show URLs, in printed strings and in table cells."""
        return super().render_str(escape_control_characters(show_paths(text)), **options)

    def _check_buffer(self) -> None:
        """Write the buffer; on failure, such as a full disk, let the command store its results."""
        try:
            super()._check_buffer()
        except OSError as error:
            if error.errno != errno.EIO and not self.stderr:
                self.failure = error
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        """Discard all further output, so that a command still finishes and stores its results."""
        self.quiet = True
        # Redirect the file to the null device, so that flushing it does not fail again.
        with Path(os.devnull).open("w", encoding="utf-8") as null:
            self._lost = self._lost or os.dup(self.file.fileno())
            os.dup2(null.fileno(), self.file.fileno())

    def recover(self) -> None:
        """Forget a failure, so that the next command in this process prints again."""
        self.failure = None
        if self._lost is not None:
            if not self.file.closed:
                # Discard what could not be written.
                super()._check_buffer()
                self.file.flush()
                os.dup2(self._lost, self.file.fileno())
            os.close(self._lost)
            self.quiet, self._lost = False, None


# Results go to standard output; notes, progress, and errors go to standard error.
stdout = PlainConsole()
stderr = PlainConsole(stderr=True)


def clear_progress_bar() -> None:
    """Erase a progress bar that a terminated process left visible, and show the cursor again."""
    erase = Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2))
    for console in (stdout, stderr):
        if console.show_cursor():
            console.control(erase)


def _is_from_ctrl_c(error: BaseException | None) -> bool:
    """Return whether Ctrl-C caused an error, even if a library raised a different exception."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def message_and_exit_code(error: BaseException) -> tuple[str, int] | None:
    """Return an error's one-line message and exit code, or None if the error is a bug."""
    line = f"transformer-jax: {error}"
    match error:
        case RunInterrupted():
            return line, error.exit_code
        case _ if _is_from_ctrl_c(error):
            return "", 128 + signal.SIGINT
        case TransformerJaxError():
            return f"transformer-jax: {format_for_shell(error)}", error.exit_code
        case ValueError() if found := INVALID_SETTING.search(str(error)):
            # JAX checks its environment variables when it is imported.
            advice = f"correct or unset {found[1].upper()}"
            return f"transformer-jax: JAX cannot start: {error}: {advice}", BackendError.exit_code
        case MemoryError():
            return "transformer-jax: this machine is out of memory", OutOfMemoryError.exit_code
        case FileNotFoundError(filename=str(path)):
            line = f"transformer-jax: {path} does not exist: it may have been moved or deleted"
            return line, StorageError.exit_code
        case OSError():
            # This error was not converted to a more specific error.
            return line, StorageError.exit_code
    return None


def use_utf8() -> None:
    """Restart this process in Python's UTF-8 mode if the locale uses a different encoding.

    Otherwise, Python and libraries would use the locale's encoding for the names of files, standard
    streams, and the contents of some files. Child processes inherit the mode.
    """
    encodings = {sys.getfilesystemencoding(), locale.getencoding()}
    is_utf8 = {name.replace("-", "").lower() for name in encodings} == {"utf8"}
    if not is_utf8 and not sys.flags.utf8_mode and os.environ.get("PYTHONUTF8") != "1":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])  # noqa: S606


def hide_late_errors() -> None:
    """Hide TensorStore's errors about a closed event loop; the error that closed it is reported."""
    sys.unraisablehook = lambda error: (
        None if "Event loop is closed" in str(error.exc_value) else sys.__unraisablehook__(error)
    )


def _prepare_streams() -> None:
    """Make sure that any text can be printed to the standard streams."""
    # If the shell closed a stream, as with `<&-`, Python sets the stream to None. `run_and_report`
    # closes stderr after a broken pipe. Without a replacement, the next file that the process opens
    # would get the stream's file descriptor, and libraries would print to that file.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None or (name == "stderr" and sys.stderr.closed):
            # Escape characters that the encoding cannot represent, as Python's own stderr does.
            errors = "backslashreplace"
            null = Path(os.devnull)
            stream = null.open(mode, encoding="utf-8", errors=errors)
            setattr(sys, name, stream)
    # Escape characters that the locale's encoding cannot represent. By default, only stderr escapes
    # such characters.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def _stop_on_signals() -> Iterator[None]:
    """Convert signals to exceptions, so that a command removes unfinished files and reports why.

    During an import, a signal ends the process immediately: an exception during the import of
    jaxlib would make jaxlib crash or print a traceback.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        reason = f"{signal.Signals(number).name}: stopped; run the same command again"
        while frame is not None:
            if frame.f_code.co_filename.startswith("<frozen importlib"):
                stderr.show_cursor()
                if number != signal.SIGINT:
                    stderr.print(f"transformer-jax: {reason}")
                    os._exit(RunInterrupted.exit_code)
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            frame = frame.f_back
        raise KeyboardInterrupt if number == signal.SIGINT else RunInterrupted(reason)

    # If the calling program has set its own handler, keep that handler.
    defaults = (signal.default_int_handler, signal.SIG_DFL)
    with handle_signals(handle, [x for x in STOP_SIGNALS if signal.getsignal(x) in defaults]):
        yield


@contextlib.contextmanager
def _print_notes() -> Iterator[None]:
    printed = set[str]()
    with warnings.catch_warnings():
        show_other = warnings.showwarning

        def show(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if failure := CACHE_FAILURE.match(str(message)):
                # JAX issues a warning for each program.
                message, category = f"{CACHE_ADVICE}: {failure[1]}", Note
            if issubclass(category, Note):
                if str(message) not in printed:
                    stderr.print(one_line(f"note: {message}"))
                printed.add(str(message))
            else:
                if CONTROL_CHARACTERS.search(str(message)):
                    message = escape_control_characters(str(message))
                show_other(message, category, filename, lineno, file, line)

        warnings.showwarning = show
        warnings.simplefilter("always", Note)
        yield


def run_and_report(run: Callable[[], object]) -> int:
    """Run a function and return an exit code. Print any error as a one-line message."""
    _prepare_streams()
    try:
        with _print_notes(), _stop_on_signals():
            run()
        if stdout.failure is not None:
            reason = stdout.failure.strerror
            raise StorageError(f"standard output could not be written: {reason}")
    except BrokenPipeError:
        # The program that reads the output has exited. Close stderr, because Python would otherwise
        # print another error at exit.
        sys.stderr.close()
        return 1
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException as error:
        report = message_and_exit_code(error)
        if report is None:
            raise
        line, code = report
        try:
            Path.cwd()
        except FileNotFoundError:
            line = line and f"{line}; the working directory was deleted"
        # If a supervised trainer was killed, its progress bar is still visible.
        clear_progress_bar()
        if line:
            stderr.print(one_line(line))
        return code
    finally:
        for console in (stdout, stderr):
            console.recover()
    return 0


@contextlib.contextmanager
def progress_bar() -> Iterator[None]:
    """Show a progress bar for each activity or, outside a terminal, print its name once."""
    # Descriptions can contain file names, in which Rich would interpret brackets as markup.
    description = TextColumn("{task.description}", markup=False)
    columns = (description, BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    is_shown = stderr.is_terminal
    with Progress(*columns, console=stderr, transient=True, disable=not is_shown) as bar:
        tasks: dict[str, TaskID] = {}

        def show(activity: str, done: int, total: int) -> None:
            if activity not in tasks:
                tasks[activity] = bar.add_task(one_line(activity))
                if bar.disable:
                    stderr.print(one_line(f"{activity} ..."))
            bar.update(tasks[activity], completed=done, total=total or None)

        with report_to(show):
            yield
