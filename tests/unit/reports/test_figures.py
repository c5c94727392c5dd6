"""Test that figures show every row, and that their labels do not overlap."""

import itertools
import math
import re
from pathlib import Path

import pytest
from example_configs import SMALL
from run_files import collect, make_finished_sweep, set_status, write_results

from transformer_jax.config import Paper, Row
from transformer_jax.reports.figures import (
    CUT_CAPTION,
    OPEN_CAPTION,
    PALETTE,
    describe_ratios,
    draw_curves,
    draw_ratios,
)
from transformer_jax.reports.results import Results
from transformer_jax.sweeps.plan import plan_sweep

NUM_ROWS = 12
NAMES = ("base", "a", "b", "c", "d", "wide")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Results with more rows than a figure has colors."""
    rows = {
        f"row{i}": Row(SMALL.change(model={"d_ff": 32 + i}), Paper(4.0 + i / 10))
        for i in range(NUM_ROWS)
    }
    sweep = plan_sweep(tmp_path_factory.mktemp("figures") / "s", rows, 2)
    sweep.store()
    for run in sweep.runs:
        perplexity = 4.0 + int(run.row.removeprefix("row")) / 10 + run.seed / 100
        write_results(run, perplexity, 10, splits=["dev"])
        set_status(run, "done")
    return collect(sweep)


def test_each_figure_is_an_svg_that_names_every_row(tmp_path: Path) -> None:
    rows = ["base", "worse"]
    results = collect(make_finished_sweep(tmp_path / "s", rows, splits=["dev"]))
    for svg in (draw_curves(results).svg, draw_ratios(results).svg):
        assert svg.count("<svg") == 1
        assert all(f">{name}" in svg for name in rows)


def test_curves_highlight_eight_rows_with_bands(results: Results) -> None:
    svg = draw_curves(results).svg
    names = re.findall(r">(row\d+)<", svg)
    # Only the first row and the rows that differ the most from it are highlighted, in the order of
    # the rows.
    assert names == ["row0", *(f"row{i}" for i in range(NUM_ROWS - len(PALETTE) + 1, NUM_ROWS))]
    assert svg.count("other rows") == 1
    assert svg.rindex("other rows") > max(svg.rindex(f">{name}<") for name in names)
    assert svg.count('id="FillBetweenPolyCollection') == len(PALETTE)
    assert all(color.lower() in svg for color in PALETTE[1:])


def test_labels_of_ticks_are_round_numbers_that_do_not_overlap(results: Results) -> None:
    for svg in (draw_curves(results).svg, draw_ratios(results).svg):
        assert "e-0" not in re.sub(r"<style.*?</style>", "", svg)
    positions = [
        float(y)
        for y in re.findall(r'id="ytick_\d+">.*?y="([\d.]+)"', draw_curves(results).svg, re.DOTALL)
    ]
    assert len(positions) >= 3
    assert min(abs(a - b) for a, b in itertools.pairwise(positions)) > 12


def test_a_curve_that_diverges_and_any_name_are_shown(tmp_path: Path) -> None:
    name = "a-name-that-is-much-longer-than-the-names-of-other-rows"
    sweep = plan_sweep(tmp_path / "s", {"base": Row(SMALL), name: Row(SMALL)}, 1)
    sweep.store()
    for run in sweep.runs:
        write_results(run, 4.0, 10, splits=["dev"])
        set_status(run, "done")
    with (sweep.runs[1].path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "split": "dev", "perplexity": NaN}\n')
    results = collect(sweep)
    for svg in (draw_curves(results).svg, draw_ratios(results).svg):
        assert ">base<" in svg
        assert f">{name}<" in svg
    ticks = re.findall(
        r"<g id=\"ytick_\d+\">.*?>([^<>\s]+)</text>", draw_curves(results).svg, re.DOTALL
    )
    # NaN is plotted at `MAX_PERPLEXITY`, so the values cover a wide range, and the axis is
    # logarithmic.
    assert {"10", "1000", "100000"} <= set(ticks)


def test_ratios_show_intervals_the_paper_and_a_band(results: Results) -> None:
    svg = draw_ratios(results).svg
    assert all(
        label in svg
        for label in (">here, dev set, with 95%", ">in the paper<", ">not significant, dev set<")
    )
    assert "the circle for the development set is" in describe_ratios(results)
    assert CUT_CAPTION not in describe_ratios(results)


def test_an_interval_that_is_far_too_wide_does_not_hide_the_others(tmp_path: Path) -> None:
    # The scores of row "wide" vary so much between seeds that its interval would fill the figure.
    rows = {name: Row(SMALL.change(model={"d_ff": 32 + i})) for i, name in enumerate(NAMES)}
    sweep = plan_sweep(tmp_path / "s", rows, 3)
    sweep.store()
    for run in sweep.runs:
        spread = 2.0 if run.row == "wide" else 0.01 * NAMES.index(run.row)
        write_results(run, 4.0 * math.exp(spread * run.seed), 10, splits=["dev"])
        set_status(run, "done")
    results = collect(sweep)
    interval = results.compare("wide", "perplexity").interval
    assert interval is not None
    assert interval.high > 10
    texts = re.findall(
        r'<g id="xtick_\d+">.*?>([^<>\s]+)</text>', draw_ratios(results).svg, re.DOTALL
    )
    ticks = [float(text.replace("\N{MINUS SIGN}", "-")) for text in texts]
    assert 0.5 < max(ticks) < 3
    assert CUT_CAPTION in describe_ratios(results)


def test_a_row_without_an_interval_has_an_open_circle(tmp_path: Path) -> None:
    found = {}
    for seeds in (1, 3):
        rows = {name: Row(SMALL.change(model={"d_ff": 32 + i})) for i, name in enumerate("ab")}
        sweep = plan_sweep(tmp_path / str(seeds), rows, seeds)
        sweep.store()
        for run in sweep.runs:
            write_results(run, 4.0 + run.seed / (2 + "ab".index(run.row)), 10, splits=["dev"])
            set_status(run, "done")
        results = collect(sweep)
        assert (OPEN_CAPTION in describe_ratios(results)) == (seeds == 1)
        colors = [x.get_markerfacecolor() for x in draw_ratios(results).figure.axes[0].lines]
        found[seeds] = colors.count("none")
    assert found == {1: 1, 3: 0}


def test_the_legend_of_long_names_fits_in_the_figure(tmp_path: Path) -> None:
    long = "attention_score-scaled_dot_product+d_k-"
    for names in ([f"{long}{number}" for number in range(8)], ["base", "A1", "A2", "A3"]):
        sweep = plan_sweep(tmp_path / names[0], {name: Row(SMALL) for name in names}, 1)
        sweep.store()
        for run in sweep.runs:
            write_results(run, 4.0, 10, splits=["dev"])
            set_status(run, "done")
        figure = draw_curves(collect(sweep)).figure
        figure.canvas.draw()
        [legend] = figure.legends
        assert legend.get_window_extent().width <= figure.bbox.width
        assert legend.get_window_extent().height < figure.bbox.height / 2


def test_rows_with_equal_scores_draw_a_figure_without_a_warning(tmp_path: Path) -> None:
    rows = {name: Row(SMALL.change(model={"remat": name == "remat"})) for name in ("base", "remat")}
    sweep = plan_sweep(tmp_path / "s", rows, 2)
    sweep.store()
    for run in sweep.runs:
        write_results(run, 4.0 + run.seed, 10, splits=["dev"])
        set_status(run, "done")
    assert ">remat" in draw_ratios(collect(sweep)).svg
