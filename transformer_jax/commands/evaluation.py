"""The `evaluate` command, which scores a run's model."""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import FlagCreatePairsOff, arg

from transformer_jax.commands import tables
from transformer_jax.commands.arguments import as_option, name_options
from transformer_jax.commands.base import translate_command
from transformer_jax.commands.inference import EnsembleCommand
from transformer_jax.config.validation import field_names
from transformer_jax.console import progress_bar, shell_command, stderr, stdout
from transformer_jax.errors import StorageError, UsageError
from transformer_jax.runs.run_folder import RunFolder

if TYPE_CHECKING:
    from transformer_jax.analysis.significance import MetricComparison
    from transformer_jax.evaluation.evaluate import Evaluation
    from transformer_jax.inference.trained_run import Run

GRID_OPTIONS = ("beam_sizes", "alphas", "averages")
# The arguments that a grid search accepts in addition to `GRID_OPTIONS`.
FOR_GRIDS = {"run_folder", "grid", "split", "step", "json", *GRID_OPTIONS}


@dataclass(frozen=True)
class Evaluate(EnsembleCommand):
    """Translate a run's test set, and store the translations and their scores in the run."""

    split: Literal["test", "dev"] | None = None
    """The split to translate. Default: test, or dev with --grid."""
    on: Annotated[tuple[Path, Path] | None, arg(metavar="SOURCE TARGET")] = None
    """Translate this source file, and score the translations against this target file. Both files
    contain one sentence per line and can be compressed with gzip, xz, or bzip2."""
    per_checkpoint: FlagCreatePairsOff[bool] = False
    """Also score each averaged checkpoint separately."""
    baseline: Annotated[Path | None, arg(metavar="RUN")] = None
    """Compare the scores with those of the run in this folder, using approximate randomization.
    Command-line options apply to both runs. For all other settings, each run uses its own
    config."""
    json: FlagCreatePairsOff[bool] = False
    """Print the scores as a JSON object or, with --grid, as a list of JSON objects."""
    by_length: FlagCreatePairsOff[bool] = False
    """Also print separate scores for sentences with 1 to 10 source tokens, 11 to 20, and so on."""
    grid: FlagCreatePairsOff[bool] = False
    """Score every combination of --beam-sizes, --alphas, and --averages on the development set. The
    command reuses stored evaluations, so you can resume an interrupted grid search."""
    beam_sizes: tuple[int, ...] = ()
    """With --grid: the beam sizes to try. Default: 1 4 8."""
    alphas: tuple[float, ...] = ()
    """With --grid: the exponents to try for the length penalty. Default: 0 0.6 1."""
    averages: tuple[int, ...] = ()
    """With --grid: the numbers of scheduled checkpoints to average. Default: 1, 5, and 20, if the
    run has that many consecutive checkpoints."""

    def run(self) -> None:
        if self.baseline is not None:
            # Open the baseline before importing JAX, so that a wrong path is reported immediately.
            RunFolder.open(self.baseline)
        if self.on is not None and self.split is not None:
            raise UsageError("--on and --split are mutually exclusive: pass only one of them")
        self._check_grid_options()
        if self.grid:
            self._run_grid()
            return
        run = self.load_all()
        if self.per_checkpoint and run.average_checkpoints == 1:
            raise UsageError(
                "--per-checkpoint needs averaged checkpoints: pass --average-checkpoints 2 or more"
            )
        from transformer_jax.analysis import significance
        from transformer_jax.data.corpora import bleu_tokenizer
        from transformer_jax.evaluation.evaluation_files import save_evaluation

        baseline = None if self.baseline is None else self.load(self.baseline)
        evaluation, other = self._evaluate(run, baseline)
        result = evaluation.result
        comparisons: list[MetricComparison] = []
        if baseline is not None and other is not None:
            comparisons = significance.compare(evaluation, other, bleu_tokenizer(run.config.data))
            result = {**result, "baseline": significance.describe(baseline, other, comparisons)}
        if self.json:
            stdout.print(json.dumps(result))
        else:
            tables.print_evaluation(evaluation)
            if self.by_length:
                tables.print_scores_by_length(evaluation.result["by_length"])
            if comparisons:
                tables.print_comparison(comparisons, self.run_folder, str(self.baseline))
            for source, hypothesis in list(zip(*evaluation[1:3], strict=True))[:3]:
                stdout.print(f"  {source}\n  -> {hypothesis}\n")
        try:
            folder = save_evaluation(run, evaluation)
            if other is not None:
                significance.save_comparison(folder, result["baseline"], other.hypotheses)
            stderr.print(f"stored in {folder}")
        except StorageError as error:
            stderr.print(f"note: {error}")
        if not self.json:
            members = "".join(f" {shlex.quote(str(path))}" for path in self.ensemble)
            options = self.checkpoint_options + (members and f" --ensemble{members}")
            stdout.print(f"next: {translate_command(run.folder, options)}")

    def _evaluate(
        self, run: "Run", baseline: "Run | None"
    ) -> tuple["Evaluation", "Evaluation | None"]:
        from transformer_jax.analysis.significance import check_comparable
        from transformer_jax.evaluation.evaluate import evaluate

        split, changes, each = self.split or "test", self.decode_changes, self.per_checkpoint
        with progress_bar():
            if baseline is not None and self.on is None:
                check_comparable(run, baseline, split)
            text = self.on or split
            evaluation = evaluate(run, text, changes, per_checkpoint=each)
            if baseline is None:
                return evaluation, None
            return evaluation, evaluate(baseline, text, changes)

    def _check_grid_options(self) -> None:
        """Reject grid options without `--grid`, and single-search options with `--grid`."""
        others = [name for name in field_names(type(self)) if name not in FOR_GRIDS]
        for name in self.select_given(*(others if self.grid else GRID_OPTIONS)):
            option = as_option(name)
            if not self.grid:
                raise UsageError(f"{option} needs --grid")
            raise UsageError(f"--grid cannot be combined with {option}: omit one of them")

    def _run_grid(self) -> None:
        folder = RunFolder.open(Path(self.run_folder))
        from transformer_jax.evaluation.grid import Grid, evaluate_grid

        grid = Grid(**self.select_given(*GRID_OPTIONS))
        split = self.split or "dev"
        names = {"beam_size": "beam_sizes", "length_penalty_alpha": "alphas"}
        with name_options(**names), progress_bar():
            results = evaluate_grid(folder, split, grid, step=self.step)
        if self.json:
            stdout.print(json.dumps(results))
            return
        best = tables.print_grid(results)
        options = f"--average-checkpoints {best['average_checkpoints']}"
        options += f" --beam-size {best['decode']['beam_size']}"
        # `repr` does not round, so the printed command runs the same search. Because that command
        # includes the step, it uses the same checkpoints even after training continues.
        options += f" --alpha {best['decode']['length_penalty_alpha']!r} --step {best['step']}"
        options += "" if "test" in folder.find_text().report else " --split dev"
        stdout.print(f"next: {shell_command('evaluate', folder.path)} {options}")
