"""Parallel text from TensorFlow Datasets (TFDS), read without TensorFlow (section 5.1).

TFDS downloads a dataset once, verifies it, and stores it as ArrayRecord files that can be read
without TensorFlow or a network connection. TFDS shuffles the pairs into the same order on every
machine, so line 1 of a TFDS test set is not line 1 of the published file.
"""

import contextlib
import importlib
import locale
import logging
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from transformer_jax.config.validation import did_you_mean
from transformer_jax.data.splits import Split
from transformer_jax.errors import DataError, Setting, StorageError, UsageError
from transformer_jax.files import parse_path

# TFDS has no type annotations. A TFDS builder downloads, stores, and opens a dataset.
Builder = Any
SPLIT_NAMES: dict[Split, str] = {"train": "train", "dev": "validation", "test": "test"}
# The number of pairs to read at a time. Reading pairs one by one takes twenty times as long.
CHUNK_PAIRS = 1024
# Retry an unreachable server for 25 seconds. By default, TFDS retries 10 times, which takes 200
# seconds.
RETRIES = 7
ADVICE = "download the text yourself and train with configs/text.py"


@dataclass(frozen=True)
class TranslationDataset:
    """A TFDS translation dataset, whose validation split is called `dev` here.

    `wmt14_translate/de-en` is the paper's dataset: 4.5 million training pairs, with newstest2013 as
    the dev split and newstest2014 as the test split. `languages` selects the direction. Every
    property and method except `name` downloads the dataset if necessary.
    """

    dataset: str = "wmt14_translate/de-en"
    """The dataset's name: NAME, optionally followed by /CONFIG, :VERSION, or both."""
    languages: tuple[str, str] = ("en", "de")
    folder: Path | str | None = None
    """The TFDS data folder; None means $TFDS_DATA_DIR or ~/tensorflow_datasets."""

    @property
    def name(self) -> str:
        """A human-readable name: the dataset, its version, and the direction."""
        return f"{_name(self._builder)}, {'-'.join(self.languages)}"

    @property
    def identity(self) -> str:
        """The dataset's name and the size of each split."""
        sizes = (
            f"{split} {self.count(split)} pairs of {int(self._info(split).num_bytes)} bytes"
            for split in self.splits
        )
        return ", ".join(["tfds", self.name, *sizes])

    @property
    def splits(self) -> tuple[Split, ...]:
        """The available splits: train, dev, and possibly test."""
        stored = self._prepared.info.splits
        return tuple(split for split, name in SPLIT_NAMES.items() if name in stored)

    def count(self, split: Split) -> int:
        """Return the number of pairs in a split."""
        return self._info(split).num_examples

    def read(self, split: Split, start: int = 0) -> Iterator[tuple[str, str]]:
        """Yield the source and target lines of each pair, starting at pair `start`."""
        source, target = self.languages
        try:
            pairs = self._prepared.as_data_source(SPLIT_NAMES[split])
            for first in range(start, len(pairs), CHUNK_PAIRS):
                chunk = range(first, min(first + CHUNK_PAIRS, len(pairs)))
                for pair in pairs.__getitems__(chunk):
                    yield _line(pair[source]), _line(pair[target])
        # Damaged files cause different exceptions, depending on where the damage is.
        except (OSError, ValueError, IndexError, RuntimeError) as error:
            raise DataError(
                f"{self.name} cannot be read ({_root_cause(error)}): {self._removal_advice}"
            ) from error

    @property
    def _removal_advice(self) -> str:
        return f"remove {self._builder.data_dir} to download it again"

    @cached_property
    def _builder(self) -> Builder:
        """The TFDS builder for this dataset, which must contain both languages."""
        builder = _find_builder(self.dataset, self.folder)
        text = _tfds().features.Text
        features = builder.info.features or {}
        languages = [name for name, feature in features.items() if isinstance(feature, text)]
        if len(set(self.languages) & set(languages)) < 2:
            raise UsageError(
                f"{_name(builder)} has text in {', '.join(languages) or 'no language'}, "
                f"not in {' and '.join(self.languages)} (data.languages)"
            )
        return builder

    @cached_property
    def _prepared(self) -> Builder:
        """The builder for the stored dataset, which has at least a train split and a dev split."""
        builder = self._builder
        _download_and_prepare(builder)
        if not builder.info.splits:
            raise DataError(f"{self.name} is incomplete: {self._removal_advice}")
        for name in (SPLIT_NAMES["train"], SPLIT_NAMES["dev"]):
            if name not in builder.info.splits:
                raise DataError(
                    f"{self.name} has no split {name!r}, which training needs; it has "
                    f"{', '.join(builder.info.splits)}"
                )
        return builder

    def _info(self, split: Split) -> Any:  # noqa: ANN401 (TFDS has no types)
        return self._prepared.info.splits[SPLIT_NAMES[split]]


def _name(builder: Builder) -> str:
    dataset, _, version = builder.info.full_name.rpartition("/")
    return f"{dataset} {version}"


def _line(text: bytes | str) -> str:
    """Return a sentence as one line. TFDS yields bytes, but its mock data contains strings."""
    line = text.decode() if isinstance(text, bytes) else text
    if not isinstance(line, str):
        raise ValueError("a pair has no text")
    return re.sub(r"[\r\n]+", " ", line.strip("\r\n"))


def _tfds() -> ModuleType:
    """Import TFDS and its translation datasets, or raise a UsageError if a package is missing."""
    # If `importlib_resources` or `array_record` is missing, TFDS only logs a traceback and
    # continues. Importing `translate` registers the translation datasets.
    for module in ("importlib_resources", "array_record", "tensorflow_datasets.translate"):
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise UsageError(
                f"data.corpus tfds needs {(error.name or module).split('.')[0]}: "
                "pip install tensorflow-datasets array_record importlib_resources"
            ) from error
    return importlib.import_module("tensorflow_datasets")


def _find_builder(dataset: str, folder: Path | str | None) -> Builder:
    """Return the TFDS builder for a dataset, without downloading anything."""
    # Accept only dataset names, because TFDS itself would also parse builder arguments and
    # community namespaces.
    match = re.fullmatch(r"(\w+)(?:/([\w.+-]+))?(?::([\d.]+))?", dataset)
    if not match:
        raise UsageError(
            "data.dataset must be the name of a TFDS dataset, for example wmt14_translate/de-en, "
            f"got {dataset!r}"
        )
    tfds = _tfds()
    data_dir = None if folder is None else parse_path(folder)
    try:
        # The other file format, TFRecord, can be read only with TensorFlow.
        return tfds.builder(dataset, data_dir=data_dir, file_format="array_record")
    except Exception as error:
        _check_names(match[1], match[2], error)
        location, reason = data_dir or "the TFDS folder", _root_cause(error)
        if "File format is already set" in str(error):
            raise DataError(
                f"{dataset} in {location} is in TFRecord format, which only TensorFlow reads: "
                "use another folder with ",
                Setting("data.folder", "FOLDER"),
            ) from error
        if isinstance(error, ValueError | AssertionError):
            # The TFDS error message names the call that failed and then gives the reason.
            reason = reason.rpartition('": ')[2]
            raise UsageError(f"TFDS cannot provide {dataset}: {reason}") from error
        raise DataError(f"{dataset} cannot be read from {location}: {reason}") from error


def _check_names(name: str, config: str | None, error: Exception) -> None:
    """Raise a UsageError from `error` if TFDS has no dataset or configuration with this name."""
    tfds = _tfds()
    datasets = tfds.list_builders(with_community_datasets=False)
    if name not in datasets:
        raise UsageError(f"TFDS has no dataset {name!r}{did_you_mean(name, datasets)}") from error
    configs = list(tfds.builder_cls(name).builder_configs)
    if configs and config not in configs:
        shown = ", ".join(configs[:20]) + (", ..." if len(configs) > 20 else "")
        raise UsageError(
            f"{name} has no configuration {config!r}{did_you_mean(str(config), configs)}; "
            f"it has {shown}"
        ) from error


def _download_and_prepare(builder: Builder) -> None:
    """Download a dataset unless it is already stored; show progress on standard error."""
    tfds = _tfds()
    if not sys.stderr.isatty():
        tfds.disable_progress_bar()
    config = tfds.download.DownloadConfig(try_download_gcs=False)
    # Give up on an unreachable server sooner, and do not log each attempt.
    downloader: Any = importlib.import_module("tensorflow_datasets.core.download.downloader")
    logger = logging.getLogger("urllib3.connectionpool")
    retries, level = downloader.MAX_RETRIES, logger.level
    try:
        downloader.MAX_RETRIES = RETRIES
        logger.setLevel(logging.ERROR)
        with contextlib.redirect_stdout(sys.stderr), _utf8_locale():
            builder.download_and_prepare(download_config=config)
    except OSError as error:
        # Exceptions raised by `requests` are OSErrors that contain the failed request.
        url = getattr(getattr(error, "request", None), "url", None)
        problem = f"could not be downloaded from {url}" if url else "could not be stored"
        raise StorageError(
            f"{_name(builder)} {problem}: {_root_cause(error)}; "
            f"try again (finished downloads are kept), or {ADVICE}"
        ) from error
    # A dataset's builder can raise any exception.
    except Exception as error:
        raise DataError(
            f"{_name(builder)} could not be built: {_root_cause(error)}; {ADVICE}"
        ) from error
    finally:
        downloader.MAX_RETRIES = retries
        logger.setLevel(level)


@contextlib.contextmanager
def _utf8_locale() -> Iterator[None]:
    """Let TFDS read text files as UTF-8. By default, TFDS uses the encoding of the locale."""
    before = locale.setlocale(locale.LC_CTYPE)
    # No locale has the same name on all systems.
    for name in ("C.UTF-8", "UTF-8", "en_US.UTF-8"):
        with contextlib.suppress(locale.Error):
            locale.setlocale(locale.LC_CTYPE, name)
            break
    try:
        yield
    finally:
        locale.setlocale(locale.LC_CTYPE, before)


def _root_cause(error: BaseException) -> str:
    """Return the first line of the original exception's message, or its type if there is none."""
    while cause := error.__cause__ or error.__context__:
        error = cause
    lines = str(error).splitlines()
    return lines[0].rstrip(": ") if lines else type(error).__name__
