"""Print an index of the paper, or reproduce a table or figure.

python -m experiments.paper [ITEM] [OPTIONS]
"""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import FlagCreatePairsOff, Positional, arg

from experiments.paper.index import ITEMS, Item, to_markdown
from transformer_jax.commands.arguments import parse_program
from transformer_jax.commands.base import PathCommand, check_new_file
from transformer_jax.commands.tables import format_duration, print_table
from transformer_jax.config.validation import did_you_mean
from transformer_jax.console import progress_bar, run_and_report, stdout
from transformer_jax.errors import UsageError
from transformer_jax.files import find_free_path
from transformer_jax.visualization.files import FIGURE_SUFFIXES, check_suffix

LENGTHS, WIDTHS = (64, 256, 1024, 4096), (64, 128, 256)
# The default lengths and widths of `scorespeed`. A width is that of a single head.
SCORE_LENGTHS, SCORE_WIDTHS = (64, 256), (16, 32, 64, 128)
STEPS = 600
# The options that apply to each item. These options are rejected for all other items.
OPTIONS: Mapping[str, tuple[str, ...]] = {
    "table1": ("lengths", "widths", "exact", "out"),
    "table2": ("dry_run", "train", "steps", "seeds", "out"),
    "scorespeed": ("lengths", "widths"),
    "figure1": ("out",),
    "figure2": ("out",),
}


@dataclass(frozen=True)
class Paper(PathCommand):
    """List each table, figure, and equation in the paper with the command that reproduces it.

    table1: measure the layer types in Table 1.

    table2: compare the training cost of the models in Table 2, or train two small models.

    scorespeed: measure additive and dot-product attention.

    figure1, figure2: draw Figure 1 or Figure 2.

    For any other item, such as equation3 or section5.4, print its commands.
    """

    item: Positional[Annotated[str | None, arg(metavar="[ITEM]")]] = None
    """The item to print or reproduce, such as table1 or figure2. Default: list all items."""
    lengths: tuple[int, ...] = ()
    """For table1 and scorespeed: the sequence lengths n to measure. Default for table1:
    64 256 1024 4096. Default for scorespeed: 64 256."""
    widths: tuple[int, ...] = ()
    """For table1: the widths d to measure, each a multiple of 8. Default: 64 128 256. For
    scorespeed: the widths d_k of a head. Default: 16 32 64 128."""
    exact: FlagCreatePairsOff[bool] = False
    """For table1: compute only the exact quantities, not time and memory."""
    out: Path | None = None
    """For table1: a new folder for table.md and table.json. For table2 --train:
    the sweep's folder, by default sweeps/table2. For figures: the file to create,
    whose name ends in .svg or .png."""
    dry_run: FlagCreatePairsOff[bool] = False
    """For table2: estimate the training time and disk space on this machine."""
    train: FlagCreatePairsOff[bool] = False
    """For table2: train two small models on number words, average their checkpoints,
    and compare their BLEU and FLOPs."""
    steps: int = STEPS
    """For table2 --train: the number of steps of the smaller model. The larger model
    trains for twice as many steps."""
    seeds: int = 1
    """For table2 --train: the number of random seeds for each model."""

    markdown: FlagCreatePairsOff[bool] = False
    """Print the index in Markdown, as the website shows it."""

    def run(self) -> None:
        """Print the index or one of its entries, or reproduce a table or figure.

        Raises:
            UsageError: the item does not exist, or an option is invalid or does not apply to it.
        """
        names = {item.key: item for item in ITEMS}
        key = None if self.item is None else self.item.lower().replace(" ", "")
        if key is not None and key not in names:
            raise UsageError(f"the index has no {self.item!r}{did_you_mean(key, names)}")
        self._check_options(key)
        if self.markdown:
            if key is not None:
                raise UsageError("--markdown prints the whole index: do not pass an item")
            sys.stdout.write(f"{to_markdown()}\n")
            return
        match key:
            case None:
                _print_items(ITEMS)
            case "table1":
                self._measure_table1()
            case "table2" if self.train:
                self._train_table2()
            case "table2":
                _print_table2(dry_run=self.dry_run)
            case "scorespeed":
                self._measure_scores()
            case "figure1" | "figure2":
                self._draw(key)
            case _:
                _print_items([names[key]])

    def _check_options(self, key: str | None) -> None:
        for name in self.select_given(*sorted({x for names in OPTIONS.values() for x in names})):
            if name not in OPTIONS.get(key or "", ()):
                items = " or ".join(item for item, names in OPTIONS.items() if name in names)
                raise UsageError(f"--{name.replace('_', '-')} applies only to {items}")
        needing_train = self.select_given("steps", "seeds", "out") if key == "table2" else {}
        if needing_train and not self.train:
            raise UsageError(f"--{next(iter(needing_train))} needs --train")
        if self.train and self.dry_run:
            raise UsageError("--train and --dry-run cannot be combined")
        if min(self.steps, self.seeds) < 1:
            raise UsageError("--steps and --seeds must be positive")

    def _train_table2(self) -> None:
        from experiments.paper.table2 import make_small_rows, train_small

        path = self.out or Path("sweeps/table2")
        print_table(train_small(make_small_rows(self.steps), path, self.seeds))
        stdout.print(
            "BLEU: on the test set of number words. FLOPs (paper): training time x the peak\n"
            "FLOP/s of this machine. FLOPs (counted): matrix products without padding."
        )

    def _measure_scores(self) -> None:
        lengths, widths = self.lengths or SCORE_LENGTHS, self.widths or SCORE_WIDTHS
        if min(*lengths, *widths) < 1:
            raise UsageError("--lengths and --widths must be positive")
        from experiments.paper.scores import NUM_HEADS, measure_scores, summarize

        with progress_bar():
            measurements = measure_scores(lengths, widths)
        print_table(summarize(measurements))
        stdout.print(f"{NUM_HEADS} heads, no projections: time, and then memory.")

    def _measure_table1(self) -> None:
        lengths, widths = (
            tuple(dict.fromkeys(given))
            for given in (self.lengths or LENGTHS, self.widths or WIDTHS)
        )
        if min(lengths) < 2:
            raise UsageError(f"--lengths must be at least 2, got {min(lengths)}")
        if wrong := [width for width in widths if width < 8 or width % 8]:
            raise UsageError(f"--widths must be multiples of 8 (the heads), got {wrong[0]}")
        if self.out is not None:
            check_new_file(self.out)
        from experiments.paper.table1 import measure_layers
        from experiments.paper.table1_report import (
            list_details,
            list_notes,
            summarize,
            write_table1,
        )

        with progress_bar():
            measurements = measure_layers(lengths, widths, timed=not self.exact)
        print_table(summarize(measurements))
        stdout.print()
        print_table(list_details(measurements))
        for note in list_notes(measurements):
            stdout.print(f"- {note}")
        if self.out is not None:
            options = ["--exact"] if self.exact else []
            for name, values in (("lengths", self.lengths), ("widths", self.widths)):
                options += [f"--{name}", *map(str, values)] if values else []
            command = shlex.join(["python", "-m", "experiments.paper", "table1", *options])
            write_table1(measurements, self.out, command)
            stdout.print(f"written to {self.out}")

    def _draw(self, key: str) -> None:
        out = self.out or find_free_path(Path(f"{key}.svg"))
        check_suffix(out, FIGURE_SUFFIXES)
        check_new_file(out)
        from experiments.paper import figures

        draw = figures.draw_figure_1 if key == "figure1" else figures.draw_figure_2
        stdout.print(f"written to {draw().save(out)}")


def _print_items(items: Sequence[Item]) -> None:
    """Print each item, followed by its commands and its test, each on a separate line."""
    for item in items:
        stdout.print(f"{item.name}: {item.title}")
        for label, commands in item.commands.items():
            for number, command in enumerate(commands.splitlines()):
                stdout.print(f"  {'' if number else label:19}{command}")


def _print_table2(*, dry_run: bool) -> None:
    from experiments.paper import table2

    head = ["model", "languages", "BLEU", "FLOPs (paper)", "FLOPs (counted)"]
    rows = [[*head, "time here", "disk"] if dry_run else head]
    for training in table2.TABLE2:
        flops = f"{training.paper_flops:.2g}", f"{training.counted_flops:.2g}"
        row = [training.model, training.languages, f"{training.bleu}", *flops]
        if dry_run:
            seconds, size = table2.estimate_seconds(training), table2.estimate_disk(training)
            row += [format_duration(seconds), f"{size / 1e9:.0f} GB"]
        rows.append(row)
    print_table(rows)
    stdout.print(
        "BLEU: the paper's, on newstest2014. FLOPs (paper): time x 8 GPUs x 9.5 TFLOP/s, the\n"
        "sustained rate of a P100. FLOPs (counted): matrix products of full batches."
    )
    if dry_run:
        stdout.print("time here: if training reaches 30% of the peak of this machine's devices")
    for training in table2.TABLE2:
        stdout.print(f"\n{training.model}, {training.languages}")
        for command in training.commands:
            stdout.print(f"  {command}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code. Print any error as one line."""
    prog = "python -m experiments.paper"
    return run_and_report(lambda: parse_program(prog, Paper, arguments).run())


if __name__ == "__main__":
    sys.exit(main())
