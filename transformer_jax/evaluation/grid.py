"""Score a run with many beam sizes, length penalties, and numbers of averaged checkpoints.

The authors chose their search settings "after experimentation on the development set" (section
6.1). Every evaluation is stored in the run, so running a grid again computes only the missing
evaluations.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from transformer_jax import progress
from transformer_jax.config import DecodeConfig
from transformer_jax.data.splits import Split
from transformer_jax.errors import Setting, StorageError, UsageError
from transformer_jax.evaluation.evaluate import EvaluationText, evaluate_text, read_text
from transformer_jax.evaluation.evaluation_files import find_result, save_evaluation
from transformer_jax.evaluation.perplexity import SentenceScore
from transformer_jax.files import JsonObject
from transformer_jax.inference.trained_run import load_averages
from transformer_jax.runs.checkpoint_averaging import select_steps
from transformer_jax.runs.checkpoint_manager import CheckpointManager
from transformer_jax.runs.run_folder import RunFolder

# The paper averages 5 checkpoints of the base model, and 20 of the big model.
PAPER_AVERAGES = (1, 5, 20)


@dataclass(frozen=True)
class Grid:
    """The search settings and checkpoint counts that the grid combines."""

    beam_sizes: Sequence[int] = (1, 4, 8)
    alphas: Sequence[float] = (0.0, 0.6, 1.0)
    averages: Sequence[int] | None = None
    """The numbers of consecutive, intact checkpoints to average. None means 1, 5, and 20, except
    numbers that exceed the run's number of such checkpoints."""

    def __post_init__(self) -> None:
        counts = [1] if self.averages is None else self.averages
        if not (self.beam_sizes and self.alphas and counts):
            raise UsageError("a grid needs a beam size, an alpha, and a number of checkpoints")
        if min(counts) < 1:
            raise UsageError(f"averages must be positive, got {min(counts)}")

    def searches(self, decode: DecodeConfig) -> list[DecodeConfig]:
        """Return the decode configs to evaluate. Greedy search ignores alpha and runs only once."""
        own_alpha = [decode.length_penalty_alpha]
        return [
            replace(decode, beam_size=beam_size, length_penalty_alpha=alpha)
            for beam_size in sorted({*self.beam_sizes})
            for alpha in (own_alpha if beam_size == 1 else sorted({*self.alphas}))
        ]


def evaluate_grid(
    folder: RunFolder, split: Split, grid: Grid, *, step: int | None = None
) -> list[JsonObject]:
    """Return the result of every search with every averaged model, sorted by settings.

    `step`, the last step of each average, defaults to the latest scheduled step or, without
    averages, to the latest step. If a result cannot be stored, issue a note.
    """
    if folder.package is not None:
        raise UsageError(f"{folder.path} is a package and has no separate checkpoints")
    searches = grid.searches(folder.config.decode)
    with CheckpointManager(folder.checkpoints, folder.identity) as checkpoints:
        averages, steps = _select_averages(checkpoints, grid, step)
    results = {
        (count, search): find_result(folder, split, steps[-count:], search)
        for count in averages
        for search in searches
    }
    missing = {count for (count, _), result in results.items() if result is None}
    text: EvaluationText | None = None
    notes: list[str] = []
    for run in load_averages(folder, steps, missing):
        text = text or read_text(run, split)
        count = run.average_checkpoints
        pending = [search for search in searches if results[count, search] is None]
        num_done = sum(result is not None for result in results.values())
        numbers = dict.fromkeys((num_done + 1, num_done + len(pending)))
        title = f"evaluation {' to '.join(map(str, numbers))} of {len(results)}"
        sentences: list[SentenceScore] | None = None
        with progress.task(title, len(text.sources) * len(pending)):
            for search in pending:
                # Compute the perplexity of each averaged model only once.
                evaluation = evaluate_text(run, text, asdict(search), sentences=sentences)
                sentences, results[count, search] = evaluation.sentences, evaluation.result
                try:
                    save_evaluation(run, evaluation)
                except StorageError as error:
                    notes.append(str(error))
    for note in dict.fromkeys(notes):
        progress.note(note)
    return [result for result in results.values() if result is not None]


def _select_averages(
    checkpoints: CheckpointManager, grid: Grid, step: int | None
) -> tuple[list[int], list[int]]:
    """Return the size of each average, and the steps of the checkpoints available for averaging."""
    requested = sorted({*(PAPER_AVERAGES if grid.averages is None else grid.averages)})
    steps = select_steps(checkpoints, requested[-1], step, allow_fewer=True)
    averages = [count for count in requested if count <= len(steps)]
    if grid.averages is not None and averages != requested:
        until = "" if step is None else f" up to step {step}"
        raise UsageError(
            f"cannot average {requested[-1]} checkpoints: {checkpoints.run} has only "
            f"{len(steps)} that can be averaged{until}; pass ",
            Setting("averages", averages or [len(steps)]),
        )
    if averages == [1]:
        # A single checkpoint can be evaluated even if it is not scheduled.
        steps = select_steps(checkpoints, 1, step)
    return averages, steps
