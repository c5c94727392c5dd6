"""The corpora that a config can choose from (section 5.1)."""

from collections.abc import Callable, Iterator
from typing import Protocol

from transformer_jax.config import DataConfig
from transformer_jax.data.number_words import NumberWords
from transformer_jax.data.splits import SPLITS, Split
from transformer_jax.data.text_files import TextFiles
from transformer_jax.data.tf_datasets import TranslationDataset
from transformer_jax.data.tree_files import TreeFiles
from transformer_jax.registry import Registry


class Corpus(Protocol):
    """A parallel corpus. Each split is a fixed sequence of line pairs."""

    @property
    def name(self) -> str:
        """A human-readable name."""

    @property
    def identity(self) -> str:
        """A string that identifies the text. Corpora with the same identity have the same lines."""

    @property
    def splits(self) -> tuple[Split, ...]:
        """The available splits: train, dev, and possibly test."""

    def count(self, split: Split) -> int:
        """Return the number of pairs in a split."""

    def read(self, split: Split, start: int = 0) -> Iterator[tuple[str, str]]:
        """Yield the source and target lines of each pair, starting at pair `start`."""


CORPORA = Registry[Callable[[DataConfig], Corpus]]("data.corpus")


CORPORA.register("number_words")(
    lambda c: NumberWords(c.num_pairs, c.max_numbers_per_line, c.max_digits)
)
CORPORA.register("tfds")(lambda c: TranslationDataset(c.dataset, c.languages, c.folder))
CORPORA.register("trees")(lambda c: TreeFiles(c.folder))


@CORPORA.register("text")
def _read_text(config: DataConfig) -> Corpus:
    files = {split: getattr(config, split) for split in SPLITS}
    corpus = TextFiles(files, config.folder)
    corpus.note_mistakes()
    return corpus


def bleu_tokenizer(config: DataConfig) -> str:
    """Return the name of the sacreBLEU tokenizer, or "auto" if it depends on the references."""
    if config.bleu_tokenizer != "auto":
        return config.bleu_tokenizer
    # A spelled-out German number is a single word, so word-level BLEU would find few n-grams with
    # n > 1. The symbols of a linearized tree are already separated by spaces.
    return {"number_words": "char", "trees": "none"}.get(config.corpus, "auto")
