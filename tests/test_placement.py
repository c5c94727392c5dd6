import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import transformer_jax

PROGRAM = """
import json, sys
import jax
jax.config.update("jax_num_cpu_devices", int(sys.argv[1]))
import numpy as np
from small import SMALL
from transformer_jax.data.batches import Batch
from transformer_jax.model.transformer import Transformer
from transformer_jax.training.placement import data_parallel
from transformer_jax.training.step import init_state, make_train_step

config = SMALL.change(model={"dropout": 0.3})
rng = np.random.default_rng(0)
batches = []
for _ in range(5):
    block = rng.integers(4, 20, (2, 16, 9)).astype(np.int32)
    lengths = rng.integers(1, 10, (2, 16, 1))
    batches.append(Batch(*np.where(np.arange(9) < lengths, block, 0)))
model = Transformer(config.model, 20)
placement = data_parallel()
step = placement.compile(make_train_step(model, config.train))
state = placement.place_state(init_state(model, config.train))
losses = []
for batch in batches:
    placed = placement.place_batch(batch)
    state, metrics = step(state, placed)
    losses.append(float(metrics.loss.smoothed / metrics.loss.count))
print(json.dumps({
    "losses": losses,
    "rows": placed.source.addressable_shards[0].data.shape[0],
    "devices": len(placed.source.sharding.device_set),
}))
"""


TESTS = Path(__file__).parent


def train_on(devices: int, **environment: str) -> dict[str, Any]:
    command = [sys.executable, "-c", PROGRAM, str(devices)]
    done = subprocess.run(
        command,
        check=True,
        capture_output=True,
        text=True,
        cwd=TESTS,
        env={**os.environ, **environment},
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(("devices", "rows"), [(8, 2), (3, 6)])
def test_any_number_of_devices_gives_the_training_of_one(devices: int, rows: int) -> None:
    # Dropout is on: were a mask drawn otherwise on another device, losses would part at once.
    one, several = train_on(1), train_on(devices)
    assert several["devices"] == devices
    # 16 rows on 3 devices are filled up to 18.
    assert several["rows"] == rows
    np.testing.assert_allclose(several["losses"], one["losses"], rtol=1e-4)


LOOP = """
import json, sys
from pathlib import Path
import jax
jax.config.update("jax_num_cpu_devices", int(sys.argv[1]))
from rich.console import Console
from small import SMALL, metrics_of
from transformer_jax.training.loop import run_training, start

path, quiet = Path(sys.argv[2]), Console(quiet=True)
run_training(start(SMALL, path, quiet), quiet)
print(json.dumps(metrics_of(path)))
"""


def test_a_run_on_several_devices_equals_that_on_one_and_opens_here(tmp_path: Path) -> None:
    told = {}
    for devices in (1, 4):
        command = [sys.executable, "-c", LOOP, str(devices), str(tmp_path / f"on{devices}")]
        done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=TESTS)
        told[devices] = json.loads(done.stdout.splitlines()[-1])
    for one, several in zip(told[1], told[4], strict=True):
        assert (one["step"], one["split"]) == (several["step"], several["split"])
        np.testing.assert_allclose(one["perplexity"], several["perplexity"], rtol=1e-3)
    run = transformer_jax.load(tmp_path / "on4")
    assert run.step == 8
    assert len(run.params["embedding"]["table"].devices()) == 1


def test_results_do_not_depend_on_the_generator_that_jax_is_set_to() -> None:
    usual = train_on(2)
    other = train_on(2, JAX_DEFAULT_PRNG_IMPL="rbg")
    assert usual["losses"] == other["losses"]
