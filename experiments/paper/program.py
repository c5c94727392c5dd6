"""Analyze the matrix products in a traced program and the dependencies between them.

A jaxpr is JAX's representation of a traced function. A convolution counts as a matrix product.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jaxtyping import PyTree

from transformer_jax.training.flops import PRODUCTS


class Program(NamedTuple):
    """Properties of the matrix products that a program computes from parameters and an input."""

    sequential: int
    """The length of the longest chain of products, each of which depends on the previous one."""
    flops: int
    """The FLOPs of all products. Each multiply-add counts as two FLOPs."""
    data_flops: int
    """The FLOPs of products of two arrays that both depend on the input, as in attention. In all
    other products, at least one factor does not depend on the input."""
    trips: int
    """The total number of iterations in all loops that carry state."""


class Value(NamedTuple):
    """The array properties that the analysis tracks."""

    depth: int
    """The length of the longest chain of matrix products that leads to the array."""
    is_data: bool
    """Whether the array depends on the program's input."""


def analyze(function: Callable[[PyTree, PyTree], PyTree], params: PyTree, x: PyTree) -> Program:
    """Trace `function(params, x)` without executing it, and analyze the program.

    The arguments are pytrees of arrays or of `jax.ShapeDtypeStruct`.

    Raises:
        ValueError: the program has a loop whose number of iterations is not known in advance.
    """
    closed = jax.make_jaxpr(function)(params, x)
    num_params = len(jax.tree.leaves(params))
    inputs = [Value(0, index >= num_params) for index in range(len(closed.jaxpr.invars))]
    counter = _Counter()
    outputs = counter.visit(closed.jaxpr, inputs)
    depth = max(value.depth for value in outputs)
    return Program(depth, counter.flops, counter.data_flops, counter.trips)


@dataclass
class _Counter:
    """A visitor that reads the equations in order and counts the FLOPs of the matrix products."""

    flops: int = 0
    data_flops: int = 0
    trips: int = 0

    def visit(self, jaxpr: Jaxpr, inputs: Sequence[Value]) -> list[Value]:
        """Return the properties of the program's outputs."""
        known: dict[Var, Value] = {var: Value(0, False) for var in jaxpr.constvars}
        known |= dict(zip(jaxpr.invars, inputs, strict=True))

        def read(var: Var | Literal) -> Value:
            return Value(0, False) if isinstance(var, Literal) else known[var]

        for equation in jaxpr.eqns:
            results = self._apply(equation, [read(var) for var in equation.invars])
            known |= dict(zip(equation.outvars, results, strict=True))
        return [read(var) for var in jaxpr.outvars]

    def _apply(self, equation: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
        name, params = equation.primitive.name, equation.params
        if name == "scan":
            return self._scan(equation, inputs)
        if name == "while":
            raise ValueError("the number of iterations of a while loop is not known in advance")
        if name == "cond":
            branches = [self.visit(branch.jaxpr, inputs[1:]) for branch in params["branches"]]
            return [_join(values) for values in zip(*branches, strict=True)]
        for key in ("jaxpr", "call_jaxpr"):
            if key in params:
                return self.visit(getattr(params[key], "jaxpr", params[key]), inputs)
        result = _join(inputs)
        if name in PRODUCTS:
            flops = PRODUCTS[name](equation)
            self.flops += flops
            self.data_flops += flops * all(value.is_data for value in inputs)
            result = result._replace(depth=result.depth + 1)
        return [result] * len(equation.outvars)

    def _scan(self, equation: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
        params = equation.params
        first, last = _scan_inputs(params)
        constants, carry, slices = inputs[:first], list(inputs[first:last]), inputs[last:]
        stacked: list[Value] = []
        self.trips += params["length"] if carry else 0
        for _ in range(params["length"]):
            outputs = self.visit(params["jaxpr"].jaxpr, [*constants, *carry, *slices])
            carry, results = outputs[: len(carry)], outputs[len(carry) :]
            stacked = [_join(pair) for pair in zip(stacked or results, results, strict=True)]
        return [*carry, *stacked]


def _scan_inputs(params: Mapping[str, Any]) -> tuple[int, int]:
    """Return the indices of a scan's first carried input and of its first stacked input."""
    if "num_consts" in params:
        return params["num_consts"], params["num_consts"] + params["num_carry"]
    # Starting with jax 0.12, scans store the constants, the carry, and the stacked inputs as trees.
    constants, carry, _ = (len(part.vals) for part in params["ft_in"].unpack())
    return constants, constants + carry


def _join(values: Sequence[Value]) -> Value:
    """Return the properties of an array that is computed from arrays with the given properties."""
    depth = max((value.depth for value in values), default=0)
    return Value(depth, any(value.is_data for value in values))
