"""This project as a benchmark's contestant: its own train step and search, as a user runs them.

A benchmark hands over sizes and pieces, and gets a function that does the work once.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.config import Config
from transformer_jax.data.batches import Batch
from transformer_jax.inference.translate import ROWS, search
from transformer_jax.model.transformer import Params, Transformer, init_params
from transformer_jax.pieces import EOS
from transformer_jax.training.placement import PLACEMENTS, CompiledStep
from transformer_jax.training.step import init_state, make_train_step, seed_key


def config_of(sizes: Mapping[str, int]) -> Config:
    """Return the paper's model in these sizes.

    Args:
        sizes: d_model, layers, heads, d_ff, as benchmarks of other libraries name them.
    """
    width = sizes["d_model"] // sizes["heads"]
    return Config().change(
        model={
            "num_layers": sizes["layers"],
            "d_model": sizes["d_model"],
            "d_ff": sizes["d_ff"],
            "num_heads": sizes["heads"],
            "d_k": width,
            "d_v": width,
            # As other libraries have it.
            "attention_dropout": 0.1,
            "dtype": sizes.get("dtype", "float32"),
        }
    )


def train_step(
    sizes: Mapping[str, int], batch: Mapping[str, np.ndarray]
) -> tuple[Callable[[], float], int]:
    """Return what runs one train step and gives its loss, and the number of parameters.

    Args:
        sizes: as `config_of` takes them, and vocab.
        batch: int32 arrays "src" and "tgt_out", without padding.
    """
    config = config_of(sizes)
    model = Transformer(config.model, sizes["vocab"])
    placement = PLACEMENTS[config.train.parallelism]()
    step = CompiledStep(
        make_train_step(model, config.train), placement, lambda _: None, lambda: nullcontext()
    )
    state = placement.place_state(init_state(model, config.train))
    pieces = Batch(batch["src"], batch["tgt_out"])

    def once() -> float:
        nonlocal state
        state, metrics = step(state, pieces)
        return float(metrics.loss.smoothed / metrics.loss.count)

    return once, sum(leaf.size for leaf in jax.tree.leaves(state.params))


def decode(
    sizes: Mapping[str, int], source: np.ndarray, beam_size: int, steps: int
) -> Callable[[], float]:
    """Return what translates all sentences into exactly `steps` pieces and gives their mean length.

    Args:
        sizes: as `config_of` takes them, and vocab.
        source: int32[sentences, length], without padding.
        beam_size: 1 is greedy search.
        steps: pieces of each translation, its end included.
    """
    config = config_of(sizes).change(
        decode={"beam_size": beam_size, "max_extra_length": steps - source.shape[1]}
    )
    model = Transformer(config.model, sizes["vocab"])
    params = never_ending(init_params(model, seed_key(0)), sizes["layers"])
    batches = [source[start : start + ROWS] for start in range(0, len(source), ROWS)]

    def once() -> float:
        lengths = []
        for rows in batches:
            limit = np.full(len(rows), steps, np.int32)
            found = jax.device_get(search(model, config.decode, 1, params, rows, limit))
            lengths.append((found.pieces[:, 0] != 0).sum(axis=1))
        return float(np.concatenate(lengths).mean())

    return once


def never_ending(params: Params, layers: int) -> Params:
    """Return parameters by which no end is likely, so that every search takes all its steps.

    What the last layer normalisation gives sums up to the sum of its biases: with biases of one,
    an end piece whose vector is -100 everywhere has the logit -100 d_model, wherever it may come.
    """
    changed: Any = jax.tree.map(jnp.asarray, params)
    table = changed["embedding"]["table"]
    changed["embedding"]["table"] = table.at[EOS].set(-100.0)
    last = changed[f"decoder_{layers - 1}"]["after_feed_forward"]["norm"]
    last["bias"] = jnp.ones_like(last["bias"])
    return changed
