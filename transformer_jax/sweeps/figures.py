"""Draw the figures of a report as SVG. The same runs give the same bytes."""

import io
from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from transformer_jax.sweeps.results import Results
from transformer_jax.sweeps.status import read_metrics

LINE_STYLES = ("-", "--", ":", "-.")


def draw_curves(results: Results) -> str:
    """Draw perplexity on the development set by step: one line per run, one color per row."""

    def draw(axes: Axes) -> None:
        colors = mpl.colormaps["turbo"]
        for number, (name, row) in enumerate(results.rows.items()):
            # Only the first line of a row has a label, so that the legend lists each row once.
            label: str | None = _escape_formula(name)
            for status in row.statuses:
                if points := _read_dev_perplexities(status.run.path / "metrics.jsonl"):
                    axes.plot(
                        *zip(*points, strict=True),
                        color=colors((number + 0.5) / len(results.rows)),
                        linestyle=LINE_STYLES[number % len(LINE_STYLES)],
                        alpha=0.8,
                        linewidth=1.3,
                        label=label,
                    )
                    label = None
        axes.set(xlabel="step", ylabel="perplexity, development set", yscale="log")
        axes.yaxis.set_major_formatter(LogFormatter())
        axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))

    return _to_svg(draw, height=5.0)


def draw_ratios(results: Results) -> str:
    """Draw each row's perplexity relative to the first row's, here and in the paper.

    The error bars show one standard deviation over seeds.
    """

    def draw(axes: Axes) -> None:
        base = results.base.scores.get("perplexity")
        paper_base = results.base.paper.perplexity
        for y, row in enumerate(results.rows.values()):
            ours, paper = row.scores.get("perplexity"), row.paper.perplexity
            if base is not None and ours is not None:
                axes.errorbar(
                    ours.mean / base.mean,
                    y,
                    xerr=(ours.deviation or 0.0) / base.mean,
                    color="#0072B2",
                    marker="o",
                    capsize=3,
                    label="ours" if row is results.base else None,
                )
            if paper_base is not None and paper is not None:
                axes.plot(
                    paper / paper_base,
                    y,
                    color="#D55E00",
                    marker="D",
                    markerfacecolor="none",
                    linestyle="none",
                    label="the paper's" if row is results.base else None,
                )
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.set_yticks(
            range(len(results.rows)),
            [_escape_formula(f"{row.name}  {row.change}") for row in results.rows.values()],
        )
        axes.invert_yaxis()
        xlabel = _escape_formula(f"perplexity / perplexity of {results.base.name}")
        axes.set(xlabel=xlabel, xscale="log")
        axes.xaxis.set_major_formatter(LogFormatter())
        axes.xaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))

    return _to_svg(draw, height=1.2 + 0.28 * len(results.rows))


def _to_svg(draw: Callable[[Axes], None], height: float) -> str:
    with mpl.rc_context({"svg.hashsalt": "transformer_jax", "svg.fonttype": "none"}):
        figure = Figure(figsize=(9, height), layout="constrained")
        axes = figure.subplots()
        draw(axes)
        axes.grid(alpha=0.3, which="both")
        handles, _ = axes.get_legend_handles_labels()
        if handles:
            figure.legend(loc="outside right upper", fontsize="small")
        out = io.StringIO()
        # Omit the date, so that the file depends only on the runs.
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def _escape_formula(text: str) -> str:
    """Escape dollar signs, between which matplotlib expects a formula."""
    return text.replace("$", r"\$")


def _read_dev_perplexities(path: Path) -> list[tuple[int, float]]:
    """Return (step, perplexity) pairs."""
    return [(x["step"], x["perplexity"]) for x in read_metrics(path) if x.get("split") == "dev"]
