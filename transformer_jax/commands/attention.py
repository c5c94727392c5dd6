"""The `attention` command, which shows attention weights."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import FlagCreatePairsOff, Positional, arg

from transformer_jax.commands.arguments import as_option
from transformer_jax.commands.base import check_new_file
from transformer_jax.commands.inference import SEARCH_OPTIONS, RunCommand
from transformer_jax.console import stdout
from transformer_jax.errors import UsageError
from transformer_jax.files import find_free_path
from transformer_jax.visualization.attention_views import Kind, Selection, View
from transformer_jax.visualization.files import ATTENTION_SUFFIXES, check_suffix

DEFAULT = Path("attention.html")


@dataclass(frozen=True)
class Attention(RunCommand):
    """Draw what each attention head attends to, as an interactive page or a figure."""

    source: Positional[Annotated[str, arg(metavar="SOURCE", help_behavior_hint="(required)")]] = ""
    """The source sentence, in quotes."""
    target: Positional[Annotated[str | None, arg(metavar="[TARGET]")]] = None
    """A translation, in quotes. Default: the run's best translation."""
    out: Path | None = None
    """The file to create: an interactive page with all layers, heads, and views (.html), or a
    figure (.svg or .png). Default: attention.html or, if that file exists, attention-2.html, and so
    on."""
    layer: int = -1
    """The layer to show, counted from 0 as in Python; -1 is the last layer."""
    kind: Kind = "cross"
    """Which attention to show: the encoder's self-attention, the decoder's self-attention, or the
    decoder's attention to the encoder."""
    view: View = "heads"
    """`heads` shows two columns of tokens joined by lines, as in figures 3 to 5 of the paper.
    `grid` shows a heat map for each layer and head. `alignment` shows one heat map: the mean over
    the selected heads of the layer."""
    heads: tuple[int, ...] = ()
    """The heads to show, counted from 0. `grid` always shows all heads. Default: all."""
    position: int | None = None
    """Show only what the token at this position in the left column attends to. Positions are
    counted from 0. `alignment` only highlights the token, and `grid` ignores this option."""
    truncate: FlagCreatePairsOff[bool] = False
    """Truncate sentences that are too long instead of reporting an error."""

    argument_name = "a run and a source sentence"

    def run(self) -> None:
        # Check the options and the file before importing JAX, so that errors appear immediately.
        if self.target is not None:
            for name in self.select_given(*SEARCH_OPTIONS):
                option = as_option(name)
                raise UsageError(
                    f"{option} does not apply with a TARGET, because no search is performed"
                )
        selection = Selection(self.kind, self.layer, self.view, self.heads or None, self.position)
        out = find_free_path(DEFAULT) if self.out is None else self.out
        check_suffix(out, ATTENTION_SUFFIXES)
        check_new_file(out)
        run = self.load()
        attention = run.attention(
            self.source, self.target, truncate=self.truncate, **self.decode_changes
        )
        attention.save(out, **asdict(selection))
        stdout.print(f"{attention.source}\n  -> {attention.target}\nwrote {out}")
