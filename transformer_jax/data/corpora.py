"""Where parallel text comes from (section 5.1).

A corpus is anything that reads its splits as pairs of lines; `SOURCES` names the kinds that a
config can ask for.
"""

from collections.abc import Callable, Iterator
from typing import Protocol

from transformer_jax.config import DataConfig
from transformer_jax.data.number_words import NumberWords
from transformer_jax.data.splits import Split
from transformer_jax.data.text_files import TextFiles
from transformer_jax.data.tf_datasets import TranslationDataset


class Corpus(Protocol):
    """Parallel text in splits without overlap."""

    @property
    def name(self) -> str:
        """What people call it."""
        ...

    @property
    def identity(self) -> str:
        """Tell this text from any other: the same identity, the same lines."""
        ...

    @property
    def splits(self) -> tuple[Split, ...]:
        """Which there are: train, dev, and test where there is one."""
        ...

    def count(self, split: Split) -> int:
        """Return the number of pairs."""
        ...

    def read(self, split: Split, start: int = 0) -> Iterator[tuple[str, str]]:
        """Yield the source line and target line of each pair, in a fixed order, from `start` on."""
        ...


CORPORA: dict[str, Callable[[DataConfig], Corpus]] = {
    "number_words": lambda config: NumberWords(
        config.num_pairs, config.max_numbers_per_line, config.max_digits
    ),
    "text": lambda config: TextFiles(
        {"train": config.train, "dev": config.dev, "test": config.test}, config.folder
    ),
    "tfds": lambda config: TranslationDataset(config.dataset, config.languages, config.folder),
}


def bleu_tokenizer(config: DataConfig) -> str:
    """Return sacreBLEU's name for how targets are parted into words."""
    if config.bleu_tokenizer != "auto":
        return config.bleu_tokenizer
    # A German number is one word, in which BLEU would find no two words in a row.
    return "char" if config.corpus == "number_words" else "13a"
