"""Draw the figures of a report as SVG. The same runs give the same bytes."""

import io
from collections.abc import Callable

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
            color = colors((number + 0.5) / len(results.rows))
            style = LINE_STYLES[number % len(LINE_STYLES)]
            # The legend lists each row once.
            label: str | None = _escape_formula(name)
            for status in row.statuses:
                reports = read_metrics(status.run.path / "metrics.jsonl")
                dev = [(x["step"], x["perplexity"]) for x in reports if x.get("split") == "dev"]
                if dev:
                    line = {"color": color, "linestyle": style, "linewidth": 1.3, "alpha": 0.8}
                    axes.plot(*zip(*dev, strict=True), **line, label=label)
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
            is_base = row is results.base
            if base is not None and ours is not None:
                ours_style = {"color": "#0072B2", "marker": "o", "capsize": 3}
                bar, label = (ours.deviation or 0.0) / base.mean, "ours" if is_base else None
                axes.errorbar(ours.mean / base.mean, y, xerr=bar, label=label, **ours_style)
            if paper_base is not None and paper is not None:
                label = "the paper's" if is_base else None
                paper_style = {"color": "#D55E00", "marker": "D", "markerfacecolor": "none"}
                axes.plot(paper / paper_base, y, linestyle="none", label=label, **paper_style)
        axes.axvline(1.0, color="black", linewidth=0.8)
        names = [_escape_formula(f"{row.name}  {row.change}") for row in results.rows.values()]
        axes.set_yticks(range(len(names)), names)
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
        if axes.get_legend_handles_labels()[0]:
            figure.legend(loc="outside right upper", fontsize="small")
        out = io.StringIO()
        # Omit the date, so that the file depends only on the runs.
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def _escape_formula(text: str) -> str:
    """Escape dollar signs, between which matplotlib expects a formula."""
    return text.replace("$", r"\$")
