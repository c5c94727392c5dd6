import gzip
from collections import Counter
from pathlib import Path

import pytest
from corpora import sentences, sequences, write_treebank

from transformer_jax.config import DataConfig
from transformer_jax.console import format_for_shell
from transformer_jax.data.corpora import CORPORA, Corpus, bleu_tokenizer
from transformer_jax.data.prepare import prepare_text
from transformer_jax.data.tree_files import TreeFiles
from transformer_jax.errors import ConfigError, DataError
from transformer_jax.progress import Note

FIRST = ("the cat sees .", "(S (NP XX XX )NP (VP XX )VP . )S")


def open_treebank(folder: Path) -> Corpus:
    return CORPORA["trees"](DataConfig(corpus="trees", folder=str(folder)))


def test_a_sentence_and_its_linearized_tree_are_a_pair(tmp_path: Path) -> None:
    corpus = open_treebank(write_treebank(tmp_path))
    assert corpus.splits == ("train", "dev", "test")
    assert [corpus.count(split) for split in corpus.splits] == [60, 8, 8]
    pairs = list(corpus.read("train"))
    assert pairs[0] == FIRST
    assert list(corpus.read("train", 58)) == pairs[58:]


def test_the_sections_of_the_penn_treebank_are_splits(tmp_path: Path) -> None:
    trees = sentences(25)
    for section, tree in enumerate(trees):
        file = tmp_path / f"{section:02}" / f"wsj_{section:02}01.mrg"
        file.parent.mkdir()
        # A tree in the Penn Treebank can span several lines.
        file.write_text("\n" + tree.replace(" (", "\n  (") + "\n")
    corpus = open_treebank(tmp_path)
    assert [corpus.count(split) for split in corpus.splits] == [20, 1, 1]
    whole = open_treebank(write_treebank(tmp_path / "whole", train=25))
    pairs = list(whole.read("train"))
    assert list(corpus.read("train")) == pairs[2:22]
    assert [*corpus.read("dev"), *corpus.read("test")] == pairs[22:24]
    # docs/parsing.md adds silver trees to a section.
    (tmp_path / "02/silver.trees").write_text(trees[0] + "\n")
    assert Counter(open_treebank(tmp_path).read("train")) == Counter([pairs[0], *pairs[2:22]])


def test_what_other_programs_leave_in_a_treebank_is_not_read(tmp_path: Path) -> None:
    for split in ("train", "dev"):
        (tmp_path / split / ".ipynb_checkpoints").mkdir(parents=True)
        (tmp_path / split / "a.mrg").write_text(sentences(1)[0])
        for name in ("._a.mrg", "a (1).mrg", ".ipynb_checkpoints/a.mrg"):
            (tmp_path / split / name).write_bytes(b"\xff")
    corpus = open_treebank(tmp_path)
    assert [corpus.count(split) for split in corpus.splits] == [1, 1]


def test_files_that_could_be_missed_are_reported(tmp_path: Path) -> None:
    for split in ("train", "dev"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "A.MRG").write_text(sentences(1)[0])
    (tmp_path / "train" / "b copy.mrg").write_text(sentences(1)[0])
    with pytest.warns(
        Note, match="skipped because they seem to be copies: 1, such as train/b copy.mrg"
    ):
        corpus = open_treebank(tmp_path)
    assert [corpus.count(split) for split in corpus.splits] == [1, 1]
    (tmp_path / "train.trees").write_text(sentences(1)[0])
    with pytest.raises(DataError, match=r"the train set twice, as train.trees and as train/A.MRG"):
        open_treebank(tmp_path)


def test_a_split_can_be_a_folder_or_a_compressed_file(tmp_path: Path) -> None:
    trees = sentences(3)
    (tmp_path / "train" / "b").mkdir(parents=True)
    (tmp_path / "train" / "b" / "2.mrg").write_text(trees[2])
    (tmp_path / "train" / "1.trees").write_text(f"{trees[0]}\n{trees[1]}\n")
    (tmp_path / "train" / "README").write_text("not a tree")
    (tmp_path / "dev.trees.gz").write_bytes(gzip.compress(trees[0].encode()))
    corpus = open_treebank(tmp_path)
    assert corpus.splits == ("train", "dev")
    assert corpus.count("train") == 3
    assert list(corpus.read("dev")) == [FIRST]


def test_the_identity_depends_only_on_the_trees(tmp_path: Path) -> None:
    first, second = (write_treebank(tmp_path / name) for name in ("a", "b"))
    assert open_treebank(first).identity == open_treebank(second).identity
    (second / "dev.trees").write_text(sentences(9)[8])
    assert open_treebank(first).identity != open_treebank(second).identity


def test_the_name_of_a_corpus_is_that_of_its_own_folder(tmp_path: Path) -> None:
    for name in ("one", "two"):
        folder = write_treebank(tmp_path / name)
        prepared = prepare_text(DataConfig(corpus="trees", folder=str(folder), vocab_size=64))
        assert prepared.report["corpus"] == f"trees in {name}"


def test_a_missing_split_is_reported_with_the_option_to_set(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no train trees: it needs") as caught:
        TreeFiles(str(tmp_path))
    assert "--data.folder FOLDER" in format_for_shell(caught.value)
    write_treebank(tmp_path)
    (tmp_path / "dev.trees").unlink()
    with pytest.raises(DataError, match="has no dev trees"):
        TreeFiles(str(tmp_path))


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_a_split_without_trees_is_reported(content: str, tmp_path: Path) -> None:
    (write_treebank(tmp_path / "mine") / "dev.trees").write_text(content)
    corpus = open_treebank(tmp_path / "mine")
    for _ in range(2):
        with pytest.raises(DataError, match=r"^trees in mine has no dev trees$"):
            corpus.count("dev")


def test_an_invalid_tree_is_reported_with_its_file_and_line(tmp_path: Path) -> None:
    with (write_treebank(tmp_path) / "dev.trees").open("a") as file:
        file.write("(S (NN a)\n")
    with pytest.raises(DataError, match=r"^dev\.trees, line 9: the tree is incomplete"):
        open_treebank(tmp_path).count("dev")


def test_a_file_that_changes_is_reported(tmp_path: Path) -> None:
    corpus = open_treebank(write_treebank(tmp_path))
    (tmp_path / "dev.trees").write_text("(NP (NN a))\n")
    with pytest.raises(DataError, match=r"dev\.trees was changed while it was read"):
        list(corpus.read("dev"))


def test_each_symbol_of_a_tree_is_one_token(tmp_path: Path) -> None:
    config = DataConfig(
        corpus="trees",
        folder=str(write_treebank(tmp_path)),
        source_vocab_size=60,
        vocab_size=100,
        target_tokens="words",
        max_length=32,
    )
    prepared = prepare_text(config)
    assert bleu_tokenizer(config) == "none"
    # The vocabulary contains four special tokens, three pairs of brackets, XX, and the period.
    assert prepared.vocabulary.sizes["vocab_size"] == 4 + 6 + 2
    lines = prepared.lines("dev")[1]
    _, tokens = sequences(prepared, "dev")
    assert [len(x) for x in tokens] == [len(line.split()) + 1 for line in lines]
    assert prepared.vocabulary.target.decode(tokens) == lines


def test_whole_words_need_a_separate_target_vocabulary() -> None:
    with pytest.raises(ConfigError, match=r"subwords without data\.source_vocab_size"):
        DataConfig(target_tokens="words")
