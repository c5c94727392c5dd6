"""Test that our Table 1 has the paper's exponents and the correct path lengths."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.paper.layers import LAYERS
from experiments.paper.table1 import (
    CLAIMS,
    Measurement,
    fit_exponent,
    measure_layers,
    path_length,
)

# The bounds in Table 1 of the paper.
TABLE_1 = {
    "Self-Attention": ("O(n² d)", "O(1)", "O(1)"),
    "Recurrent": ("O(n d²)", "O(n)", "O(n)"),
    "Convolutional": ("O(k n d²)", "O(1)", "O(log_k(n))"),
    "Self-Attention (restricted)": ("O(r n d)", "O(1)", "O(n/r)"),
}
# Section 4 gives the complexity of separable convolutions.
SECTION_4 = {"Separable Convolutional": ("O(k n d + n d²)", "O(1)", "O(log_k(n))")}

# The exponents of n and d in the paper's complexity column, and of n in the other two columns. The
# path through a stack of contiguous kernels has length O(n/k) (section 4).
EXPECTED = {
    "Self-Attention": (2, 1, 0, 0),
    "Recurrent": (1, 2, 1, 1),
    "Convolutional": (1, 2, 0, 1),
    # The second term of k n d + n d^2 is larger, because d exceeds k.
    "Separable Convolutional": (1, 2, 0, 1),
    "Self-Attention (restricted)": (1, 1, 0, 1),
}


@pytest.fixture(scope="module")
def measurements() -> list[Measurement]:
    return measure_layers([256, 512, 1024], [64, 128], timed=False)


def test_every_layer_has_the_papers_bounds() -> None:
    assert list(CLAIMS) == list(LAYERS)
    bounds = {name: (c.complexity, c.sequential, c.path) for name, c in CLAIMS.items()}
    assert bounds == TABLE_1 | SECTION_4


@pytest.mark.slow
def test_the_fitted_exponents_are_those_of_the_paper(measurements: list[Measurement]) -> None:
    for name, expected in EXPECTED.items():
        narrow = [m for m in measurements if (m.layer, m.d) == (name, 64)]
        long = [m for m in measurements if (m.layer, m.n) == (name, 1024)]
        n, d = [m.n for m in narrow], [m.d for m in long]
        fitted = (
            fit_exponent(n, [m.flops for m in narrow]),
            fit_exponent(d, [m.flops for m in long]),
            fit_exponent(n, [m.sequential for m in narrow]),
            fit_exponent(n, [m.path for m in narrow]),
        )
        assert fitted == pytest.approx(expected, abs=0.06), name


@pytest.mark.slow
def test_the_costs_of_self_attention_and_recurrence_are_those_of_their_formulas(
    measurements: list[Measurement],
) -> None:
    by_case = {(m.layer, m.n, m.d): m for m in measurements}
    attention, recurrent = by_case["Self-Attention", 512, 64], by_case["Recurrent", 512, 64]
    # Attention computes scores, weighted averages, and four projections.
    assert attention.flops == 2 * (2 * 512 * 512 * 64)
    assert attention.all_flops == attention.flops + 4 * (2 * 512 * 64 * 64)
    # The longest chain of matrix products consists of a projection, the scores, the weighted
    # average, and the output projection.
    assert (attention.sequential, attention.path) == (4, 1)
    # An LSTM has four gates, each with one matrix for the input and one for the state.
    assert recurrent.flops == 512 * 8 * (2 * 64 * 64)
    assert recurrent.path == 512
    assert 512 <= recurrent.sequential <= 513
    assert by_case["Convolutional", 512, 64].path == 511
    assert by_case["Self-Attention (restricted)", 512, 64].path == 8


def reached(name: str, num_layers: int, n: int) -> np.ndarray:
    """Return whether each input position affects the last output of a stack of layers.

    A position affects the output if the gradient with respect to it is not zero.
    """
    layer = LAYERS[name](d_model=8)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, n, 8)), jnp.float32)
    params = [layer.init(jax.random.key(i), x) for i in range(num_layers)]

    def output(x: Any) -> Any:
        for p in params:
            x = jnp.asarray(layer.apply(p, x))
        return x[0, -1].sum()

    return np.any(np.asarray(jax.grad(output)(x))[0] != 0, axis=-1)


@pytest.mark.parametrize("name", ["Convolutional", "Separable Convolutional"])
def test_the_path_length_is_the_number_of_layers_between_the_ends(name: str) -> None:
    n = 5
    layers = path_length(n, 1, 0)
    assert layers == 4
    assert reached(name, layers, n).all()
    assert not reached(name, layers - 1, n)[0]


@pytest.mark.slow
def test_one_layer_of_self_attention_or_recurrence_connects_the_ends() -> None:
    for name in ("Self-Attention", "Recurrent"):
        assert reached(name, 1, 9).all()
    assert path_length(9, None, 0) == 1
    assert path_length(9, None, 9) == 9


@pytest.mark.slow
def test_the_memory_of_self_attention_includes_all_of_its_weights() -> None:
    n, num_heads, float32 = 1024, 8, 4
    sizes = {m.layer: m.bytes or 0 for m in measure_layers([n], [8])}
    assert sizes["Self-Attention"] > num_heads * n**2 * float32
    others = [size for name, size in sizes.items() if name != "Self-Attention"]
    assert max(others) < num_heads * n**2 * float32 / 4
