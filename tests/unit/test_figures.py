"""Test that the figures of a report show every row."""

from pathlib import Path

from finished_runs import collect, make_finished_sweep

from transformer_jax.sweeps.figures import draw_curves, draw_ratios


def test_each_figure_is_an_svg_that_names_every_row(tmp_path: Path) -> None:
    rows = ["base", "worse"]
    results = collect(make_finished_sweep(tmp_path / "s", rows, splits=["dev"]))
    for svg in (draw_curves(results), draw_ratios(results)):
        assert svg.count("<svg") == 1
        assert all(f">{name}" in svg for name in rows)
