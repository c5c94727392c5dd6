"""The `plot` command, which plots the metrics and other properties of runs."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from transformer_jax.commands.arguments import as_option
from transformer_jax.commands.base import PathCommand, check_new_file
from transformer_jax.commands.inference import load_run
from transformer_jax.console import progress_bar, stdout
from transformer_jax.errors import UsageError
from transformer_jax.files import find_free_path
from transformer_jax.runs.run_folder import RunFolder
from transformer_jax.visualization.files import FIGURE_SUFFIXES, check_suffix

if TYPE_CHECKING:
    from transformer_jax.inference.trained_run import Run
    from transformer_jax.visualization.style import Picture

Kind = Literal["curves", "schedule", "positions", "loss", "heads"]
# The options that apply to each kind of plot. All other options are rejected.
OPTIONS: Mapping[Kind, tuple[str, ...]] = {
    "curves": ("metrics",),
    "schedule": (),
    "positions": ("num_positions", "offset", "average_checkpoints", "step"),
    "loss": ("split", "average_checkpoints", "step"),
    "heads": ("split", "num_sentences", "margin", "average_checkpoints", "step"),
}


@dataclass(frozen=True)
class Plot(PathCommand):
    """Plot a run's metrics, learning rates, positional encodings, losses, or attention heads.

    curves: the metrics of one or more runs. Runs that differ only in their seed
    are combined into one line with a band.

    schedule: the learning rate, compared with the rates for other model widths
    and warmup lengths.

    positions: the encoder's positional encodings. Learned encodings are shown
    before and after training, next to sinusoids.

    loss: the loss by position and by sentence length.

    heads: how much the loss increases when each attention head is masked alone,
    and how many heads can be masked before the increase exceeds --margin.
    """

    folders: Positional[Annotated[tuple[str, ...], arg(metavar="RUN...")]] = ()
    """A run's folder. `curves` accepts several runs."""
    kind: Kind = "curves"
    """What to plot."""
    out: Annotated[Path | None, arg(help_behavior_hint="(required)")] = None
    """The file to create. The file name must end in .svg or .png."""
    metrics: tuple[str, ...] = ()
    """For `curves`: the names of the metrics, such as dev/perplexity. Default: train/loss,
    dev/perplexity, and dev/bleu."""
    num_positions: int | None = None
    """For `positions`: the number of positions to plot. Default: 128, or the model's maximum if
    that is smaller."""
    offset: int | None = None
    """For `positions`: the offset k of the linear map from PE(pos) to PE(pos + k). Default: 1."""
    split: Literal["dev", "test"] | None = None
    """For `loss` and `heads`: the split to score. Default: dev."""
    num_sentences: int | None = None
    """For `heads`: score the first N sentences in the split. Default: 256."""
    margin: float | None = None
    """For `heads`: the largest acceptable increase in loss, in nats per token. Default: 0.05."""
    average_checkpoints: int | None = None
    """For `positions`, `loss`, and `heads`: average the last N scheduled checkpoints. Default: the
    run's decode.average_checkpoints."""
    step: int | None = None
    """For `positions`, `loss`, and `heads`: the step of the checkpoint, or of the last checkpoint
    to average. Default: the latest."""

    def run(self) -> None:
        if len(self.folders) > 1 and self.kind != "curves":
            raise UsageError(
                f"--kind {self.kind} accepts one run, got {len(self.folders)}; only --kind curves "
                f"accepts several"
            )
        # Open the runs before importing JAX, so that a wrong path is reported immediately.
        folders = [RunFolder.open(Path(folder)) for folder in self.folders]
        out = self._check_options()
        stdout.print(f"written to {self._draw(folders).save(out)}")

    def _check_options(self) -> Path:
        for name in self.select_given(*itertools.chain.from_iterable(OPTIONS.values())):
            if name not in OPTIONS[self.kind]:
                kinds = [kind for kind, names in OPTIONS.items() if name in names]
                option = as_option(name)
                raise UsageError(f"{option} is for --kind {' or '.join(kinds)}, not {self.kind}")
        if self.out is None:
            free = find_free_path(Path(f"{self.kind}.svg"))
            raise UsageError(f"plot needs an output file: --out {free}")
        check_suffix(self.out, FIGURE_SUFFIXES)
        check_new_file(self.out)
        return self.out

    def _load(self) -> "Run":
        return load_run(Path(self.folders[0]), self.average_checkpoints, self.step)

    def _draw(self, folders: Sequence[RunFolder]) -> "Picture":
        match self.kind:
            case "curves":
                from transformer_jax.analysis.comparison import compare

                return compare(folder.path for folder in folders).plot(*self.metrics)
            case "schedule":
                from transformer_jax.analysis.plots import plot_schedule

                return plot_schedule(folders[0].config)
            case "positions":
                from transformer_jax.analysis.plots import plot_positions

                return plot_positions(self._load(), **self.select_given("num_positions", "offset"))
            case "loss":
                from transformer_jax.analysis.plots import plot_losses

                with progress_bar():
                    split = self.select_given("split")
                    return plot_losses(self._load(), **split)
            case "heads":
                return self._draw_heads()

    def _draw_heads(self) -> "Picture":
        from transformer_jax.analysis.head_importance import head_importance

        options = self.select_given("split", "num_sentences", "margin")
        with progress_bar():
            importance = head_importance(self._load(), **options)
        prunable = f"{importance.num_prunable} of {importance.masked_losses.size} heads"
        stdout.print(
            f"loss {importance.loss:.3f} nats per token; {prunable} can be masked, the least "
            f"important first, without raising it by more than {importance.margin:g}"
        )
        return importance.plot()
