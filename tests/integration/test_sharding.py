"""Test that every sharding gives the same results on 1 to 8 simulated devices."""

import functools
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from example_configs import SMALL
from training_runs import assert_same, state_of

import transformer_jax
from transformer_jax.data.batches import Batch, Bucket
from transformer_jax.model.build import build_transformer
from transformer_jax.training.compiled_step import CompiledStep
from transformer_jax.training.sharding import DataParallel
from transformer_jax.training.step import Numbers, TrainState, TrainStep, init_state

SUPPORT = Path(__file__).parents[1] / "support"


def run_program(*arguments: str, **environment: str) -> Any:
    """Run a Python program and return the JSON from the last line of its output."""
    done = subprocess.run(
        [sys.executable, *arguments],
        check=True,
        capture_output=True,
        text=True,
        cwd=SUPPORT,
        env={**os.environ, **environment},
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("8", "10", "0.3:data,fsdp,pmap"), marks=pytest.mark.slow),
        pytest.param(
            ("1,2,3,4,8", "20", "0:data,fsdp,pmap", "0.3:data,fsdp,pmap"),
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["8 devices", "1 to 8 devices"],
)
def comparison(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return how far the parameters are from the result of training on one device in float64.

    Also return the largest fraction of the training state that any device holds.
    Batches have 13 rows, which cannot be divided evenly among the devices.
    """
    return run_program("on_devices.py", "float64", *request.param)


def test_every_sharding_trains_as_one_device_does(comparison: dict[str, Any]) -> None:
    check_distances(comparison["distances"])


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["rnn", "conv"])
def test_every_sharding_trains_every_architecture_as_one_device_does(architecture: str) -> None:
    case = f"0.3:data,fsdp,pmap:{architecture}"
    check_distances(run_program("on_devices.py", "float64", "2", "10", case)["distances"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer",
    [
        "muon",
        "schedule_free",
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("lion", "adafactor")),
    ],
)
def test_every_sharding_trains_with_every_optimizer_as_one_device_does(optimizer: str) -> None:
    case = f"0.3:data,fsdp,pmap:transformer:{optimizer}"
    check_distances(run_program("on_devices.py", "float64", "2", "5", case)["distances"])


def check_distances(distances: dict[str, Any]) -> None:
    """For every dropout rate, check that sharded training matches training on one device."""
    cases = [case for of_rate in distances.values() for case in of_rate.items()]
    assert {name.split()[0] for name, _ in cases} == {"data", "fsdp", "pmap"}
    for name, distance in cases:
        # The dropout masks match those on one device, so the parameters match, too.
        assert distance["params"] < 1e-9, name
        # Adam's updates do not depend on the scale of the gradient, so also compare the gradient
        # norm. The first of eight devices has most of the tokens and the last device has no tokens,
        # so averaging the devices' means would give a different result.
        assert max(distance["metrics"]) < 1e-9, name


@pytest.mark.exhaustive
def test_losses_in_float32_agree_with_one_device() -> None:
    # Parameters may differ, because Adam amplifies the rounding errors in very small gradients.
    comparison = run_program("on_devices.py", "float32", "2,8", "20", "0:data,fsdp,pmap")
    for name, distance in comparison["distances"]["0"].items():
        smoothed, nll, count, _ = distance["metrics"]
        assert max(smoothed, nll) < 1e-3, name
        assert count == 0, name


def test_fsdp_divides_the_state_almost_equally(comparison: dict[str, Any]) -> None:
    shares = comparison["shares"]
    assert shares["1"] == 1
    assert set(shares) == {"1", "2", "4", "8"}
    for devices, share in shares.items():
        assert share <= 1.15 / int(devices)


MODEL = build_transformer(SMALL.model, 20)


class JittedStep(TrainStep):
    """A training step whose functions JAX traces only once for each shape."""

    compute_gradients = jax.jit(TrainStep.compute_gradients, static_argnums=0)
    apply_gradients = jax.jit(TrainStep.apply_gradients, static_argnums=0)

    def with_numbers(self, numbers: Numbers) -> TrainStep:  # noqa: ARG002 - the numbers are constants.
        return self


STEP = JittedStep(MODEL, SMALL.train)


@functools.cache
def make_state() -> TrainState:
    return init_state(MODEL, SMALL.train)


def placed_state(sharding: DataParallel) -> TrainState:
    """Return a copy of the initial state, because a step donates the state's arrays."""
    return sharding.place_state(jax.tree.map(jnp.copy, make_state()))


def test_a_step_is_compiled_on_request_and_describes_its_shape() -> None:
    sharding = DataParallel(jax.devices()[:1])
    step, state = CompiledStep(STEP, sharding), placed_state(sharding)
    batch = Batch(np.full((8, 5), 4, np.int32), np.full((8, 6), 4, np.int32))
    assert not step.is_compiled_for(batch)
    compilation = step.compile(state, batch)
    assert compilation.startswith("compiled for 8 x (5 + 6) tokens in ")
    assert step.is_compiled_for(batch)
    assert not step.is_compiled_for(Batch(batch.source, batch.source))
    new_state, metrics = step(state, batch)
    assert int(new_state.step) == 1
    assert float(metrics.loss.count) == 8 * 6


def test_a_step_compiled_while_training_gives_the_same_bits() -> None:
    sharding = DataParallel(jax.devices()[:1])
    batch = Batch(np.full((8, 5), 4, np.int32), np.full((8, 6), 4, np.int32))
    now = CompiledStep(STEP, sharding)
    with CompiledStep(STEP, sharding) as ahead:
        state = placed_state(sharding)
        ahead.compile_ahead(state, [Bucket(8, 5, 6, 1)])
        compilation = ahead.compile(state, batch)
        assert compilation.endswith(" s while training")
        results = [step(placed_state(sharding), batch) for step in (ahead, now)]
        assert not list(ahead.take_finished())
    jax.tree.map(np.testing.assert_array_equal, *results)


class FakeSharding(DataParallel):
    """A fake sharding that compiles nothing.

    Sources of length 6 cause an out-of-memory error.
    """

    def compile(self, step: TrainStep, state: TrainState, batch: Batch) -> Any:  # noqa: ARG002
        if batch.source.shape[1] == 6:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        return None


def test_an_error_while_training_is_raised_only_when_a_batch_needs_the_program() -> None:
    def new_threads() -> set[str]:
        return {thread.name for thread in threading.enumerate() if thread not in before}

    # Other tests in this process can have their own threads that compile.
    before = threading.enumerate()
    sharding, state = FakeSharding(jax.devices()[:1]), make_state()
    with CompiledStep(STEP, sharding) as step:
        step.compile_ahead(state, [Bucket(8, n, 6, 1) for n in (6, 5)])
        fitting, other = (np.full((8, n), 4, np.int32) for n in (5, 6))
        assert "for 8 x (5 + 6) tokens" in step.compile(state, Batch(fitting, other))
        assert not list(step.take_finished())
        with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
            step.compile(state, Batch(other, other))
        assert "compile_0" in new_threads()
    assert "compile_0" not in new_threads()


def test_gpus_compile_all_shapes_before_training() -> None:
    sharding = FakeSharding(jax.devices()[:1])
    sharding.platform = "gpu"
    tokens = np.ones((8, 5), np.int32)
    with CompiledStep(STEP, sharding) as step:
        step.compile(make_state(), Batch(tokens, tokens), [Bucket(8, 5, 6, 1)])
        assert not step.is_compiling_ahead()
        (message,) = step.take_finished()
    assert "8 x (5 + 6)" in message
    assert "while training" not in message


class WaitingSharding(FakeSharding):
    """A fake sharding whose `compile` waits until `may_end` is set."""

    def __init__(self, may_end: threading.Event) -> None:
        super().__init__(jax.devices()[:1])
        self.may_end = may_end

    def compile(self, step: TrainStep, state: TrainState, batch: Batch) -> Any:
        self.may_end.wait()
        return super().compile(step, state, batch)


def test_a_step_reports_whether_it_is_still_compiling_ahead() -> None:
    may_end = threading.Event()
    sharding, state = WaitingSharding(may_end), make_state()
    with CompiledStep(STEP, sharding) as step:
        step.compile_ahead(state, [Bucket(8, 5, 6, 1)])
        assert step.is_compiling_ahead()
        may_end.set()
        batch = Batch(np.full((8, 5), 4, np.int32), np.full((8, 6), 4, np.int32))
        step.compile(state, batch)
        assert not step.is_compiling_ahead()


GENERATOR = """
import json
import on_devices

_, history = on_devices.train("data", 1, on_devices.SMALL, 3, "float32")
print(json.dumps(history))
"""


@pytest.mark.exhaustive
def test_results_do_not_depend_on_the_default_generator_of_jax() -> None:
    threefry = run_program("-c", GENERATOR)
    assert run_program("-c", GENERATOR, JAX_DEFAULT_PRNG_IMPL="rbg") == threefry


LOOP = """
import json, os, signal, sys
from pathlib import Path
import jax
jax.config.update("jax_num_cpu_devices", int(sys.argv[1]))
from rich.console import Console
from example_configs import SMALL, metrics_of
from transformer_jax.runs.run_folder import RunFolder
from transformer_jax.distributed import heartbeat
from transformer_jax.training.loop import run_training
from transformer_jax.training.create_run import create_run

path, quiet = Path(sys.argv[2]), Console(quiet=True)
config = SMALL.change(model={"dropout": 0}, train={"checkpoint_every": 2, "log_every": 1})
if path.exists():
    folder = RunFolder.open(path)
    folder = folder.with_config(folder.config.change(train=json.loads(sys.argv[3])))
else:
    folder = create_run(config.change(train=json.loads(sys.argv[3])), path, quiet)
if len(sys.argv) > 4:
    beat = heartbeat.beat
    def beat_or_die(step):
        beat(step)
        if step == int(sys.argv[4]):
            os.kill(os.getpid(), signal.SIGKILL)
    heartbeat.beat = beat_or_die
run_training(folder, quiet)
print(json.dumps(metrics_of(path)))
"""


def train_on(
    devices: int, path: Path, *, killed_at: int | None = None, **train: Any
) -> list[dict[str, Any]]:
    """Start or resume a run on the given number of devices and return its metrics."""
    options = [] if killed_at is None else [str(killed_at)]
    return run_program("-c", LOOP, str(devices), str(path), json.dumps(train), *options)


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("parallelism", ["data", "fsdp", "pmap"])
@pytest.mark.parametrize("devices", [3, 4, 8])
@pytest.mark.trials("SIGKILL on 3, 4, or 8 devices")
def test_a_run_that_is_killed_on_several_devices_resumes_to_the_same_bits(
    devices: int, parallelism: str, tmp_path: Path
) -> None:
    options = {"steps": 6, "parallelism": parallelism}
    undisturbed = train_on(devices, tmp_path / "undisturbed", **options)
    with pytest.raises(subprocess.CalledProcessError) as caught:
        # The run resumes from step 2 or 4: at step 5, the last checkpoint may not be complete.
        train_on(devices, tmp_path / "killed", killed_at=5, **options)
    assert caught.value.returncode == -signal.SIGKILL
    assert train_on(devices, tmp_path / "killed", **options) == undisturbed
    assert_same(state_of(tmp_path / "killed"), state_of(tmp_path / "undisturbed"))


@pytest.mark.exhaustive
def test_a_run_that_changes_devices_and_shardings_ends_as_one_that_does_not(
    tmp_path: Path,
) -> None:
    one_device = train_on(1, tmp_path / "one", steps=10)
    path = tmp_path / "several"
    train_on(8, path, parallelism="pmap", steps=3)
    # The number of rows per batch is a multiple of eight, but not of three.
    train_on(3, path, parallelism="fsdp", steps=5)
    with pytest.raises(subprocess.CalledProcessError) as caught:
        train_on(2, path, killed_at=9, parallelism="data", steps=10)
    assert caught.value.returncode == -signal.SIGKILL
    several = train_on(1, path, steps=10)
    # The run that changed devices also scored the development set each time it stopped. Ignore
    # these extra scores.
    reports = {(line["step"], line["split"]) for line in one_device}
    several = [line for line in several if (line["step"], line["split"]) in reports]
    assert len(one_device) == len(several) > 0
    for left, right in zip(one_device, several, strict=True):
        assert (left["step"], left["split"]) == (right["step"], right["split"])
        np.testing.assert_allclose(left["perplexity"], right["perplexity"], rtol=1e-3)
    for folder, *_ in os.walk(path):
        Path(folder).chmod(0o500)
    run = transformer_jax.load(path)
    assert run.step == 10
    assert len(run.params["embedding"]["table"].devices()) == 1
    assert len(run.translate(["one"])) == 1
