"""Test the positional-encoding figure and the metrics that it shows."""

import numpy as np
import pytest
from oracles import sinusoid as sinusoid_oracle
from pictures import axes_of, image_of, lines_of

from transformer_jax.visualization.positions import dot_products, draw_positions, fit_linear_map

SINUSOIDS = sinusoid_oracle(48, 16).astype(np.float32)
RANDOM = np.random.default_rng(0).standard_normal((48, 16)).astype(np.float32)


def test_the_dot_product_of_sinusoids_depends_only_on_the_offset() -> None:
    products = dot_products(SINUSOIDS, 5)
    for offset in range(5):
        pairs = [float(SINUSOIDS[i] @ SINUSOIDS[i + offset]) for i in range(40)]
        np.testing.assert_allclose(pairs, products[offset], atol=1e-4)


@pytest.mark.parametrize("offset", [1, 7])
def test_a_linear_map_shifts_sinusoids_but_not_a_random_table(offset: int) -> None:
    matrix, residual = fit_linear_map(SINUSOIDS, offset)
    assert residual < 1e-4
    np.testing.assert_allclose(SINUSOIDS[:-offset] @ matrix.T, SINUSOIDS[offset:], atol=1e-3)
    assert fit_linear_map(RANDOM, offset)[1] > 0.9


def test_a_table_with_fewer_positions_than_dimensions_does_not_fit_itself() -> None:
    assert fit_linear_map(RANDOM[:12], 1)[1] > 0.9


def test_positions_show_each_table_its_map_and_its_measures() -> None:
    picture = draw_positions({"sinusoids": SINUSOIDS, "learned": RANDOM}, offset=2)
    panels = axes_of(picture)
    np.testing.assert_array_equal(image_of(panels["sinusoids"]), SINUSOIDS)
    np.testing.assert_array_equal(image_of(panels["learned"]), RANDOM)
    maps = [title for title in panels if title.startswith("map to PE(pos + 2), residual")]
    assert len(maps) == 2
    products = lines_of(panels["Dot product of PE(pos) and PE(pos + k)"])
    np.testing.assert_allclose(products["sinusoids"], dot_products(SINUSOIDS, 24))
    residuals = lines_of(panels["Residual of the linear map to PE(pos + k)"])
    assert max(residuals["sinusoids"]) < 1e-3
    assert min(residuals["learned"]) > 0.5
    assert len(axes_of(draw_positions({"sinusoids": SINUSOIDS}))) >= 4
