"""Test the HTML summary of a run."""

import pytest
from run_files import write_recorded_run

from transformer_jax.inference.summary import summarize
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
    assert page.count("<svg") == 1
    assert "dev/perplexity" in page
    assert "/<b>run" not in page
    assert "&lt;b&gt;&amp;%_$#" in page
    # The text does not set a color, so it inherits the notebook's color.
    assert "#" not in page[: page.index("<svg")].replace("&#", "").replace("%_$#", "")
    assert "mean of 2 checkpoints" in summarize(run, (4, 8), 10)
