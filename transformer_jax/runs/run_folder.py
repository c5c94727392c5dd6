"""A run's folder, which is self-contained, holds only data, and is never overwritten.

The folder contains:

    run.json           format, resolved config, digests of the vocabulary and data, and versions
    tokenizer.model    the vocabulary (see `tokenizer_files` for other files of the vocabulary)
    checkpoints/       one folder for each checkpoint
    lock               identifies the process that is training or last trained the run
    metrics.jsonl      one line of JSON for each report
    tensorboard/       the same reports as TensorBoard events
    profile/           profiler traces of some steps, if train.profile is positive
    samples/           translations of development sentences, one file per evaluation
    evaluations/       hypotheses, references, and scores, one folder per evaluation

A packaged run has a single checkpoint without optimizer state, plus README.md and SHA256SUMS.
"""

import contextlib
import itertools
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple, Self, get_args

from transformer_jax.config import Config, DecodeConfig
from transformer_jax.console import shell_command
from transformer_jax.data.tokenizer import Vocabulary
from transformer_jax.errors import (
    ConfigError,
    DataError,
    Setting,
    StorageError,
    UsageError,
    storage_errors,
)
from transformer_jax.json_types import INVALID_JSON, JsonObject
from transformer_jax.runs import FORMAT, checksums
from transformer_jax.runs.atomic_files import write_json
from transformer_jax.runs.lock import describe_holder
from transformer_jax.runs.tokenizer_files import read_limited, read_vocabulary, write_vocabulary
from transformer_jax.runs.versions import current_versions

# The size limit for run.json, in bytes. A larger file may be malicious, so it is rejected without
# being read.
MAX_DESCRIPTION = 1 << 20
# Fields that may change when a run resumes. A change to any other field would make the run a
# different experiment. Gradient accumulation and parallelism affect only the dropout masks.
MUTABLE_ON_RESUME = {
    "model": {"remat"},
    # The text files may move, but their fingerprint must not change.
    "data": {"train", "dev", "test", "folder", "bleu_tokenizer"},
    "train": {
        *("steps", "patience", "bleu_every", "gradient_accumulation_steps", "parallelism"),
        *("checkpoint_every", "checkpoint_unit", "keep_checkpoints"),
        *("max_minutes_between_checkpoints", "log_every", "profile"),
    },
    "decode": set(DecodeConfig.__dataclass_fields__),
}

Dtype = Literal["float32", "bfloat16"]


class Package(NamedTuple):
    """How a run was packaged. Its parameters are the mean of the checkpoints at `steps`."""

    steps: tuple[int, ...]
    dtype: Dtype
    """The dtype in which the parameters are stored. Computations use float32."""

    @classmethod
    def from_dict(cls, data: JsonObject) -> Self:
        """Convert the output of `_asdict` back to a package."""
        steps = tuple(map(int, data["steps"]))
        if not steps or data["dtype"] not in get_args(Dtype):
            raise ValueError(f"invalid package: {data}")
        return cls(steps, data["dtype"])


@dataclass(frozen=True)
class RunFolder:
    """A run on disk. `fingerprint` is the digest of the run's prepared text."""

    path: Path
    config: Config
    vocabulary: Vocabulary
    fingerprint: str
    package: Package | None = None
    """How the run was packaged, or None if it is not packaged. Training cannot resume from a
    packaged run."""

    @property
    def checkpoints(self) -> Path:
        """The path to the checkpoint folder."""
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        """The path to the metrics file."""
        return self.path / "metrics.jsonl"

    @classmethod
    def create(
        cls,
        path: Path,
        config: Config,
        vocabulary: Vocabulary,
        fingerprint: str,
    ) -> "RunFolder":
        """Create a run without checkpoints. See `build` for the errors that this method raises."""
        with cls.build(path, config, vocabulary, fingerprint) as run:
            pass
        return replace(run, path=path)

    @classmethod
    @contextlib.contextmanager
    def build(
        cls,
        path: Path,
        config: Config,
        vocabulary: Vocabulary,
        fingerprint: str,
        *,
        package: Package | None = None,
        versions: Mapping[str, str] | None = None,
    ) -> Iterator["RunFolder"]:
        """Yield a new run in a private folder, and rename the folder to `path` on exit.

        If the body of the `with` statement raises an error, the folder is deleted.

        Raises:
            UsageError: the path is not UTF-8, or it exists and is not an empty folder. An existing
                path is left unchanged.
            StorageError: the folder cannot be written.
        """
        with new_folder(path, is_package=package is not None) as private:
            run = cls(private, config, vocabulary, fingerprint, package)
            write_vocabulary(run.path, vocabulary)
            run._write_description(versions or current_versions())
            yield run

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        """Read a run from disk, without executing any code in the folder.

        Raises:
            UsageError: the path is not a run folder, or the run has a different format version.
            StorageError: the run cannot be read, or its files are inconsistent.
        """
        description = path / "run.json"
        # If the name is too long, os.path.isfile returns False, but Path.is_file raises an error.
        if not os.path.isfile(description):  # noqa: PTH113
            raise UsageError(f"{path} is not a run: it has no run.json")
        try:
            check_no_links(path)
            data = json.loads(read_limited(description, MAX_DESCRIPTION))
            if int(data["format"]) != FORMAT:
                raise UsageError(
                    f"{path} has format {data['format']}, but this version of transformer-jax "
                    f"reads only format {FORMAT}"
                )
            config = Config.from_dict(data["config"])
            vocabulary = read_vocabulary(path, data)
            package = Package.from_dict(data["package"]) if "package" in data else None
            return cls(path, config, vocabulary, str(data["data"]["fingerprint"]), package)
        except KeyError as error:
            raise StorageError(f"{description} has no {error}") from error
        except (OSError, *INVALID_JSON, ConfigError, DataError) as error:
            raise StorageError(f"{description} cannot be read: {error}") from error

    @property
    def steps_done(self) -> int:
        """The step of the latest checkpoint, or 0 if there is no checkpoint."""
        names = (entry.name for entry in self.checkpoints.glob("*"))
        # Use a pattern, because str.isdigit accepts characters such as "²".
        return max((int(name) for name in names if re.fullmatch("[0-9]+", name)), default=0)

    @property
    def versions(self) -> dict[str, str]:
        """The run's software versions, and the digests of its vocabulary and data."""
        return {**self.software_versions, **self._digests}

    @property
    def software_versions(self) -> dict[str, str]:
        """The versions of the software that created the run or last changed its config."""
        stored = json.loads(read_limited(self.path / "run.json", MAX_DESCRIPTION)).get("versions")
        versions = stored.items() if isinstance(stored, dict) else ()
        return {name: str(version) for name, version in versions}

    @property
    def identity(self) -> dict[str, object]:
        """The config fields and digests that a checkpoint must share with its run."""
        fields = {
            f"{section}.{key}": value
            for section, fields in self.config.to_dict().items()
            for key, value in fields.items()
            if key not in MUTABLE_ON_RESUME[section]
        }
        return {**fields, **self._digests}

    @property
    def _digests(self) -> dict[str, str]:
        tokenizers = self.vocabulary.tokenizers.items()
        return {**{name: t.digest for name, t in tokenizers}, "data": self.fingerprint}

    def with_config(self, config: Config) -> "RunFolder":
        """Return a copy of this object with a different config.

        Call `store` to write the config to disk.

        Raises:
            ConfigError: a field that must not change differs, or the run is past the new
                `train.steps`.
            UsageError: the run is packaged.
        """
        if self.package is not None:
            raise UsageError(
                f"{self.path} is packaged without optimizer state and cannot resume: to train "
                "from its parameters, start a new run with ",
                Setting("init_from", str(self.path)),
            )
        changes = [
            f"{section}.{key} {before!r} -> {after!r}"
            for (section, key), (before, after) in self.config.differences(config).items()
            if key not in MUTABLE_ON_RESUME[section]
        ]
        if changes:
            raise ConfigError(f"{self.path} cannot resume with changes in {', '.join(changes)}")
        if config.train.steps < self.steps_done:
            rule = f"at least {self.steps_done}, the number of steps that {self.path} has done"
            raise ConfigError.from_field("train.steps", rule, config.train.steps)
        return replace(self, config=config)

    def store(self) -> None:
        """Write the config to disk if it has changed."""
        with storage_errors(f"{self.path} cannot be written"):
            if RunFolder.open(self.path).config != self.config:
                self._write_description(current_versions())

    def _write_description(self, versions: Mapping[str, str]) -> None:
        description = {
            "format": FORMAT,
            "config": self.config.to_dict(),
            **self.vocabulary.describe(),
            "data": {"fingerprint": self.fingerprint},
            "versions": versions,
            **({} if self.package is None else {"package": self.package._asdict()}),
        }
        write_json(self.path / "run.json", description)


@contextlib.contextmanager
def new_folder(path: Path, *, is_package: bool = True) -> Iterator[Path]:
    """Yield a private folder, and rename it to `path` once it is complete.

    Raises:
        UsageError: the path is not UTF-8, or it exists and is not an empty folder. An existing path
            is left unchanged.
        StorageError: the folder cannot be written.
    """
    check_available(path, is_package=is_package)
    with storage_errors(f"{path} could not be written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix=f".{path.name}-", dir=path.parent, ignore_cleanup_errors=True
        ) as private:
            # A temporary folder is private, but its subfolder has ordinary permissions.
            folder = Path(private) / "new"
            folder.mkdir()
            yield folder
            try:
                folder.rename(path)
            except OSError:
                # Another process may have created the folder in the meantime.
                check_available(path, is_package=is_package)
                raise


def check_available(path: Path, *, is_package: bool = False) -> None:
    """Raise a UsageError or StorageError if a run or package cannot be created at this path."""
    try:
        # TensorBoard and Orbax reject a path that is not UTF-8, but only after the run is created.
        str(path).encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"the path {path} is not UTF-8: choose another one") from error
    with storage_errors(f"{path} cannot be read"):
        if not path.exists() or (path.is_dir() and not any(path.iterdir())):
            parent = next(parent for parent in path.absolute().parents if parent.exists())
            if not (parent.is_dir() and os.access(parent, os.W_OK)):
                raise StorageError(f"{path} cannot be created: {parent} is not writable")
            return
    # Resolve paths such as "." and "..", because they have no name to append a number to.
    base = path if path.name not in ("", "..") else path.resolve()
    others = (base.with_name(f"{base.name}-{count}") for count in itertools.count(2))
    other = next(other for other in others if not other.exists())
    advice = ""
    if holder := describe_holder(path):
        advice = f"it is being trained {holder}; "
    # A folder with a checksum file is a package, and training cannot resume from it.
    elif not is_package and (path / "run.json").exists() and not (path / checksums.NAME).exists():
        advice = f"resume it with `{shell_command('resume', path)}`, or "
    action = "choose another folder" if is_package else "start another run"
    start = f"{path} already exists: {advice}{action} with `"
    raise UsageError(start, Setting("out", str(other)), "`")


def check_no_links(folder: Path) -> None:
    """Raise a StorageError for a link or special file, which could redirect reads and writes."""
    folders = [str(folder)]
    while folders:
        # Ignore files that disappear during the check, because training may still be in progress.
        with contextlib.suppress(FileNotFoundError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif not entry.is_file(follow_symlinks=False) and os.path.lexists(entry.path):
                    raise StorageError(
                        f"{entry.path} is a link or a special file, which this folder must not "
                        "contain (`cp -rL` copies the files that links point to)"
                    )
