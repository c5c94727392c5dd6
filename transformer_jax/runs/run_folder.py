"""A run's folder, which is self-contained, holds only data, and is never overwritten.

The folder contains:

    run.json           format, resolved config, digests of the vocabulary and data, versions, and
                       the devices and settings that the run was created with
    tokenizer.model    the vocabulary (see `tokenizer_files` for other files of the vocabulary)
    checkpoints/       one folder for each checkpoint
    lock               identifies the process that is training or last trained the run
    metrics.jsonl      one line of JSON for each report
    tensorboard/       the same reports as TensorBoard events
    trackers.json      the IDs that other trackers assigned to the run, if it uses any
    profile/           profiler traces of some steps, if train.profile is positive
    samples/           translations of development sentences, one file per evaluation
    evaluations/       hypotheses, references, and scores, one folder per evaluation
    ensembles/         the same for ensembles of this run and other runs

A packaged run has a single checkpoint without optimizer state, plus README.md and SHA256SUMS.
"""

import contextlib
import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Self, get_args

from transformer_jax import files
from transformer_jax.config import Config
from transformer_jax.config.validation import ON_RESUME, annotations, marked
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
from transformer_jax.files import (
    INVALID_JSON,
    MAX_VOCABULARY_BYTES,
    JsonObject,
    check_no_links,
    is_file,
    is_stray,
    new_folder,
    read_json,
    read_json_if_valid,
    read_limited,
    write_json,
)
from transformer_jax.progress import note
from transformer_jax.registry import check_registered, describe_foreign
from transformer_jax.runs import FORMAT, checksums
from transformer_jax.runs.lock import describe_holder
from transformer_jax.runs.tokenizer_files import read_vocabulary, write_vocabulary
from transformer_jax.runs.versions import current_versions

if TYPE_CHECKING:
    from transformer_jax.data.prepare import Prepared

MUTABLE_ON_RESUME = {
    f"{section}.{key}"
    for section, (section_type, _) in annotations(Config).items()
    for key in marked(section_type, ON_RESUME)
}
Dtype = Literal["float32", "bfloat16"]
# The key of `RunFolder.init_from` in the versions.
INITIAL = "initial parameters"
# The start of the fingerprint of a run whose text is not known.
IMPORTED = "imported-"


class Package(NamedTuple):
    """How a run was packaged. The parameters are the mean of the checkpoints at `steps`."""

    steps: tuple[int, ...]
    dtype: Dtype
    """The dtype in which the parameters are stored. `model.dtype` is that of computations."""

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
    """How the run was packaged, or None if training can resume."""
    group: int = 1
    """The largest number of runs, including this one, that were trained together in one program."""
    init_from: str = ""
    """A description of the parameters that the run began with, or "" if they were random."""

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
        environment: Mapping[str, str] | None = None,
    ) -> "RunFolder":
        """Create a run without checkpoints."""
        with cls.build(path, config, vocabulary, fingerprint, environment=environment) as run:
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
        environment: Mapping[str, str] | None = None,
        init_from: str = "",
    ) -> Iterator["RunFolder"]:
        """Yield a new run in a private folder, and rename the folder to `path` on exit.

        `environment` is the value of `backend.describe_environment` for a run that will be trained.
        If the body of the `with` statement raises an error, the folder is deleted.
        """
        folder = new_folder(path, _advise) if package is None else new_folder(path)
        with folder as private:
            run = cls(private, config, vocabulary, fingerprint, package, init_from=init_from)
            write_vocabulary(run.path, vocabulary)
            run._write_description(versions or current_versions(), {"environment": environment})
            yield run

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        """Read a run from disk, without executing any code in the folder."""
        description = path / "run.json"
        if not is_file(description):
            raise UsageError(f"{path} is not a run: it has no run.json")
        try:
            check_no_links(path)
            data = read_json(description)
            if int(data["format"]) != FORMAT:
                raise UsageError(
                    f"{path} has format {data['format']}, but this version of transformer-jax "
                    f"reads only format {FORMAT}"
                )
            check_registered(path, _read_parts(data))
            config = Config.from_dict(data["config"])
            vocabulary = read_vocabulary(path, data)
            package = Package.from_dict(data["package"]) if "package" in data else None
            fingerprint, group = str(data["data"]["fingerprint"]), int(data.get("group", 1))
            init_from = str(data.get("init_from", ""))
            return cls(path, config, vocabulary, fingerprint, package, group, init_from)
        except KeyError as error:
            raise StorageError(f"{description} has no {error}") from error
        except OSError as error:
            raise StorageError(
                f"{error.filename or description} cannot be read: {error.strerror or error}"
            ) from error
        except (AttributeError, *INVALID_JSON, ConfigError, DataError) as error:
            raise StorageError(f"{description} cannot be read: {error}") from error

    @property
    def steps_done(self) -> int:
        """The step of the latest checkpoint, or 0 if there is no checkpoint."""
        names = (entry.name for entry in self.checkpoints.glob("*"))
        # Use a pattern, because str.isdigit accepts characters such as "²".
        return max((int(name) for name in names if re.fullmatch("[0-9]+", name)), default=0)

    def find_text(self) -> "Prepared":
        """Return the run's prepared text, which is encoded again if it is not in the cache."""
        # Commands open runs before they import the libraries that read text.
        from transformer_jax.data.prepare import find_prepared

        return find_prepared(self.config.data, self.vocabulary, self.fingerprint)

    @property
    def versions(self) -> dict[str, str]:
        """The run's software versions, and the digests of its vocabulary, data, and start."""
        start = {INITIAL: self.init_from} if self.init_from else {}
        return {**self.software_versions, **self._digests, **start}

    @property
    def changed_files(self) -> list[str]:
        """A message for each file of registered parts that has changed since the run began."""
        recorded = _read_parts(self._read_description())
        parts: dict[tuple[str, str, str], list[str]] = {}
        for field, now in describe_foreign(self.config.parts()).items():
            part = recorded.get(field, {})
            if "sha256" in now and "sha256" in part and now["sha256"] != part["sha256"]:
                key = (part["file"], part["sha256"][:12], now["sha256"][:12])
                parts.setdefault(key, []).append(f"{field} {part['name']}")
        return [
            f"{file}, which defines {' and '.join(names)}, has changed since {self.path} was "
            f"created: sha256 {before} -> {after}"
            for (file, before, after), names in parts.items()
        ]

    @property
    def software_versions(self) -> dict[str, str]:
        """The versions of the software that created the run or last changed its config."""
        return self._read_strings("versions")

    @property
    def environment(self) -> dict[str, str]:
        """The devices and settings of the process that created the run."""
        return self._read_strings("environment")

    def _read_strings(self, name: str) -> dict[str, str]:
        stored = self._read_description().get(name)
        return {k: str(x) for k, x in stored.items()} if isinstance(stored, dict) else {}

    @property
    def cpu_threads(self) -> int | None:
        """The number of CPU threads that the run was created with, or None if it is unknown."""
        value = self.environment.get("cpu_threads", "")
        return int(value) if re.fullmatch("[1-9][0-9]{0,3}", value) else None

    def _read_description(self) -> JsonObject:
        return read_json(self.path / "run.json")

    @property
    def identity(self) -> dict[str, object]:
        """The config fields and digests that a checkpoint must share with its run."""
        values = self.config.by_field().items()
        return {k: x for k, x in values if k not in MUTABLE_ON_RESUME} | self._digests

    @property
    def _digests(self) -> dict[str, str]:
        tokenizers = self.vocabulary.tokenizers.items()
        return {**{name: t.digest for name, t in tokenizers}, "data": self.fingerprint}

    def with_config(self, config: Config) -> "RunFolder":
        """Return a copy with a different config, which `store` writes to disk."""
        if self.package is not None:
            raise UsageError(
                f"{self.path} is packaged without optimizer state and cannot resume: to train "
                "from its parameters, start a new run with ",
                Setting("init_from", str(self.path)),
            )
        changes = [
            f"{section}.{key} {before!r} -> {after!r}"
            for (section, key), (before, after) in self.config.differences(config).items()
            if f"{section}.{key}" not in MUTABLE_ON_RESUME
        ]
        if changes:
            raise ConfigError(f"{self.path} cannot resume with changes in {', '.join(changes)}")
        train = self.config.train
        if train.schedule_depends_on_steps and config.train.steps != train.steps:
            raise ConfigError(
                f"{self.path} cannot resume with a different train.steps, because its "
                f"train.schedule, {train.schedule}, ends at step {train.steps}: set "
                "train.decay_steps in new runs, so that they can stop earlier and resume"
            )
        if config.train.steps < self.steps_done:
            rule = f"at least {self.steps_done}, the number of steps that {self.path} has completed"
            raise ConfigError.from_field("train.steps", rule, config.train.steps)
        return replace(self, config=config)

    def store(self) -> None:
        """Write the config and `group` to disk if either has changed."""
        with storage_errors(f"{self.path} cannot be written"):
            stored = RunFolder.open(self.path)
            if (stored.config, stored.group) != (self.config, self.group):
                self._write_description(current_versions(), self._read_description())

    def _write_description(self, versions: Mapping[str, str], recorded: JsonObject) -> None:
        """Write run.json; keep the parts and the environment that were recorded at creation."""
        parts, environment = describe_foreign(self.config.parts()), recorded.get("environment")
        parts = {**parts, **{x: y for x, y in _read_parts(recorded).items() if x in parts}}
        description = {
            "format": FORMAT,
            "config": self.config.to_dict(),
            **self.vocabulary.describe(),
            "data": {"fingerprint": self.fingerprint},
            "versions": versions,
            **({"environment": environment} if environment else {}),
            **({"parts": parts} if parts else {}),
            **({"group": self.group} if self.group > 1 else {}),
            **({"init_from": self.init_from} if self.init_from else {}),
            **({} if self.package is None else {"package": self.package._asdict()}),
        }
        write_json(self.path / "run.json", description)


def evaluation_folders(run: Path, split: str = "") -> list[Path]:
    """Return the folders of a run's stored evaluations, in alphabetical order."""
    files = sorted(run.glob(f"evaluations/{split}*/scores.json"))
    return [file.parent for file in files if not is_stray(file.parent.name)]


def read_scores(folder: Path) -> JsonObject:
    """Return an evaluation's scores, or {} if they are missing, damaged, or for different texts.

    An evaluation that is interrupted while it replaces another one leaves the old scores.
    """
    scores = read_json_if_valid(folder / "scores.json")
    digests = scores.get("files")
    if not isinstance(digests, dict):
        return scores
    for path in folder.glob("*.txt"):
        if path.name not in digests:
            continue
        try:
            digest = hashlib.sha256(read_limited(path, MAX_VOCABULARY_BYTES)).hexdigest()
        except (OSError, StorageError):
            digest = None
        if digest != digests[path.name]:
            note(f"{path} has changed since it was written: evaluate again")
            return {}
    return scores


def _read_parts(description: JsonObject) -> dict[str, dict[str, str]]:
    """Return the parts from outside this package that a run uses, keyed by field."""
    return {
        field: {key: str(value) for key, value in part.items()}
        for field, part in description.get("parts", {}).items()
    }


def check_available(path: Path) -> None:
    """Raise a UsageError or StorageError if a run cannot be created at this path."""
    files.check_available(path, _advise)


def _advise(path: Path) -> str:
    """Return advice for a user who wants to create a run at a path that already exists."""
    advice = ""
    if holder := describe_holder(path):
        advice = f"it is being trained {holder}; "
    # A folder with a checksum file is a package, and training cannot resume from it.
    elif (path / "run.json").exists() and not (path / checksums.NAME).exists():
        advice = f"resume it with `{shell_command('resume', path)}`, or "
    return f"{advice}start another run"
