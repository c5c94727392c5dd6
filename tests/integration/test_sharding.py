import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import transformer_jax

TESTS = Path(__file__).parents[1]


def program(*arguments: str, **environment: str) -> Any:
    """Run a program that prints JSON last."""
    done = subprocess.run(
        [sys.executable, *arguments],
        check=True,
        capture_output=True,
        text=True,
        cwd=TESTS,
        env={**os.environ, **environment},
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module", params=["2,8", pytest.param("1,4", marks=pytest.mark.slow)])
def in_double_precision(request: pytest.FixtureRequest) -> dict[str, Any]:
    """How far all placements are from one device after 50 steps, in float64, without dropout."""
    return program("on_devices.py", "float64", "0", "data,fsdp,pmap", "50", request.param)


# Everywhere here: 13 rows, which divide by no number of devices.
def test_every_placement_trains_as_one_device_does(in_double_precision: dict[str, Any]) -> None:
    assert len(in_double_precision) in (3 * 2, 3 * 2 - 1)
    for name, apart in in_double_precision.items():
        assert apart["params"] < 1e-9, name


def test_devices_add_sums_and_counts_once_however_unlike_their_tokens(
    in_double_precision: dict[str, Any],
) -> None:
    # Adam hides a gradient that is too large by a factor, so the gradient itself is compared. The
    # first device has most of the tokens, the last of eight has none: means of means would show.
    for name, apart in in_double_precision.items():
        assert max(apart["told"]) < 1e-9, name


@pytest.mark.slow
def test_in_float32_losses_agree_with_one_device() -> None:
    # Parameters need not: Adam makes much of the rounding of gradients that are nearly nothing.
    found = program("on_devices.py", "float32", "0", "data,fsdp,pmap", "50", "1,2,4,8")
    for name, apart in found.items():
        smoothed, nll, count, _ = apart["told"]
        assert max(smoothed, nll) < 1e-3, name
        assert count == 0, name


@pytest.mark.parametrize("counts", ["8", pytest.param("1,2,4", marks=pytest.mark.slow)])
def test_global_programs_draw_the_masks_of_one_device(counts: str) -> None:
    # Were a mask drawn otherwise on another device, parameters would part at once.
    for name, apart in program(
        "on_devices.py", "float64", "0.3", "data,fsdp,pmap", "10", counts
    ).items():
        if name.startswith("pmap") and name != "pmap 1":
            # So the test can fail: its devices have masks of their own.
            assert max(apart["told"]) > 1e-3, name
        else:
            assert apart["params"] < 1e-9, name


MEMORY = """
import json
import jax
jax.config.update("jax_num_cpu_devices", 8)
from transformer_jax.config import Config
from transformer_jax.model.build import build_transformer
from transformer_jax.training.sharding import PLACEMENTS
from transformer_jax.training.step import init_state

# The base model with everything an eighth as wide: the same leaves, and as odd a vocabulary.
config = Config().change(
    model={"num_layers": 2, "d_model": 64, "d_ff": 256, "num_heads": 8, "d_k": 8, "d_v": 8}
)
state = init_state(build_transformer(config.model, 4001), config.train)
shares = {}
for devices in (1, 2, 4, 8):
    placed = PLACEMENTS["fsdp"](jax.devices()[:devices]).place_state(state)
    leaves = jax.tree.leaves((placed.params, placed.optimizer))
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
    shares[devices] = held / sum(leaf.nbytes for leaf in leaves)
print(json.dumps(shares))
"""


def test_sharded_state_takes_its_share_of_each_device() -> None:
    shares = program("-c", MEMORY)
    assert shares["1"] == 1
    for devices, share in shares.items():
        assert share <= 1.15 / int(devices)


GENERATOR = """
import json
import on_devices

_, told = on_devices.trained("data", 1, on_devices.SMALL, 3, "float32")
print(json.dumps(told))
"""


@pytest.mark.slow
def test_results_do_not_depend_on_the_generator_that_jax_is_set_to() -> None:
    usual = program("-c", GENERATOR)
    assert program("-c", GENERATOR, JAX_DEFAULT_PRNG_IMPL="rbg") == usual


LOOP = """
import json, os, signal, sys
from pathlib import Path
import jax
jax.config.update("jax_num_cpu_devices", int(sys.argv[1]))
from rich.console import Console
from small import SMALL, metrics_of
from transformer_jax.runs.run_directory import RunFolder
from transformer_jax.distributed import heartbeat
from transformer_jax.training.loop import run_training
from transformer_jax.training.create_run import start

path, quiet = Path(sys.argv[2]), Console(quiet=True)
config = SMALL.change(model={"dropout": 0}, train={"checkpoint_every": 2, "log_every": 1})
if path.exists():
    folder = RunFolder.open(path)
    folder = folder.go_on_with(folder.config.change(train=json.loads(sys.argv[3])))
else:
    folder = start(config.change(train=json.loads(sys.argv[3])), path, quiet)
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


def run_on(devices: int, path: Path, *killed_at: int, **train: Any) -> list[dict[str, Any]]:
    """Begin a run, or go on with it, on so many devices; return its metrics."""
    return program("-c", LOOP, str(devices), str(path), json.dumps(train), *map(str, killed_at))


@pytest.mark.slow
def test_a_run_wanders_over_devices_and_placements_is_killed_and_ends_where_one_that_stayed_does(
    tmp_path: Path,
) -> None:
    one = run_on(1, tmp_path / "one", steps=10)
    path = tmp_path / "several"
    run_on(8, path, parallelism="pmap", steps=3)
    # Batches have rows by the eight, which three devices do not share evenly.
    run_on(3, path, parallelism="fsdp", steps=5)
    with pytest.raises(subprocess.CalledProcessError) as caught:
        run_on(2, path, 9, parallelism="data", steps=10)
    assert caught.value.returncode == -signal.SIGKILL
    several = run_on(1, path, steps=10)
    # Where a part ended the development set was scored too.
    told = {(line["step"], line["split"]) for line in one}
    several = [line for line in several if (line["step"], line["split"]) in told]
    assert len(one) == len(several) > 0
    for left, right in zip(one, several, strict=True):
        assert (left["step"], left["split"]) == (right["step"], right["split"])
        np.testing.assert_allclose(left["perplexity"], right["perplexity"], rtol=1e-3)
    for directory, *_ in os.walk(path):
        Path(directory).chmod(0o500)
    copy = transformer_jax.load(path)
    assert copy.step == 10
    assert len(copy.params["embedding"]["table"].devices()) == 1
    assert len(copy.translate(["one"])) == 1
