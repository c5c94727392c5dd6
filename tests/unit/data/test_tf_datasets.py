"""Test TensorFlow Datasets (TFDS) corpora with the real builders and synthetic downloads."""

import itertools
import json
import random
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow_datasets as tfds
from tensorflow_datasets.core.download import downloader
from tensorflow_datasets.core.download.download_manager import NonMatchingChecksumError

from transformer_jax.cli import main
from transformer_jax.data import tf_datasets
from transformer_jax.data.tf_datasets import CHUNK_PAIRS, TranslationDataset
from transformer_jax.errors import DataError, StorageError, TransformerJaxError, UsageError

WMT14 = "wmt14_translate/de-en"
Pairs = list[tuple[str, str]]


def synthetic(name: str, count: int) -> Pairs:
    """Return `count` synthetic English-German line pairs. The lines vary in length."""
    rng = random.Random(name)
    return [
        (f"{name} {i}: a{' b' * rng.randrange(9)}", f"{name} {i}: {'ß' * rng.randrange(9)}c")
        for i in range(count)
    ]


# These lines make the training split longer than one chunk.
EUROPARL = [
    *synthetic("Europarl", CHUNK_PAIRS),
    (" a\u2028b\u00a0", "c\rd"),
    ("", "dropped"),
    ("x\r", "y"),
]
COMMON_CRAWL = synthetic("Common Crawl", 20)
NEWS_COMMENTARY = synthetic("News Commentary", 10)
NEWSTEST2013 = synthetic("newstest2013", 7)
NEWSTEST2014 = synthetic("newstest2014", 5)


def write_downloads(folder: Path) -> None:
    """Write synthetic versions of the files that TFDS reads from the WMT 2014 archives."""
    (folder / "training").mkdir(parents=True)
    (folder / "dev").mkdir()
    texts = {
        "training/europarl-v7.de-en": EUROPARL,
        "commoncrawl.de-en": COMMON_CRAWL,
        "training/news-commentary-v9.de-en": NEWS_COMMENTARY,
        "dev/newstest2013": NEWSTEST2013,
    }
    for stem, pairs in texts.items():
        for language, lines in zip(("en", "de"), zip(*pairs, strict=True), strict=True):
            text = "".join(f"{line}\n" for line in lines)
            (folder / f"{stem}.{language}").write_bytes(text.encode())
    for end, column in (("ref.en", 0), ("src.de", 1)):
        segments = [f'<seg id="{i}">{pair[column]}</seg>' for i, pair in enumerate(NEWSTEST2014, 1)]
        lines = ['<doc docid="x">', "<p>", *segments, "</p>", "</doc>\n"]
        (folder / f"dev/newstest2014-deen-{end}.sgm").write_text("\n".join(lines), "utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder in which TFDS has built WMT 2014 from synthetic downloads."""
    downloads, folder = (tmp_path_factory.mktemp(name) for name in ("downloads", "tfds"))
    write_downloads(downloads)

    def download_and_extract(_: Any, urls: Any) -> Any:
        if isinstance(urls, dict):
            return {key: download_and_extract(_, value) for key, value in urls.items()}
        return str(downloads) if isinstance(urls, str) else [str(downloads) for _ in urls]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tfds.download.DownloadManager, "download_and_extract", download_and_extract)
        assert TranslationDataset(WMT14, folder=folder).count("test") == len(NEWSTEST2014)
    return folder


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise socket.gaierror("no network in this test")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    monkeypatch.setattr(socket.socket, "connect", fail)
    monkeypatch.setattr(tf_datasets, "RETRIES", 0)


class Small(tfds.core.GeneratorBasedBuilder):
    """A small dataset whose attributes a test can change."""

    VERSION = tfds.core.Version("1.0.0")
    splits_to_make: Any = ("train", "validation")
    pairs: Any = (("one", "eins"), ("two", "zwei"))

    def _info(self) -> Any:
        features = tfds.features.Translation(languages=("en", "de"))
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, dl_manager: Any) -> Any:  # noqa: ARG002
        return {name: self._generate_examples() for name in self.splits_to_make}

    def _generate_examples(self) -> Any:
        for i, (english, german) in enumerate(self.pairs):
            yield i, {"en": english, "de": german}


def small(folder: Path, **attributes: Any) -> TranslationDataset:
    for key, value in attributes.items():
        setattr(Small, key, value)
    return TranslationDataset("small", folder=folder)


@pytest.fixture(autouse=True)
def restore_small(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("VERSION", "splits_to_make", "pairs", "_split_generators"):
        monkeypatch.setattr(Small, key, getattr(Small, key))


def failure(kind: type[TransformerJaxError], call: Callable[[], object]) -> str:
    """Check that a call raises an error with a one-line message, and return the message."""
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_wmt14_has_the_splits_of_the_paper_and_all_their_pairs(folder: Path) -> None:
    corpus = TranslationDataset(folder=folder)
    assert corpus.name == "wmt14_translate/de-en 1.0.0, en-de"
    assert corpus.splits == ("train", "dev", "test")
    # TFDS drops the pair with an empty English line. A carriage return is removed at the end of a
    # line and replaced with a space elsewhere. Other characters, such as U+2028, are kept.
    europarl = [*EUROPARL[:-3], (" a\u2028b\u00a0", "c d"), ("x", "y")]
    train = [*europarl, *COMMON_CRAWL, *NEWS_COMMENTARY]
    assert Counter(corpus.read("train")) == Counter(train)
    assert Counter(corpus.read("dev")) == Counter(NEWSTEST2013)
    assert Counter(corpus.read("test")) == Counter(NEWSTEST2014)
    assert [corpus.count(split) for split in corpus.splits] == [len(train), 7, 5]
    assert "tensorflow" not in sys.modules


@pytest.mark.usefixtures("no_network")
@pytest.mark.exhaustive
def test_wmt14_can_be_trained_and_scored_end_to_end(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    small = "--model.num-layers 1 --model.d-model 16 --model.d-ff 32 --model.num-heads 2"
    small += " --model.d-k 8 --model.d-v 8 --data.batch-tokens 512 --decode.beam-size 1"
    short = "--train.steps 1 --train.checkpoint-every 1 --decode.average-checkpoints 1"
    options = f"--data.folder {folder} --data.vocab-size 200 {small} {short}"
    assert main(["train", "wmt14", *options.split()]) == 0
    assert "wmt14_translate/de-en 1.0.0, en-de" in capsys.readouterr().out
    assert main(["evaluate", "runs/wmt14", "--json"]) == 0
    scores = json.loads(capsys.readouterr().out)
    assert (scores["split"], scores["average_checkpoints"]) == ("test", 1)
    assert scores["sentences"] == len(NEWSTEST2014)
    assert "tok:13a" in scores["bleu_signature"]


def test_wmt14_is_built_from_the_corpora_of_the_paper_only(folder: Path) -> None:
    builder: Any = tfds.builder(WMT14, data_dir=folder, file_format="array_record")
    assert {str(split): names for split, names in builder.subsets.items()} == {
        "train": ["europarl_v7", "commoncrawl", "newscommentary_v9"],
        "validation": ["newstest2013"],
        "test": ["newstest2014"],
    }


def test_the_order_of_languages_selects_the_direction(folder: Path) -> None:
    forward = TranslationDataset(WMT14, ("en", "de"), folder)
    backward = TranslationDataset(WMT14, ("de", "en"), folder)
    for split in forward.splits:
        swapped = [(english, german) for german, english in backward.read(split)]
        assert list(forward.read(split)) == swapped
    assert backward.name == "wmt14_translate/de-en 1.0.0, de-en"
    assert backward.identity != forward.identity


def test_pairs_can_be_read_repeatedly_from_any_start(folder: Path) -> None:
    corpus = TranslationDataset(WMT14, folder=folder)
    pairs = list(corpus.read("train"))
    assert pairs == list(TranslationDataset(WMT14, folder=folder).read("train"))
    for start in (1, CHUNK_PAIRS - 1, CHUNK_PAIRS, len(pairs) - 1, len(pairs), len(pairs) + 1):
        assert list(corpus.read("train", start)) == pairs[start:]
    assert list(itertools.islice(corpus.read("train", 3), 2)) == pairs[3:5]


@pytest.mark.usefixtures("no_network")
def test_a_stored_dataset_needs_no_network(folder: Path) -> None:
    corpus = TranslationDataset(WMT14, folder=folder)
    assert len(list(corpus.read("train"))) == corpus.count("train")
    # If a dataset's name includes its version, TFDS reads the dataset only from stored files.
    named = TranslationDataset(f"{WMT14}:1.0.0", folder=folder)
    assert named.identity == corpus.identity
    assert list(named.read("test")) == list(corpus.read("test"))


def test_another_process_reads_the_same_lines_without_tensorflow(folder: Path) -> None:
    code = (
        "import json, pathlib, sys\n"
        "from transformer_jax.data.tf_datasets import TranslationDataset\n"
        "assert 'tensorflow_datasets' not in sys.modules\n"
        "corpus = TranslationDataset(folder=pathlib.Path(sys.argv[1]))\n"
        "print(json.dumps([corpus.identity, [*corpus.read('train')]]))\n"
        "assert not {'tensorflow', 'jax', 'torch'} & set(sys.modules)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(folder)],
        capture_output=True,
        text=True,
        check=True,
    )
    corpus = TranslationDataset(folder=folder)
    assert json.loads(ended.stdout) == [corpus.identity, [[*p] for p in corpus.read("train")]]
    assert ended.stderr == ""


def test_building_a_dataset_writes_only_to_standard_error_and_restores_tfds(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    retries = downloader.MAX_RETRIES
    assert small(tmp_path).count("train") == 2
    output = capfd.readouterr()
    assert output.out == ""
    assert "small/1.0.0" in output.err
    assert "WARNING" not in output.err
    assert retries == downloader.MAX_RETRIES


def test_a_dataset_may_lack_a_test_split(tmp_path: Path) -> None:
    corpus = small(tmp_path)
    assert corpus.splits == ("train", "dev")
    assert Counter(corpus.read("dev")) == Counter([("one", "eins"), ("two", "zwei")])


def test_a_dataset_without_a_validation_split_is_refused(tmp_path: Path) -> None:
    message = failure(DataError, lambda: small(tmp_path, splits_to_make=("train", "test")).identity)
    assert message == (
        "small 1.0.0, en-de has no split 'validation', which training needs; it has train, test"
    )


def test_different_datasets_have_different_identities(tmp_path: Path) -> None:
    first = small(tmp_path / "a").identity
    assert small(tmp_path / "b").identity == first
    version = small(tmp_path / "c", VERSION=tfds.core.Version("1.0.1")).identity
    longer = small(tmp_path / "d", pairs=[("one", "eins"), ("two", "zweie")]).identity
    more = small(tmp_path / "e", pairs=[("one", "eins")] * 3).identity
    assert len({first, version, longer, more}) == 4


def test_text_may_be_bytes_or_str(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Mocked(list[Any]):
        def __getitems__(self, keys: Any) -> list[Any]:
            return [self[key] for key in keys]

    corpus = small(tmp_path)
    assert corpus.count("dev") == 2
    data = Mocked([{"en": "a\n", "de": b"\xc3\xa4\r\n"}, {"en": b"b\nc", "de": "\u00fc"}])
    monkeypatch.setattr(Small, "as_data_source", lambda *_: data)
    assert list(corpus.read("dev")) == [("a", "\u00e4"), ("b c", "\u00fc")]


@pytest.mark.parametrize(
    ("dataset", "languages", "expected"),
    [
        (
            "wmt14_translat/de-en",
            ("en", "de"),
            "TFDS has no dataset 'wmt14_translat'; did you mean 'wmt14_translate'?",
        ),
        (
            "wmt14_translate/en-de",
            ("en", "de"),
            "wmt14_translate has no configuration 'en-de'; "
            "it has cs-en, de-en, fr-en, hi-en, ru-en",
        ),
        (
            "wmt14_translate/de-en:2.0.0",
            ("en", "de"),
            "TFDS cannot provide wmt14_translate/de-en:2.0.0: Dataset wmt14_translate cannot "
            "be loaded at version 2.0.0, only: 1.0.0.",
        ),
        (
            "wmt14_translate/de-en",
            ("en", "fr"),
            "wmt14_translate/de-en 1.0.0 has text in de, en, not in en and fr (data.languages)",
        ),
        (
            "wmt14_translate/de-en",
            ("de", "de"),
            "wmt14_translate/de-en 1.0.0 has text in de, en, not in de and de (data.languages)",
        ),
        (
            "mnist",
            ("en", "de"),
            "mnist 3.0.1 has text in no language, not in en and de (data.languages)",
        ),
        *(
            (
                name,
                ("en", "de"),
                "data.dataset must be the name of a TFDS dataset, for example "
                f"wmt14_translate/de-en, got {name!r}",
            )
            for name in ("huggingface:wmt14", "wmt14 de-en", "small/x/try_gcs=True", "../x", "")
        ),
    ],
)
@pytest.mark.usefixtures("no_network")
def test_a_wrong_name_is_refused_before_any_download(
    tmp_path: Path, dataset: str, languages: tuple[str, str], expected: str
) -> None:
    message = failure(UsageError, lambda: TranslationDataset(dataset, languages, tmp_path).identity)
    assert message == expected
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("no_network")
def test_an_unreachable_server_is_reported_with_its_url(tmp_path: Path) -> None:
    message = failure(StorageError, lambda: TranslationDataset(folder=tmp_path).identity)
    assert message == (
        "wmt14_translate/de-en 1.0.0 could not be downloaded from "
        "http://www.statmt.org/wmt13/training-parallel-europarl-v7.tgz: no network in this test; "
        "try again (finished downloads are kept), "
        "or download the text yourself and train with configs/text.py"
    )


@pytest.mark.parametrize(
    ("raised", "kind", "beginning"),
    [
        (
            NonMatchingChecksumError("Artifact http://x/y.tgz, stored in /z, is bad:\n* this"),
            DataError,
            "small 1.0.0 could not be built: Artifact http://x/y.tgz, stored in /z, is bad; down",
        ),
        (
            AssertionError("you must download x by hand"),
            DataError,
            "small 1.0.0 could not be built: you must download x by hand; download ",
        ),
        (
            PermissionError(13, "Permission denied", "/x"),
            StorageError,
            "small 1.0.0 could not be stored: [Errno 13] Permission denied: '/x'; try again (",
        ),
        (KeyError(), DataError, "small 1.0.0 could not be built: KeyError; download the text "),
    ],
)
def test_a_failing_builder_is_reported_in_one_line(
    tmp_path: Path, raised: Exception, kind: type[TransformerJaxError], beginning: str
) -> None:
    def fail(*_: Any) -> None:
        raise raised

    message = failure(kind, lambda: small(tmp_path, _split_generators=fail).identity)
    assert message.startswith(beginning)


def test_damaged_files_are_reported_in_one_line(tmp_path: Path) -> None:
    corpus = small(tmp_path)
    assert corpus.count("train") == 2
    file = next(tmp_path.rglob("*train*array_record*"))
    data = file.read_bytes()
    for damaged in (data[: len(data) // 2], b"", bytes(len(data))):
        file.write_bytes(damaged)
        message = failure(DataError, lambda: list(small(tmp_path).read("train")))
        assert message.startswith("small 1.0.0, en-de cannot be read (")
        assert message.endswith(f"): remove {file.parent} to download it again")
    file.unlink()
    message = failure(DataError, lambda: list(small(tmp_path).read("train")))
    assert message.startswith("small 1.0.0, en-de cannot be read (")
    info = file.with_name("dataset_info.json")
    info.write_text("{", "utf-8")
    message = failure(DataError, lambda: small(tmp_path).identity)
    assert message.startswith(f"small cannot be read from {tmp_path}: Expecting property name")
    info.unlink()
    assert failure(DataError, lambda: small(tmp_path).identity) == (
        f"small 1.0.0, en-de is incomplete: remove {file.parent} to download it again"
    )


def test_files_in_tfrecord_format_are_refused(tmp_path: Path) -> None:
    assert small(tmp_path).count("train") == 2
    info = tmp_path / "small/1.0.0/dataset_info.json"
    info.write_text(info.read_text("utf-8").replace('"array_record"', '"tfrecord"'), "utf-8")
    message = failure(DataError, lambda: small(tmp_path).identity)
    assert message == (
        f"small in {tmp_path} is in TFRecord format, which only TensorFlow reads: "
        "use another folder with data.folder='FOLDER'"
    )


@pytest.mark.parametrize("missing", ["tensorflow_datasets", "array_record", "importlib_resources"])
def test_a_missing_library_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    for module in [name for name in sys.modules if name.split(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, missing, None)
    message = failure(UsageError, lambda: TranslationDataset(folder=tmp_path).name)
    assert message == (
        f"data.corpus tfds needs {missing}: "
        "pip install tensorflow-datasets array_record importlib_resources"
    )
