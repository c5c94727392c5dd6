"""Test that the example model in the repository is complete and can translate."""

import hashlib
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tensorflow_datasets as tfds
from pages import ROOT, commands

import transformer_jax
from transformer_jax.cli import main
from transformer_jax.config.loading import import_file
from transformer_jax.data.corpora import CORPORA
from transformer_jax.data.prepare import prepare_text
from transformer_jax.evaluation.tasks import TASKS

FOLDER = ROOT / "examples" / "multi30k"


def test_the_example_model_is_complete_and_small() -> None:
    lines = [line.split("  ") for line in (FOLDER / "SHA256SUMS").read_text("utf-8").splitlines()]
    assert len(lines) > 10
    for digest, name in lines:
        assert hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() == digest, name
    assert sum(path.stat().st_size for path in FOLDER.rglob("*")) < 6e6


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a clone")
def test_a_clone_with_windows_line_endings_keeps_every_byte(tmp_path: Path) -> None:
    # The clone uses the .gitattributes file of the last commit.
    options = ["-c", "core.autocrlf=true", "--depth=1", "--quiet"]
    clone = ["git", "clone", *options, f"file://{ROOT}", str(tmp_path / "clone")]
    subprocess.run(clone, check=True, capture_output=True)
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True)
    names = [name for name in listed.stdout.decode().splitlines() if "multi30k" in name]
    assert len(names) > 10
    for name in names:
        assert (tmp_path / "clone" / name).read_bytes() == (ROOT / name).read_bytes(), name


@pytest.mark.slow
def test_the_example_model_translates_a_caption() -> None:
    run = transformer_jax.load(FOLDER)
    assert run.translate(["two dogs play in the snow ."]) == ["zwei hunde spielen im schnee ."]


SUMMARIZATION = ROOT / "examples" / "summarization.py"
PAGE = ROOT / "docs" / "beyond-translation.md"


@pytest.mark.usefixtures("forget_parts")
def test_the_sources_of_the_stories_are_cut_but_contain_what_the_summaries_state() -> None:
    import_file(str(SUMMARIZATION))
    data = {"corpus": "stories", "num_pairs": 300, "max_ratio": 20.0, "vocab_size": 120}
    config = transformer_jax.load_config("tiny").change(data=data)
    corpus = CORPORA["stories"](config.data)
    pairs = list(corpus.read("train"))
    assert len(pairs) == corpus.count("train") == 300
    assert max(len(source.split()) for source, _ in pairs) == 40
    assert any(source.endswith(" .") and len(source.split()) < 40 for source, _ in pairs)
    for source, target in pairs:
        who, did, _, what, _ = target.split()
        assert source.startswith(f"{who} {did} a ")
        assert what in source.split()
    assert list(corpus.read("train", 290)) == pairs[290:]
    # No pair is left out, because sources are cut before their length is checked.
    prepared = prepare_text(config.data)
    assert len(prepared.tokens("train")[0].lengths) == 300


class Articles(tfds.core.GeneratorBasedBuilder):
    """A dataset with the splits and the text features of cnn_dailymail, and 900-word articles."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self) -> Any:
        names = ("article", "highlights", "id")
        features = tfds.features.FeaturesDict({name: tfds.features.Text() for name in names})
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, dl_manager: Any) -> Any:  # noqa: ARG002
        return {name: self._generate_examples() for name in ("train", "validation", "test")}

    def _generate_examples(self) -> Any:
        for i in range(20):
            words = [f"w{i}", *(["x", "y", "z"] * 300)]
            yield i, {"article": " ".join(words), "highlights": " ".join(words[:16]), "id": f"{i}"}


@pytest.mark.usefixtures("forget_parts")
def test_the_command_for_news_reads_a_dataset_and_keeps_its_articles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    [text] = [x.text for x in commands(PAGE) if "--data.corpus summaries" in x.text]
    _, _, *words, out, _ = shlex.split(text.replace("cnn_dailymail", "articles"))
    assert out == "--out"
    options = ["--data.folder", str(tmp_path), "--data.vocab-size", "40"]
    assert main(["prepare", *words, *options]) == 0
    output = capsys.readouterr().out
    assert "articles 1.0.0, article-highlights, cut after 400 words" in output
    # Without the cut, all articles would be longer than data.max_length.
    assert output.count("20 pairs, 20 kept\n") == 3


@pytest.mark.usefixtures("forget_parts")
def test_rouge_is_the_mean_f_score_of_the_library() -> None:
    pytest.importorskip("rouge_score", reason="needs rouge-score")
    import_file(str(SUMMARIZATION))
    task = TASKS["summarization"]
    assert task is not None
    references = ["anna found a ball .", "ben lost a map ."]
    scores = task.score(["", ""], ["anna found a ball .", "ben sold a map ."], references)
    # The scorer drops punctuation. In the second line, 3 of 4 words and 1 of 3 word pairs match.
    assert scores == pytest.approx(
        {"rouge1": (100 + 75) / 2, "rouge2": (100 + 100 / 3) / 2, "rougeL": (100 + 75) / 2}
    )
    assert task.describe(scores) == ["ROUGE       1 87.50, 2 66.67, L 87.50"]


@pytest.mark.usefixtures("forget_parts")
def test_rouge_without_its_library_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import_file(str(SUMMARIZATION))
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    task = TASKS["summarization"]
    assert task is not None
    with pytest.raises(transformer_jax.UsageError, match="pip install rouge-score"):
        task.check([], [])
