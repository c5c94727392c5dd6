"""The folder of a run: self-contained, data only, never overwritten.

run.json        format, resolved config, vocabulary and data hashes, versions
tokenizer.model the vocabulary, a SentencePiece file; tokenizer.source.model too, if separate
checkpoints/    a folder for each step that is kept
lock            who trains it, or did last
metrics.jsonl   a line of JSON for each report
tensorboard/    the same as events
profile/        traces of some steps, where train.profile asks for them
samples/        translations of development sentences, a file for each scored step
evaluations/    hypotheses, references and scores, of each sentence and of all: a folder for each
"""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any, Literal

from transformer_jax.config import Config, DecodeConfig
from transformer_jax.console import shell_command
from transformer_jax.data.tokenizer import Tokenizer, Vocabulary
from transformer_jax.errors import ConfigError, DataError, StorageError, UsageError
from transformer_jax.runs.lock import trainer

FORMAT = 2
# In bytes: what claims to be longer is none of ours, and is not read.
MAX_DESCRIPTION = 1 << 20
MAX_TOKENIZER = 256 << 20
MAX_LINE = 1 << 20
VERSIONS = (
    "flax",
    "jax",
    "jaxlib",
    "num2words",
    "numpy",
    "optax",
    "orbax-checkpoint",
    "sentencepiece",
    "transformer-jax",
)
TOKENIZERS = {"vocabulary": "tokenizer.model", "source_vocabulary": "tokenizer.source.model"}
# What may change when a run goes on; all else would make it another experiment. (Micro-batches
# draw their own dropout masks, and some ways of parallelism too: the same experiment, not the
# same bits.)
MUTABLE_ON_RESUME = {
    "model": {"remat"},
    # Wherever the text lies now, its fingerprint must be the same.
    "data": {"train", "dev", "test", "folder", "bleu_tokenizer"},
    "train": {
        "steps",
        "gradient_accumulation_steps",
        "parallelism",
        "checkpoint_every",
        "checkpoint_unit",
        "bleu_every",
        "patience",
        "keep_checkpoints",
        "max_minutes_between_checkpoints",
        "log_every",
        "profile",
    },
    "decode": set(DecodeConfig.__dataclass_fields__),
}


@dataclass(frozen=True)
class RunDirectory:
    """A run on disk, read by `open` or made by `create`."""

    path: Path
    config: Config
    vocabulary: Vocabulary
    fingerprint: str
    """Of the data that the run was trained on."""

    @property
    def checkpoints(self) -> Path:
        """Where the checkpoints lie."""
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        """The file of reports."""
        return self.path / "metrics.jsonl"

    @classmethod
    def create(
        cls,
        path: Path,
        config: Config,
        vocabulary: Vocabulary,
        fingerprint: str,
        fill: Callable[["RunDirectory"], None] = lambda _: None,
    ) -> "RunDirectory":
        """Make the folder, which appears at once with all that a run needs to go on.

        `fill` may write more into it before anyone sees it.

        Raises:
            UsageError: something is there already; nothing of it is touched.
            StorageError: it cannot be written.
        """
        check_available(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
            try:
                # mkdtemp's folders are private; a run is like any other folder.
                temporary.chmod(0o777 & ~_umask())
                for name, tokenizer in vocabulary.tokenizers.items():
                    (temporary / TOKENIZERS[name]).write_bytes(tokenizer.model)
                folder = cls(temporary, config, vocabulary, fingerprint)
                folder._write_description()
                fill(folder)
                temporary.rename(path)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
        except OSError as error:
            # Someone else may have made it meanwhile.
            check_available(path)
            raise StorageError(f"the run {path} could not be written: {error}") from error
        return cls(path, config, vocabulary, fingerprint)

    @classmethod
    def open(cls, path: Path) -> "RunDirectory":
        """Read the description of a run. Nothing in the folder is executed.

        Raises:
            UsageError: it is no run, or of a later format.
            StorageError: it cannot be read, or its parts do not belong together.
        """
        description = path / "run.json"
        # Path's own raises where a name is too long to be one.
        if not os.path.isfile(description):  # noqa: PTH113
            raise UsageError(f"{path} is no run: it has no run.json")
        try:
            _check_no_links(path)
            data = json.loads(_read(description, MAX_DESCRIPTION))
            if data["format"] + 0 != FORMAT:
                raise UsageError(
                    f"{path} has format {data['format']}, of another version of this program: "
                    f"this one reads {FORMAT}"
                )
            config = Config.from_dict(data["config"])
            target = _tokenizer(path, data, "vocabulary")
            own = "source_vocabulary"
            source = _tokenizer(path, data, own) if own in data else target
            vocabulary = Vocabulary(source, target)
            return cls(path, config, vocabulary, str(data["data"]["fingerprint"]))
        except KeyError as error:
            raise StorageError(f"{description} has no {error}") from error
        except (OSError, ValueError, TypeError, RecursionError, ConfigError, DataError) as error:
            raise StorageError(f"{description} cannot be read: {error}") from error

    @property
    def steps_done(self) -> int:
        """Steps of the newest checkpoint; 0 where there is none."""
        names = [entry.name for entry in self.checkpoints.glob("*")]
        # As a digit of ours: "²" is one to Python.
        return max((int(name) for name in names if re.fullmatch("[0-9]+", name)), default=0)

    @property
    def versions(self) -> dict[str, str]:
        """The versions that the run was begun with, the vocabulary and the data, by name."""
        stored = json.loads(_read(self.path / "run.json", MAX_DESCRIPTION)).get("versions")
        return {
            **({k: str(v) for k, v in stored.items()} if isinstance(stored, dict) else {}),
            **self._data,
        }

    @property
    def identity(self) -> dict[str, Any]:
        """All that a checkpoint must have in common with its run, by name."""
        return {
            **{
                f"{section}.{key}": value
                for section, fields in self.config.to_dict().items()
                for key, value in fields.items()
                if key not in MUTABLE_ON_RESUME[section]
            },
            **self._data,
        }

    @property
    def _data(self) -> dict[str, str]:
        parts = {name: part.digest for name, part in self.vocabulary.tokenizers.items()}
        return {**parts, "data": self.fingerprint}

    def with_config(self, config: Config) -> "RunDirectory":
        """Return the run with another config; `store` keeps it.

        Raises:
            ConfigError: a field would make it another experiment (all such are told), or its
                steps are fewer than have been done.
        """
        changes = [
            f"{section}.{key} {before!r} -> {after!r}"
            for (section, key), (before, after) in self.config.differences(config).items()
            if key not in MUTABLE_ON_RESUME[section]
        ]
        if changes:
            raise ConfigError(f"{self.path} cannot go on with another {', '.join(changes)}")
        if config.train.steps < self.steps_done:
            raise ConfigError(
                f"train.steps must be at least {self.steps_done}, which {self.path} has done, "
                f"got {config.train.steps}"
            )
        return replace(self, config=config)

    def store(self) -> None:
        """Keep the config that the run goes on with.

        Raises:
            StorageError: it cannot be written.
        """
        try:
            if RunDirectory.open(self.path).config != self.config:
                self._write_description()
        except OSError as error:
            raise StorageError(f"{self.path} cannot be written: {error.strerror}") from error

    def _write_description(self) -> None:
        description = {
            "format": FORMAT,
            "config": self.config.to_dict(),
            **self.vocabulary.describe(),
            "data": {"fingerprint": self.fingerprint},
            "versions": installed_versions(),
        }
        write_json(self.path / "run.json", description)

    def truncate_metrics(self, step: int, every: Mapping[str, int]) -> None:
        """Forget reports of later steps, which will be made again, and an end's off schedule.

        What is no report is forgotten too, where none that is kept follows: a power cut leaves
        half a line, or zeros.

        Args:
            step: the last one that counts.
            every: how many steps lie between scheduled reports, by what they are of. A run's end
                is reported whatever the schedule: where it goes on, that was no end.

        Raises:
            StorageError: the file cannot be read or written, or what is no report comes before
                one that is kept.
        """
        try:
            if not self.metrics.exists():
                return
            kept: list[str] = []
            broken = 0
            with self.metrics.open("rb") as file:
                pieces = iter(lambda: file.readline(MAX_LINE), b"")
                for number, line in enumerate(pieces, start=1):
                    report = _report(line)
                    if report is None:
                        broken = broken or number
                    elif report[0] > step:
                        continue
                    elif broken:
                        raise StorageError(
                            f"{self.metrics} has no report in line {broken}: take it out to go on"
                        )
                    elif report[0] < step or step % every[report[1]] == 0:
                        kept.append(line.decode())
            _replace(self.metrics, "".join(kept))
        except OSError as error:
            raise StorageError(f"{self.metrics} cannot be trimmed: {error}") from error


def installed_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that make a difference."""
    return {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in VERSIONS},
    }


def _report(line: bytes) -> tuple[int, Literal["train", "dev"]] | None:
    """Return step and split of a line of metrics; None if it is not one of ours, or not whole."""
    try:
        found = json.loads(line.decode())
        step, split = found["step"], found["split"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    is_ours = type(step) is int and split in ("train", "dev") and line.endswith(b"\n")
    return (step, split) if is_ours else None


def _tokenizer(folder: Path, description: dict[str, Any], name: str) -> Tokenizer:
    """Read one that a run keeps, after making sure that it is the run's own."""
    path = folder / TOKENIZERS[name]
    model = _read(path, MAX_TOKENIZER)
    if hashlib.sha256(model).hexdigest() != description[name]["sha256"]:
        raise StorageError(f"{path} is not the run's own vocabulary")
    return Tokenizer.load_untrusted(model, str(path))


def _read(path: Path, most: int) -> bytes:
    if path.stat().st_size > most:
        raise StorageError(f"{path} cannot be right: it has more than {most >> 20} MiB")
    return path.read_bytes()


def _check_no_links(folder: Path) -> None:
    """Refuse what would have us read or write outside of a run that someone else made.

    What is gone by the time it is looked at is no fault: a trainer may be at work.
    """
    folders = [str(folder)]
    while folders:
        with contextlib.suppress(FileNotFoundError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif not entry.is_file(follow_symlinks=False) and os.path.lexists(entry.path):
                    raise StorageError(
                        f"{entry.path} is a link, or no plain file: a run has none (`cp -rL` "
                        f"copies what links stand for)"
                    )


def check_available(path: Path) -> None:
    """Make sure, before any work, that a run's folder can be made and overwrites nothing.

    Raises:
        UsageError: something is there; the message says the two commands that may have been
            meant.
        StorageError: it cannot be written there.
    """
    try:
        if not path.exists() or (path.is_dir() and not any(path.iterdir())):
            home = next(parent for parent in path.absolute().parents if parent.exists())
            if not (home.is_dir() and os.access(home, os.W_OK)):
                raise StorageError(f"{path} cannot be made: {home} cannot be written to")
            return
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error}") from error
    count = 2
    # "." and ".." have no name that a number could be added to.
    place = path if path.name not in ("", "..") else path.resolve()
    while (other := place.with_name(f"{place.name}-{count}")).exists():
        count += 1
    resume = (
        f"go on with it by `{shell_command('resume', path)}`, or "
        if (path / "run.json").exists()
        else ""
    )
    if who := trainer(path):
        resume = f"it is being trained {who}; "
    raise UsageError(
        f"{path} is there already: {resume}start another by `--out {quote(str(other))}`"
    )


def write_json(path: Path, content: Any) -> None:
    """Write JSON so that a reader finds the old content or the new, never half of it."""
    _replace(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
