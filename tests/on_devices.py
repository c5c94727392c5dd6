"""What `test_placement` runs in a process with eight simulated devices; writes JSON."""

import itertools
import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from small import SMALL

from transformer_jax.config import Config
from transformer_jax.data.batches import Batch
from transformer_jax.model.build import build_transformer
from transformer_jax.training.sharding import SHARDINGS
from transformer_jax.training.step import TrainState, init_state, make_train_step

VOCAB = 20
STEPS = 50


def batches() -> list[Batch]:
    """Return batches whose 13 rows divide by no number of devices, the long ones in front."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(STEPS):
        block = rng.integers(4, VOCAB, (2, 13, 9)).astype(np.int32)
        lengths = np.where(np.arange(13) < 4, 9, rng.integers(1, 4, (2, 13)))[..., None]
        found.append(Batch(*np.where(np.arange(9) < lengths, block, 0)))
    return found


def filled_up(batch: Batch, devices: int) -> Batch:
    return Batch(*(np.pad(side, ((0, -len(side) % devices), (0, 0))) for side in batch))


def in_double_precision(config: Config) -> Config:
    """Let all that is computed in float32 be computed in float64."""
    jax.config.update("jax_enable_x64", True)
    # Where the program says float32 itself. The command line offers no such precision.
    jnp.float32 = jnp.float64
    object.__setattr__(config.model, "dtype", "float64")
    return config


def trained(
    name: str, devices: int, config: Config, steps: int, dtype: str
) -> tuple[TrainState, list[Any]]:
    model = build_transformer(config.model, VOCAB)
    placement = SHARDINGS[name](jax.devices()[:devices])
    state = init_state(model, config.train)
    state = jax.tree.map(lambda x: x.astype(dtype) if x.dtype == "float32" else x, state)
    state = placement.place_state(state)
    told = list[Any]()
    compiled: Any = None
    for batch in batches()[:steps]:
        placed = placement.place_batch(filled_up(batch, devices))
        if compiled is None:
            step = placement.compile(make_train_step(model, config.train), state)
            compiled = step.lower(placement.lowering_args(state), placed).compile()
        state, metrics = compiled(state, placed)
        told.append([float(x) for x in (*metrics.loss, metrics.gradient_norm)])
    assert {str(x.dtype) for x in jax.tree.leaves(state.params)} == {dtype}
    return placement.to_local_device(state), told


def main(dtype: str, dropout: str, names: str, steps: str, counts: str) -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    config = SMALL.change(model={"dropout": float(dropout)}, train={"warmup_steps": STEPS})
    config = in_double_precision(config) if dtype == "float64" else config
    one, told = trained("data", 1, config, int(steps), dtype)
    found = {}
    for name, devices in itertools.product(names.split(","), map(int, counts.split(","))):
        if (name, devices) == ("data", 1):
            continue
        state, other = trained(name, devices, config, int(steps), dtype)
        apart = jax.tree.map(lambda a, b: float(abs(a - b).max()), one.params, state.params)
        found[f"{name} {devices}"] = {
            "params": max(jax.tree.leaves(apart)),
            # Of each step: sums of the loss and their count, norm of the gradient.
            "told": np.max(np.abs(np.divide(other, told) - 1), axis=0).tolist(),
        }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
