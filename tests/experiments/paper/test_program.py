"""Test program analysis on functions whose matrix products can be counted by hand."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from experiments.paper.program import Program, analyze

X = jnp.ones((4, 3))
W = jnp.ones((3, 3))


def test_a_chain_of_products_is_sequential_and_a_sum_of_products_is_not() -> None:
    def chain(w: Any, x: Any) -> Any:
        return jnp.tanh(jnp.tanh(x @ w) @ w) @ w

    def total(w: Any, x: Any) -> Any:
        return x @ w + x @ (2 * w) + x @ (3 * w)

    flops = 3 * 2 * 4 * 3 * 3
    assert analyze(chain, W, X) == Program(3, flops, 0, 0)
    assert analyze(total, W, X) == Program(1, flops, 0, 0)


def test_products_of_two_inputs_are_told_from_products_with_parameters() -> None:
    def attend(w: Any, x: Any) -> Any:
        scores = jax.nn.softmax((x @ w) @ x.T)
        return scores @ (x @ w)

    products = {"projections": 2 * (2 * 4 * 3 * 3), "data": 2 * (2 * 4 * 4 * 3)}
    assert analyze(attend, W, X) == Program(3, sum(products.values()), products["data"], 0)


@pytest.mark.parametrize("length", [1, 4])
def test_each_trip_of_a_loop_counts(length: int) -> None:
    def step(state: Any, x: Any) -> Any:
        state = jnp.tanh(state @ W)
        return state, state + x @ W

    def loop(w: Any, x: Any) -> Any:
        return jax.lax.scan(step, jnp.zeros(3), (x @ w)[:length])[1]

    # The loop multiplies the state by a matrix `length` times. Each input is multiplied twice.
    depth = max(length, 2)
    flops = 2 * 4 * 3 * 3 + length * 2 * (2 * 3 * 3)
    assert analyze(loop, W, X) == Program(depth, flops, 0, length)


def test_a_map_has_no_sequential_trips() -> None:
    program = analyze(lambda w, x: jax.lax.map(lambda row: row @ w, x), W, X)
    assert (program.sequential, program.trips) == (1, 0)
    assert program.flops == 2 * 4 * 3 * 3


def test_nested_functions_and_branches_are_visited() -> None:
    @jax.jit
    def product(x: Any) -> Any:
        return x @ W

    def branch(w: Any, x: Any) -> Any:
        y = jax.checkpoint(product)(x)
        return jax.lax.cond(x[0, 0] > 0, lambda y: y @ w @ w, lambda y: y, y)

    assert analyze(branch, W, X).sequential == 3


@pytest.mark.parametrize(("groups", "kernel"), [(1, (5, 6, 8)), (2, (5, 3, 8))])
def test_a_convolution_counts_one_product_per_position_and_kernel_element(
    groups: int, kernel: tuple[int, ...]
) -> None:
    def convolve(w: Any, x: Any) -> Any:
        names = ("NWC", "WIO", "NWC")
        return jax.lax.conv_general_dilated(
            x, w, (1,), "SAME", dimension_numbers=names, feature_group_count=groups
        )

    program = analyze(convolve, jnp.ones(kernel), jnp.ones((2, 7, 6)))
    assert program == Program(1, 2 * 2 * 7 * 8 * 5 * (6 // groups), 0, 0)


def test_a_loop_without_a_known_number_of_trips_is_rejected() -> None:
    def loop(w: Any, x: Any) -> Any:
        return jax.lax.while_loop(lambda y: y[0, 0] < 9, lambda y: y @ w + 1, x)

    with pytest.raises(ValueError, match="number of iterations"):
        analyze(loop, W, X)
