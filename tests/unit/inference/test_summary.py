"""Test the HTML summary of a run."""

import math
import re

import pytest
from run_files import write_recorded_run

from transformer_jax.inference.summary import inline_curve, summarize
from transformer_jax.runs.run_folder import RunFolder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return write_recorded_run(tmp_path_factory.mktemp("runs") / "<b>run")


def test_the_summary_shows_differences_scores_and_curves_as_escaped_text(
    run: RunFolder,
) -> None:
    page = summarize(run, (8,), 12_345)
    for part in ("step 8, 12,345 parameters", "model.d_model", ">512<", ">16<", "20.25", "40.50"):
        assert part in page
    assert page.count("<polyline") == 2
    assert "dev/perplexity 8.000 at step 8" in page
    assert "/<b>run" not in page
    assert "&lt;b&gt;&amp;%_$#" in page
    # The summary does not hard-code colors, so it inherits the notebook's colors.
    assert "#" not in page.replace("&#", "").replace("%_$#", "")
    assert "mean of 2 checkpoints" in summarize(run, (4, 8), 10)


def test_an_inline_curve_scales_finite_points_to_its_frame() -> None:
    svg = inline_curve([0, 5, 10, 20], [4.0, math.nan, 1.0, 0.0], width=108, height=58)
    [points] = re.findall(r'points="([^"]+)"', svg)
    assert points == "4.0,4.0 54.0,41.5 104.0,54.0"
    assert inline_curve([1], [2.0]) == ""
    assert inline_curve([], []) == ""
    assert "polyline" in inline_curve([1, 2], [3.0, 3.0])
