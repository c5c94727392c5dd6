"""Compare training with each sharding to training on one device, and print the differences as JSON.

`test_sharding` runs this program:

    python on_devices.py DTYPE COUNTS STEPS DROPOUT:SHARDING,SHARDING[:ARCHITECTURE[:OPTIMIZER]] ...
"""

import itertools
import json
import math
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from example_configs import SMALL, with_architecture

from transformer_jax.baselines.build import build_model
from transformer_jax.config import Config
from transformer_jax.data.batches import Batch
from transformer_jax.training.sharding import FSDP, SHARDINGS
from transformer_jax.training.step import TrainState, TrainStep, init_state

VOCAB = 20
STEPS = 50


def random_batches() -> list[Batch]:
    """Return random batches of 13 rows, with the longest rows first."""
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(STEPS):
        tokens = rng.integers(4, VOCAB, (2, 13, 9)).astype(np.int32)
        lengths = np.where(np.arange(13) < 4, 9, rng.integers(1, 4, (2, 13)))[..., None]
        batches.append(Batch(*np.where(np.arange(9) < lengths, tokens, 0)))
    return batches


def pad_rows(batch: Batch, devices: int) -> Batch:
    """Add empty rows, so that every device has the same number of rows."""
    return Batch(*(np.pad(side, ((0, -len(side) % devices), (0, 0))) for side in batch))


def use_double_precision(config: Config) -> Config:
    """Make the package compute in float64 instead of float32."""
    jax.config.update("jax_enable_x64", True)
    # The package refers to `jnp.float32` by name. `Config` rejects float64, so bypass its
    # validation.
    jnp.float32 = jnp.float64
    object.__setattr__(config.model, "dtype", "float64")
    return config


def train(
    name: str, devices: int, config: Config, steps: int, dtype: str
) -> tuple[TrainState, list[list[float]]]:
    """Train a model; return the final state and each step's loss sums and gradient norm."""
    model = build_model(config.model, VOCAB)
    sharding = SHARDINGS[name](jax.devices()[:devices])
    state = init_state(model, config.train)
    state = jax.tree.map(lambda x: x.astype(dtype) if x.dtype == "float32" else x, state)
    state = sharding.place_state(state)
    step = TrainStep(model, config.train)
    numbers = sharding.place_state(step.make_numbers())
    history = list[list[float]]()
    compiled: Any = None
    for batch in random_batches()[:steps]:
        placed = sharding.place_batch(pad_rows(batch, devices))
        if compiled is None:
            compiled = sharding.compile(step, state, placed)
        state, metrics = compiled(state, numbers, placed)
        history.append([float(x) for x in (*metrics.loss, metrics.gradient_norm)])
    assert {str(x.dtype) for x in jax.tree.leaves(state.params)} == {dtype}
    return sharding.to_local_device(state), history


def divide_state() -> dict[int, float]:
    """For each device count, return the largest share of the FSDP state that any device holds."""
    # Use the base model with two layers, an eighth of the width, and an odd vocabulary size.
    config = Config().change(
        model={"num_layers": 2, "d_model": 64, "d_ff": 256, "num_heads": 8, "d_k": 8, "d_v": 8}
    )
    state = jax.eval_shape(lambda: init_state(build_model(config.model, 4001), config.train))
    leaves = jax.tree.leaves((state.params, state.opt_state))
    shares: dict[int, float] = {}
    for devices in (1, 2, 4, 8):
        sharding = FSDP(jax.devices()[:devices]).sharding
        shard = sum(math.prod(sharding(leaf).shard_shape(leaf.shape)) for leaf in leaves)
        shares[devices] = shard / sum(leaf.size for leaf in leaves)
    return shares


def main(dtype: str, counts: str, steps: str, *cases: str) -> None:
    """Print the largest differences from training on one device, for each case and device count.

    This program also prints the largest share of the state that any device holds.
    """
    jax.config.update("jax_num_cpu_devices", 8)
    shares = divide_state()
    distances: dict[str, dict[str, Any]] = {}
    for case in cases:
        dropout, names, *options = case.split(":")
        distances[dropout] = {}
        config = with_architecture(options[0]) if options else SMALL
        if options[1:]:
            config = config.change(train={"optimizer": options[1], "schedule": "constant"})
        config = config.change(model={"dropout": float(dropout)}, train={"warmup_steps": STEPS})
        config = use_double_precision(config) if dtype == "float64" else config
        one_device, expected = train("data", 1, config, int(steps), dtype)
        for name, devices in itertools.product(names.split(","), map(int, counts.split(","))):
            if (name, devices) == ("data", 1):
                continue
            state, history = train(name, devices, config, int(steps), dtype)
            params = jax.tree.map(
                lambda a, b: float(abs(a - b).max()), one_device.params, state.params
            )
            relative = np.abs(np.divide(history, expected) - 1)
            distances[dropout][f"{name} {devices}"] = {
                "params": max(jax.tree.leaves(params)),
                # These values are the largest relative differences in smoothed, nll, count, and
                # gradient_norm over all steps.
                "metrics": relative.max(axis=0).tolist(),
            }
    sys.stdout.write(json.dumps({"distances": distances, "shares": shares}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
