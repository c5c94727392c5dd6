"""Summarization: corpora whose sources are cut, and ROUGE as the score of the task.

    transformer-jax train tiny --import examples/summarization.py --data.corpus stories ...

docs/beyond-translation.md has the complete commands. The corpus `stories` is generated. The corpus
`summaries` reads a TFDS dataset with two text features, such as cnn_dailymail. ROUGE needs the
package rouge-score.
"""

import random
from collections.abc import Iterator, Sequence

import transformer_jax as tj
from transformer_jax.config import DataConfig
from transformer_jax.data.corpora import Corpus
from transformer_jax.data.splits import SPLITS, Split
from transformer_jax.data.tf_datasets import TranslationDataset

# See et al. (2017), "Get To The Point", also keep the first 400 words of an article.
MAX_WORDS = 400
MAX_STORY_WORDS = 40
SCORES = ("rouge1", "rouge2", "rougeL")


class CutSources:
    """A corpus with only the first words of each source."""

    def __init__(self, corpus: Corpus, max_words: int) -> None:
        """Wrap a corpus."""
        self.corpus, self.max_words = corpus, max_words

    @property
    def name(self) -> str:
        """A human-readable name."""
        return f"{self.corpus.name}, cut after {self.max_words} words"

    @property
    def identity(self) -> str:
        """A string that identifies the text."""
        return f"{self.corpus.identity}, cut after {self.max_words} words"

    @property
    def splits(self) -> tuple[Split, ...]:
        """The splits of the wrapped corpus."""
        return self.corpus.splits

    def count(self, split: Split) -> int:
        """Return the number of pairs in a split."""
        return self.corpus.count(split)

    def read(self, split: Split, start: int = 0) -> Iterator[tuple[str, str]]:
        """Yield the cut source and the target of each pair."""
        for source, target in self.corpus.read(split, start):
            yield " ".join(source.split()[: self.max_words]), target


class Stories:
    """Short stories, each of which begins with what its summary states."""

    splits = SPLITS

    def __init__(self, num_pairs: int) -> None:
        """Set the number of training pairs."""
        self._sizes: dict[Split, int] = {"train": num_pairs, "dev": 200, "test": 200}
        self.name = self.identity = f"{num_pairs} stories"

    def count(self, split: Split) -> int:
        """Return the number of pairs in a split."""
        return self._sizes[split]

    def read(self, split: Split, start: int = 0) -> Iterator[tuple[str, str]]:
        """Yield a story of 3 to 9 sentences and its summary."""
        for number in range(start, self._sizes[split]):
            rng = random.Random(f"{split} {number}")  # noqa: S311 - a reproducible story
            who, other = rng.sample(("anna", "ben", "carla", "david", "eva", "frank"), 2)
            did, what = rng.choice(("found", "lost", "bought", "sold")), rng.choice(THINGS)
            first = f"{who} {did} a {rng.choice(COLORS)} {what} near the {rng.choice(PLACES)} ."
            rest = [f"{other} {rng.choice(EVENTS)} ." for _ in range(rng.randint(2, 8))]
            yield " ".join([first, *rest]), f"{who} {did} a {what} ."


THINGS = ("ball", "book", "lamp", "coat", "boat", "violin", "clock", "map")
COLORS = ("red", "blue", "green", "black")
PLACES = ("station", "river", "market", "school")
EVENTS = ("watched the rain", "ate an apple", "called a friend", "read the paper", "went home")


@tj.register("data.corpus", "stories")
def read_stories(config: DataConfig) -> Corpus:
    """Return `data.num_pairs` stories, cut after `MAX_STORY_WORDS` words."""
    return CutSources(Stories(config.num_pairs), MAX_STORY_WORDS)


@tj.register("data.corpus", "summaries")
def read_summaries(config: DataConfig) -> Corpus:
    """Return the TFDS dataset `data.dataset`, whose features `data.languages` names."""
    dataset = TranslationDataset(config.dataset, config.languages, config.folder)
    return CutSources(dataset, MAX_WORDS)


def check(_sources: Sequence[str], _references: Sequence[str]) -> None:
    """Raise UsageError if rouge-score is not installed, before the search starts."""
    try:
        import rouge_score  # noqa: F401
    except ImportError as error:
        raise tj.UsageError("the task summarization needs: pip install rouge-score") from error


def score(
    sources: Sequence[str], hypotheses: Sequence[str], references: Sequence[str]
) -> dict[str, float]:
    """Return the mean F-scores of ROUGE-1, ROUGE-2, and ROUGE-L in percent, without stemming."""
    check(sources, references)
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(SCORES)
    results = [scorer.score(*pair) for pair in zip(references, hypotheses, strict=True)]
    return {k: 100 * sum(x[k].fmeasure for x in results) / len(results) for k in SCORES}


def describe(values: dict[str, float]) -> list[str]:
    """Return the line that `evaluate` prints."""
    parts = (f"{name.removeprefix('rouge')} {values[name]:.2f}" for name in SCORES)
    return [f"ROUGE       {', '.join(parts)}"]


tj.register("data.task", "summarization")(tj.Task("rougeL", check, score, describe))
