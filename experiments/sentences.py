"""Read a run's translations and losses from the files that `evaluate` saved."""

import csv
from collections.abc import Iterator
from typing import NamedTuple

from transformer_jax.console import shell_command
from transformer_jax.data.splits import Split
from transformer_jax.errors import StorageError
from transformer_jax.evaluation.evaluation_files import read_evaluation_file, read_translations
from transformer_jax.sweeps.plan import SweepRun
from transformer_jax.sweeps.status import newest_evaluation


class Sentence(NamedTuple):
    """A sentence from the dev or test set, with one run's translation."""

    source_tokens: int
    target_tokens: int
    nll: float
    """The negative log-likelihood of the reference, in nats."""
    hypothesis: str
    reference: str

    @property
    def length(self) -> int:
        """The number of tokens in the source or the target, whichever is longer, including EOS."""
        return max(self.source_tokens, self.target_tokens)


def read_sentences(run: SweepRun, split: Split) -> Iterator[Sentence]:
    """Yield a split's sentences from the latest evaluation that used the run's own search options.

    Raises:
        StorageError: the run has not been evaluated on the split, or a file is missing or invalid.
    """
    advice = f"run `{shell_command('evaluate', run.path, '--split', split)}`"
    newest = newest_evaluation(run, split)
    if newest is None:
        raise StorageError(f"{run.path} has no scores of its {split} split: {advice}")
    try:
        content = read_evaluation_file(newest, "sentences.csv").decode()
        rows = list(csv.DictReader(content.splitlines()))
        for row, hypothesis, reference in zip(rows, *read_translations(newest), strict=True):
            lengths = int(row["source_tokens"]), int(row["target_tokens"])
            yield Sentence(*lengths, float(row["nll"]), hypothesis, reference)
    except (StorageError, KeyError, TypeError, ValueError) as error:
        raise StorageError(f"{newest} cannot be read: {error}; {advice}") from error
