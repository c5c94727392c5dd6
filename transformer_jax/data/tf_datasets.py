"""Parallel text from TensorFlow Datasets (TFDS), without TensorFlow (section 5.1).

TFDS downloads a set once, checks it, and keeps it as ArrayRecord files, which need no TensorFlow
to be read, and no network from then on. It stores pairs in an order of its own, the same
everywhere: line 1 of a test set here is not line 1 of the published file.
"""

import contextlib
import importlib
import logging
import re
import sys
from collections.abc import Generator, Iterator
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from transformer_jax.config.validation import did_you_mean
from transformer_jax.data.splits import Split
from transformer_jax.errors import DataError, StorageError, UsageError

# How TFDS calls our splits.
NAMES: dict[Split, str] = {"train": "train", "dev": "validation", "test": "test"}
# Pairs read at a time: one by one would take twenty times as long.
CHUNK = 1024
# A server that cannot be reached is asked again for 25 seconds; TFDS's own 10 make it 200.
RETRIES = 7
ADVICE = "or bring the files yourself by configs/text.py (--data.train ...)"


class TranslationDataset:
    """A translation set of TFDS: its train, validation and test are our train, dev and test.

    `wmt14_translate/de-en` is the paper's: Europarl v7, Common Crawl and News Commentary v9, about
    4.5 million pairs, to train on; newstest2013 as dev; newstest2014 as test. TFDS has one set for
    both directions: `languages` says which way to read it.

    A line is a sentence: line ends around it are left out, and those inside become a space.
    """

    def __init__(
        self,
        dataset: str = "wmt14_translate/de-en",
        languages: tuple[str, str] = ("en", "de"),
        folder: Path | str | None = None,
    ) -> None:
        """Describe a set; nothing is imported, read or downloaded before it is asked for.

        Args:
            dataset: TFDS's name for it, as NAME/CONFIG or NAME/CONFIG:VERSION.
            languages: of the sources and of the targets.
            folder: where TFDS keeps its sets; None is $TFDS_DATA_DIR or ~/tensorflow_datasets.
        """
        self._dataset, self._languages, self._folder = dataset, languages, folder

    @property
    def name(self) -> str:
        """The set with its version and direction, for people.

        Raises:
            UsageError: there is no such set, or not in these languages, or TFDS is not installed.
            DataError: the set lies there damaged, or in a form that needs TensorFlow.
        """
        return f"{_name(self._builder)}, {'-'.join(self._languages)}"

    @property
    def identity(self) -> str:
        """The name and the sizes of all splits; downloads the set where it is not there yet.

        Raises:
            DataError: the set cannot be made, or has no train or no validation split.
            StorageError: it cannot be downloaded, kept or read.
        """
        sizes = (
            f"{split} {self.count(split)} pairs of {int(self._info(split).num_bytes)} bytes"
            for split in self.splits
        )
        return ", ".join(["tfds", self.name, *sizes])

    @property
    def splits(self) -> tuple[Split, ...]:
        """Those there are; train and dev are always there."""
        return tuple(split for split, name in NAMES.items() if name in self._prepared.info.splits)

    def count(self, split: Split) -> int:
        """Return the number of pairs."""
        return self._info(split).num_examples

    def read(self, split: Split, start: int = 0) -> Iterator[tuple[str, str]]:
        """Yield the source line and target line of each pair, from pair number `start` on.

        Raises:
            DataError: the files on disk are damaged.
        """
        source, target = self._languages
        try:
            pairs = self._prepared.as_data_source(NAMES[split])
            for first in range(start, len(pairs), CHUNK):
                chunk = range(first, min(first + CHUNK, len(pairs)))
                for pair in pairs.__getitems__(chunk):
                    yield _line(pair[source]), _line(pair[target])
        # What a damaged file raises depends on where the damage is.
        except (OSError, ValueError, IndexError, RuntimeError) as error:
            raise DataError(
                f"{self.name} cannot be read ({_reason(error)}): {_remove(self._builder)}"
            ) from error

    @cached_property
    def _builder(self) -> Any:
        """TFDS's own object for this set, checked as far as can be without the data."""
        builder = _find(self._dataset, self._folder)
        text = _tfds().features.Text
        features = builder.info.features or {}
        there = [name for name, feature in features.items() if isinstance(feature, text)]
        if len(set(self._languages) & set(there)) < 2:
            raise UsageError(
                f"{_name(builder)} has text in {', '.join(there) or 'no language'}, "
                f"not in {' and '.join(self._languages)} (data.languages)"
            )
        return builder

    @cached_property
    def _prepared(self) -> Any:
        """The same, with the data on disk and the splits that we need."""
        builder = self._builder
        _prepare(builder)
        if not builder.info.splits:
            raise DataError(f"{self.name} is not whole: {_remove(builder)}")
        for name in (NAMES["train"], NAMES["dev"]):
            if name not in builder.info.splits:
                raise DataError(
                    f"{self.name} has no split {name!r}, which training needs; there are "
                    f"{', '.join(builder.info.splits)}"
                )
        return builder

    def _info(self, split: Split) -> Any:
        return self._prepared.info.splits[NAMES[split]]


def _name(builder: Any) -> str:
    dataset, _, version = builder.info.full_name.rpartition("/")
    return f"{dataset} {version}"


def _remove(builder: Any) -> str:
    return f"remove {builder.data_dir}, and it is made anew"


def _line(text: bytes | str) -> str:
    """Return one sentence as one line; TFDS's mocked data is str, real data bytes."""
    line = text.decode() if isinstance(text, bytes) else text
    if not isinstance(line, str):
        raise ValueError("a pair without text")
    return re.sub(r"[\r\n]+", " ", line.strip("\r\n"))


def _tfds() -> ModuleType:
    """Import TFDS, its translation sets included.

    Raises:
        UsageError: a part is not installed.
    """
    # TFDS would log a traceback and go on without them. And it finds no translation set by name
    # before `translate` has been imported.
    for needed in ("importlib_resources", "array_record", "tensorflow_datasets.translate"):
        try:
            importlib.import_module(needed)
        except ImportError as error:
            raise UsageError(
                f"data.corpus tfds needs {(error.name or needed).split('.')[0]}: "
                f"pip install tensorflow-datasets array_record importlib_resources"
            ) from error
    return importlib.import_module("tensorflow_datasets")


def _find(dataset: str, folder: Path | str | None) -> Any:
    """Return TFDS's builder of a set; nothing is downloaded.

    Raises:
        UsageError: there is no such set, configuration or version.
        DataError: the set lies there damaged, or in a form that needs TensorFlow.
    """
    # No more than names: TFDS itself would take arguments and other catalogues in them.
    parts = re.fullmatch(r"(\w+)(?:/([\w.+-]+))?(?::([\d.]+))?", dataset)
    if not parts:
        raise UsageError(
            f"data.dataset must be TFDS's name of a set, as wmt14_translate/de-en, got {dataset!r}"
        )
    tfds = _tfds()
    place = None if folder is None else Path(folder).expanduser()
    try:
        # Its other format, TFRecord, can only be read with TensorFlow.
        return tfds.builder(dataset, data_dir=place, file_format="array_record")
    except Exception as error:
        name, config, _ = parts.groups()
        known = tfds.list_builders(with_community_datasets=False)
        if name not in known:
            raise UsageError(f"TFDS has no set {name!r}{did_you_mean(name, known)}") from error
        configs = tfds.builder_cls(name).builder_configs
        if configs and config not in configs:
            some = ", ".join([*configs][:20]) + (", ..." if len(configs) > 20 else "")
            raise UsageError(
                f"TFDS's {name} has no {config!r}{did_you_mean(str(config), configs)}; there are {some}"
            ) from error
        where = place or "TFDS's folder"
        if "File format is already set" in str(error):
            raise DataError(
                f"{dataset} lies in {where} as TFRecord, which only TensorFlow reads: "
                f"name another folder by --data.folder"
            ) from error
        if isinstance(error, ValueError | AssertionError):
            # TFDS puts its own call before it.
            reason = _reason(error).rpartition('": ')[2]
            raise UsageError(f"{dataset} cannot be had from TFDS: {reason}") from error
        raise DataError(f"{dataset} cannot be read from {where}: {_reason(error)}") from error


def _prepare(builder: Any) -> None:
    """Download a set where it is not there yet; TFDS tells on standard error how far it is.

    Raises:
        DataError: what arrived is not what it should be, or has to be fetched by hand.
        StorageError: a server cannot be reached, or the folder cannot be written.
    """
    tfds = _tfds()
    if not sys.stderr.isatty():
        tfds.disable_progress_bar()
    config = tfds.download.DownloadConfig(try_download_gcs=False)
    try:
        with contextlib.redirect_stdout(sys.stderr), _short_patience():
            builder.download_and_prepare(download_config=config)
    except OSError as error:
        # Those of requests are OSErrors too, and know where they wanted to go.
        url = getattr(getattr(error, "request", None), "url", None)
        raise StorageError(
            f"{_name(builder)} could not be {f'downloaded from {url}' if url else 'kept'}: "
            f"{_reason(error)}; try again, which goes on with what has arrived, {ADVICE}"
        ) from error
    except Exception as error:
        # Each set has a builder of its own, which may raise anything.
        raise DataError(
            f"{_name(builder)} could not be made: {_reason(error)}; {ADVICE}"
        ) from error


@contextlib.contextmanager
def _short_patience() -> Generator[None]:
    """Give up a server that cannot be reached sooner than TFDS would, without a log of it."""
    downloader: Any = importlib.import_module("tensorflow_datasets.core.download.downloader")
    attempts = logging.getLogger("urllib3.connectionpool")
    before = downloader.MAX_RETRIES, attempts.level
    downloader.MAX_RETRIES = RETRIES
    attempts.setLevel(logging.ERROR)
    try:
        yield
    finally:
        downloader.MAX_RETRIES = before[0]
        attempts.setLevel(before[1])


def _reason(error: BaseException) -> str:
    """Return what the first cause of an error says, in one line."""
    while cause := error.__cause__ or error.__context__:
        error = cause
    lines = str(error).splitlines()
    return lines[0].rstrip(": ") if lines else type(error).__name__
