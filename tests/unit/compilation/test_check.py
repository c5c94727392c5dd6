"""Test the check that a config fits in the memory of its target devices."""

from collections.abc import Callable

import pytest
from compilers import compile_by_formula

from transformer_jax.compilation import check, fit, topologies
from transformer_jax.compilation.programs import StepProgram
from transformer_jax.compilation.targets import Target
from transformer_jax.config import Config
from transformer_jax.data.batches import Bucket


def set_compiler(
    monkeypatch: pytest.MonkeyPatch, compiler: Callable[..., StepProgram] | None
) -> None:
    for module in (check, fit):
        monkeypatch.setattr(module, "compile_step", compiler)


@pytest.fixture(autouse=True)
def _no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "transformer_jax.commands.compilation.configure_environment", lambda **_: None
    )
    monkeypatch.setattr("transformer_jax.commands.sweeps.configure_environment", lambda **_: None)
    set_compiler(monkeypatch, compile_by_formula)
    devices = [None] * 64
    for module in ("transformer_jax.sweeps.estimates", topologies.__name__):
        monkeypatch.setattr(f"{module}.make_devices", lambda target: devices[: target.num_devices])


def test_the_answer_names_the_program_that_needs_the_most_memory() -> None:
    target = Target("v5e", (1, 1))
    buckets = [Bucket(rows, 16, 16, 0) for rows in (8, 32, 16)]
    programs = [compile_by_formula(Config(), target, [None], bucket) for bucket in buckets]
    assert check.Check(target, "data", "", tuple(programs)).largest.rows == 32
