"""The common style of all plots: colors, line styles, and deterministic output files."""

import io
import warnings
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from transformer_jax.files import parse_path
from transformer_jax.visualization.files import FIGURE_SUFFIXES, check_suffix, write_file

# Okabe and Ito's color-blind-safe palette, with Tol's wine color instead of yellow.
PALETTE = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255")
LINE_STYLES = ("-", "--", "-.", ":")
# A diverging, color-blind-safe colormap for positive and negative values.
DIVERGING = "RdBu_r"
GRID = {"alpha": 0.3, "linewidth": 0.6}
# Omit the date from SVG and PDF files and the Matplotlib version from PNG files, so that the same
# data produces the same file. SVG and PDF files still contain the Matplotlib version.
METADATA: dict[str, dict[str, None]] = {
    "svg": {"Date": None},
    "png": {"Software": None},
    "pdf": {"CreationDate": None},
}
PIXELS_PER_INCH = 150


class Picture:
    """A static plot. Notebooks display the plot, and `save` writes it to a file."""

    def __init__(self, figure: Figure) -> None:
        self.figure = figure
        """The matplotlib figure, which can be modified before it is saved."""

    def __repr__(self) -> str:
        titles = [axes.get_title() or axes.get_ylabel() for axes in self.figure.axes]
        return f"Picture({', '.join(filter(None, titles))})"

    def _repr_png_(self) -> bytes:
        return self._encode("png")

    @property
    def svg(self) -> str:
        """The plot as SVG, which is always identical for the same data and Matplotlib version."""
        return self._encode("svg").decode()

    @property
    def pdf(self) -> bytes:
        """The plot as a PDF. The same data and Matplotlib version always produce the same bytes."""
        return self._encode("pdf")

    def save(self, path: str | Path) -> Path:
        """Write the plot to a file whose name ends in .svg or .png.

        Raises:
            UsageError: the name has a different suffix.
            StorageError: the file cannot be written.
        """
        path = parse_path(path)
        suffix = check_suffix(path, FIGURE_SUFFIXES)
        write_file(path, self._encode(suffix.removeprefix(".")))
        return path

    def _encode(self, kind: str) -> bytes:
        out = io.BytesIO()
        with (
            mpl.rc_context({"svg.hashsalt": "transformer_jax", "svg.fonttype": "none"}),
            warnings.catch_warnings(),
        ):
            # A PNG shows a box for a missing glyph, but an SVG viewer can use a different font.
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")
            options = {"format": kind, "metadata": METADATA[kind], "dpi": PIXELS_PER_INCH}
            self.figure.savefig(out, **options)
        return out.getvalue()


def add_legend(axes: Axes, handles: Sequence[Artist] = ()) -> None:
    """Add a legend for `handles`, or for all artists that matplotlib would list."""
    handles = handles or axes.get_legend_handles_labels()[0]
    if handles:
        labels = [str(handle.get_label()) for handle in handles]
        axes.legend(handles, labels, fontsize="small", frameon=False)


def line_style(number: int) -> tuple[str, str]:
    """Return the color and style of a line; the first 32 combinations differ."""
    cycle, color = divmod(number, len(PALETTE))
    return PALETTE[color], LINE_STYLES[(color + cycle) % len(LINE_STYLES)]
