"""Pictures of a sweep, as SVG: of the same runs the same bytes."""

import io
from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from transformer_jax.sweeps.results import Results
from transformer_jax.sweeps.status import read_reports

DASHES = ("-", "--", ":", "-.")


def curves(results: Results) -> str:
    """Draw perplexity of the development set by step: a line for each run, coloured by row."""

    def draw(axes: Axes) -> None:
        for number, (name, row) in enumerate(results.rows.items()):
            label: str | None = _plain(name)
            for state in row.states:
                if points := _dev_curve(state.run.path / "metrics.jsonl"):
                    axes.plot(
                        *zip(*points, strict=True),
                        color=mpl.colormaps["turbo"]((number + 0.5) / len(results.rows)),
                        linestyle=DASHES[number % len(DASHES)],
                        alpha=0.8,
                        linewidth=1.3,
                        label=label,
                    )
                    label = None
        axes.set(xlabel="step", ylabel="perplexity, development set", yscale="log")
        axes.yaxis.set_major_formatter(LogFormatter())
        axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))

    return _svg(draw, height=5.0)


def ratios(results: Results) -> str:
    """Draw how many times base's perplexity each row has: ours, a bar of one deviation, theirs."""

    def draw(axes: Axes) -> None:
        base = results.base.scores.get("perplexity")
        paper = results.base.paper.perplexity
        for place, row in enumerate(results.rows.values()):
            ours = row.scores.get("perplexity")
            if base is not None and ours is not None:
                axes.errorbar(
                    ours.mean / base.mean,
                    place,
                    xerr=(ours.deviation or 0.0) / base.mean,
                    color="#0072B2",
                    marker="o",
                    capsize=3,
                    label="ours" if row is results.base else None,
                )
            if paper is not None and row.paper.perplexity is not None:
                axes.plot(
                    row.paper.perplexity / paper,
                    place,
                    color="#D55E00",
                    marker="D",
                    markerfacecolor="none",
                    linestyle="none",
                    label="the paper's" if row is results.base else None,
                )
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.set_yticks(
            range(len(results.rows)),
            [_plain(f"{row.name}  {row.change}") for row in results.rows.values()],
        )
        axes.invert_yaxis()
        axes.set(xlabel=_plain(f"perplexity / perplexity of {results.base.name}"), xscale="log")
        axes.xaxis.set_major_formatter(LogFormatter())
        axes.xaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))

    return _svg(draw, height=1.2 + 0.28 * len(results.rows))


def _svg(draw: Callable[[Axes], None], height: float) -> str:
    with mpl.rc_context({"svg.hashsalt": "transformer_jax", "svg.fonttype": "none"}):
        figure = Figure(figsize=(9, height), layout="constrained")
        axes = figure.subplots()
        draw(axes)
        axes.grid(alpha=0.3, which="both")
        handles, _ = axes.get_legend_handles_labels()
        if handles:
            figure.legend(loc="outside right upper", fontsize="small")
        out = io.StringIO()
        # Without a date, the same runs give the same file.
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def _plain(text: str) -> str:
    """Return text that matplotlib does not take for a formula."""
    return text.replace("$", r"\$")


def _dev_curve(path: Path) -> list[tuple[int, float]]:
    return [(x["step"], x["perplexity"]) for x in read_reports(path) if x.get("split") == "dev"]
