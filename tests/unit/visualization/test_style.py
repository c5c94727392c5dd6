"""Test that figure files are reproducible, and that lines differ in color or style."""

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from transformer_jax.errors import StorageError, UsageError
from transformer_jax.visualization.plots import average_runs, draw_curves
from transformer_jax.visualization.style import PALETTE, Picture, line_style

HOSTILE = "<script>$x$ & \"'"


@pytest.fixture(scope="module")
def picture() -> Picture:
    curve = average_runs(HOSTILE, [{1: 2.0, 2: 1.0}, {1: 4.0, 2: 1.0, 3: 0.5}])
    other = average_runs("other", [{1: 3.0, 2: 2.0}])
    return draw_curves({"dev/loss": [curve, other]})


def test_the_same_data_gives_the_same_bytes(picture: Picture, tmp_path: Path) -> None:
    curves = {"loss": [average_runs("a", [{1: 2.0, 2: 1.0}])]}
    assert draw_curves(curves).svg == draw_curves(curves).svg
    for suffix in ("svg", "png"):
        files = [picture.save(tmp_path / f"{number}.{suffix}") for number in range(2)]
        first, second = (file.read_bytes() for file in files)
        assert first == second
        assert len(first) > 1000
    assert (tmp_path / "0.png").read_bytes() == picture._repr_png_()
    assert picture.save(tmp_path / "2.SVG").read_text("utf-8") == picture.svg


def test_a_picture_is_written_only_in_known_formats(picture: Picture, tmp_path: Path) -> None:
    for name in ("x.gif", "x", "x.SVGZ"):
        with pytest.raises(UsageError, match=r"must end in \.svg or \.png, got"):
            picture.save(tmp_path / name)
    with pytest.raises(StorageError, match=r"x\.svg cannot be written: No such file"):
        picture.save(tmp_path / "nowhere" / "x.svg")
    assert not list(tmp_path.iterdir())


def test_many_lines_have_different_combinations_of_color_and_style() -> None:
    assert len({line_style(number) for number in range(32)}) == 32
    assert [line_style(number)[0] for number in range(8)] == list(PALETTE)


def test_the_repr_of_a_picture_lists_its_panels(picture: Picture) -> None:
    assert repr(picture) == "Picture(dev/loss, in nats per token)"
    assert isinstance(picture.figure, Figure)
