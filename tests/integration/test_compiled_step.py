"""Test that steps compile once per batch shape, and that programs do not depend on the seed."""

import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from example_configs import SMALL
from jax.experimental.compilation_cache import compilation_cache
from training_runs import QUIET, UNRELATED, resume, train

from transformer_jax.baselines.build import build_model
from transformer_jax.config import Config, TrainConfig
from transformer_jax.training import loop
from transformer_jax.training.compiled_step import CompiledStep
from transformer_jax.training.components import RunComponents, build_run_components
from transformer_jax.training.create_run import create_run
from transformer_jax.training.meter import Meter
from transformer_jax.training.step import TrainStep, init_state


@pytest.fixture(scope="module")
def components(tmp_path_factory: pytest.TempPathFactory) -> RunComponents:
    folder = create_run(SMALL, tmp_path_factory.mktemp("runs") / "run", QUIET)
    return build_run_components(folder)


def train_epochs(run: RunComponents) -> Iterator[None]:
    """Train for two epochs, and yield after each epoch."""
    config = run.folder.config.train
    meter = Meter(1e9, [])
    step = CompiledStep(TrainStep(run.model, config), run.sharding)
    state = run.sharding.place_state(init_state(run.model, config))
    for index in range(2 * run.batches.per_epoch):
        batch = run.batches.local_batch(index, run.sharding.shard)
        state, metrics = step(state, batch)
        meter.add(metrics, run.step_flops(index + 1))
        if (index + 1) % run.batches.per_epoch == 0:
            yield


def compiled_by(action: Callable[[], Any], caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the names of the programs that JAX compiles while `action` runs."""
    caplog.clear()
    with jax.log_compiles(), caplog.at_level(logging.WARNING, logger="jax"):
        action()
    matches = [re.match(r"Compiling (\S+) with", record.getMessage()) for record in caplog.records]
    return [match[1] for match in matches if match]


@pytest.mark.slow
def test_a_step_is_compiled_once_for_each_shape_and_later_epochs_compile_nothing(
    components: RunComponents, caplog: pytest.LogCaptureFixture
) -> None:
    num_shapes = len(components.batches.buckets)
    assert num_shapes > 1
    epochs = train_epochs(components)
    compiled = compiled_by(lambda: next(epochs), caplog)
    assert compiled.count("jit(train_step)") == num_shapes, compiled
    # The step has been compiled for all shapes by this point, so another epoch must not compile
    # anything. The transfer guard raises an error if data moves between host and device without an
    # explicit transfer.
    with jax.transfer_guard("disallow"):
        assert compiled_by(lambda: next(epochs), caplog) == []
        # Check that the transfer guard actually raises errors.
        with pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed host-to-device"):
            jax.jit(jnp.negative)(np.ones(3))
    # Check that the log actually records compilations.
    assert compiled_by(lambda: jax.jit(lambda x: x + 3)(1), caplog)


@pytest.fixture
def cached_programs(tmp_path: Path) -> Iterator[Callable[[], set[str]]]:
    """A function that lists the programs in an initially empty compilation cache."""
    settings = {
        "jax_compilation_cache_dir": str(tmp_path / "programs"),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield lambda: {path.name for path in (tmp_path / "programs").glob("*-cache")}
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.mark.slow
def test_a_train_step_depends_neither_on_the_seed_nor_on_the_schedule_of_a_run(
    components: RunComponents, cached_programs: Callable[[], set[str]]
) -> None:
    batch = components.batches.local_batch(0, components.sharding.shard)

    def compile_step(config: TrainConfig) -> set[str]:
        step = CompiledStep(TrainStep(components.model, config), components.sharding)
        state = init_state(components.model, config)
        step.compile(components.sharding.place_state(state), batch)
        return {name for name in cached_programs() if "train_step" in name}

    first = compile_step(SMALL.train)
    assert len(first) == 1
    other = {
        "steps": 9,
        "seed": 1,
        "log_every": 3,
        "checkpoint_every": 5,
        "checkpoint_unit": "epoch",
        "bleu_every": 2,
        "patience": 4,
        "keep_checkpoints": 2,
        "max_minutes_between_checkpoints": 1.0,
        "profile": 1,
    }
    # Other tests assume that runs use the same compiled steps if they differ only in these fields.
    assert other.keys() == UNRELATED.keys()
    assert compile_step(SMALL.change(train=other).train) == first


@pytest.mark.slow
def test_rows_that_differ_only_in_numbers_share_a_program(
    components: RunComponents, cached_programs: Callable[[], set[str]]
) -> None:
    batch = components.batches.local_batch(0, components.sharding.shard)

    def compile_step(config: Config) -> set[str]:
        model = build_model(config.model, components.model.vocab_size)
        step = CompiledStep(TrainStep(model, config.train), components.sharding)
        step.compile(components.sharding.place_state(init_state(model, config.train)), batch)
        return {name for name in cached_programs() if "train_step" in name}

    base = compile_step(SMALL)
    assert len(base) == 1
    # The first four rows are rows D1 to D4 of Table 3.
    rows: list[dict[str, dict[str, float]]] = [
        {"model": {"dropout": 0.0}},
        {"model": {"dropout": 0.2}},
        {"train": {"label_smoothing": 0.0}},
        {"train": {"label_smoothing": 0.2}},
        {"train": {"learning_rate_scale": 2.0, "warmup_steps": 3}},
        {"train": {"adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-8}},
    ]
    for row in rows:
        assert compile_step(SMALL.change(**row)) == base, row
    # Clipping is an operation in the program, but its threshold is an argument.
    clipped = compile_step(SMALL.change(train={"clip_norm": 1.0}))
    assert len(clipped) == 2
    assert compile_step(SMALL.change(train={"clip_norm": 2.0})) == clipped


@pytest.mark.exhaustive
def test_whole_and_resumed_runs_of_all_seeds_share_their_programs(
    tmp_path: Path, cached_programs: Callable[[], set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # In other tests, the runs in a process reuse each other's compiled steps. In this test, each
    # run builds its own steps. No program of an earlier test is reused either.
    monkeypatch.setattr(loop, "TrainStep", TrainStep)
    jax.clear_caches()
    # Four steps make up one epoch, so each run uses every shape.
    config = SMALL.change(train={"steps": 4})
    train(config, tmp_path / "one")
    first = cached_programs()
    assert sum("train_step" in name for name in first) > 1
    train(config.change(train={"seed": 1}), tmp_path / "two")
    assert cached_programs() == first
    train(config.change(train={"seed": 2, "steps": 1}), tmp_path / "three")
    # Restoring a state requires a different program than initializing it, but the training step is
    # the same.
    resume(tmp_path / "three", train={"steps": 4})
    assert {name for name in cached_programs() - first if "train_step" in name} == set()
