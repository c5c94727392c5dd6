"""Functions that benchmark training and decoding with the same code that users run.

External benchmarks call `train_step` and `decode`. The project's own benchmark calls functions in
the module `tasks`.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.config import Config
from transformer_jax.data.batches import Batch
from transformer_jax.inference.translate import ROWS, translate_batch
from transformer_jax.model.build import build_transformer
from transformer_jax.model.encoder_decoder import Params, init_params
from transformer_jax.special_tokens import EOS
from transformer_jax.training.compiled_step import CompiledStep
from transformer_jax.training.joint import JointStep, Slots
from transformer_jax.training.sharding import SHARDINGS
from transformer_jax.training.step import StepMetrics, TrainStep, init_state


def make_config(sizes: Mapping[str, Any]) -> Config:
    """Return a config for the paper's model with the given sizes and with attention dropout.

    Args:
        sizes: d_model, layers, heads, d_ff, and optionally dtype (float32 by default) and src
            (source length).
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
            # Match the other libraries, which apply dropout to attention weights.
            "attention_dropout": 0.1,
            "dtype": sizes.get("dtype", "float32"),
            "max_length": max(Config().model.max_length, sizes.get("src", 0)),
        }
    )


class Trainer:
    """A training loop without data preparation, reports, or checkpoints."""

    def __init__(
        self,
        config: Config,
        vocab_size: int,
        source_vocab_size: int | None = None,
        *,
        num_runs: int = 1,
    ) -> None:
        """Initialize the parameters at random, as in `num_runs` runs with different seeds."""
        self.model = build_transformer(config.model, vocab_size, source_vocab_size)
        self.sharding = SHARDINGS[config.train.parallelism]()
        self.compile_seconds = 0.0
        step = TrainStep(self.model, config.train)
        configs = [config.change(train={"seed": seed}).train for seed in range(num_runs)]
        states = [self.sharding.place_state(init_state(self.model, one)) for one in configs]
        self.slots = Slots(states)
        step = JointStep.combine(*[step] * num_runs) if self.slots.is_joint else step
        self._step = CompiledStep(step, self.sharding, self.slots.num_runs)

    def step(self, batch: Batch, placed: Batch | None = None) -> StepMetrics:
        """Start a step, compiling it if needed; return its metrics without waiting for them.

        For `placed`, see `CompiledStep`.
        """
        if not self._step.is_compiled_for(batch):
            start = time.perf_counter()
            self._step.compile(self.slots.states, batch)
            self.compile_seconds += time.perf_counter() - start
        self.slots.states, metrics = self._step(self.slots.states, batch, placed)
        return metrics

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.slots.read(0).params))


def mean_loss(metrics: StepMetrics) -> float:
    """Wait for a step to finish, and return its mean loss per token over all runs."""
    loss = jax.device_get(metrics.loss)
    return float(loss.smoothed.sum() / loss.count.sum())


def train_step(
    sizes: Mapping[str, Any], batch: Mapping[str, np.ndarray]
) -> tuple[Callable[[], float], int]:
    """Return a function that runs one step and returns its loss; also return the parameter count.

    Args:
        sizes: the sizes for `make_config`, plus the vocabulary size (vocab).
        batch: int32 arrays "src" and "tgt_out", without padding.
    """
    trainer = Trainer(make_config(sizes), sizes["vocab"])
    tokens = Batch(batch["src"], batch["tgt_out"])
    return lambda: mean_loss(trainer.step(tokens)), trainer.parameters


def decode(
    sizes: Mapping[str, Any], source: np.ndarray, beam_size: int, steps: int
) -> Callable[[], float]:
    """Return a function that translates the source and returns the mean translation length.

    Args:
        sizes: the sizes for `make_config`, plus the vocabulary size (vocab).
        source: int32[sentences, length], without padding.
        beam_size: the beam size; 1 means greedy search.
        steps: the number of tokens per translation, including the end-of-sentence token.
    """
    config = make_config(sizes).change(
        decode={"beam_size": beam_size, "max_extra_length": steps - source.shape[1]}
    )
    model = build_transformer(config.model, sizes["vocab"])
    params = suppress_eos(init_params(model, jax.random.key(0)), sizes["layers"])
    batches = [source[start : start + ROWS] for start in range(0, len(source), ROWS)]

    def once() -> float:
        lengths = []
        for rows in batches:
            limit = np.full(len(rows), steps, np.int32)
            result = jax.device_get(translate_batch(model, config.decode, 1, params, rows, limit))
            lengths.append((result.tokens[:, 0] != 0).sum(axis=1))
        return float(np.concatenate(lengths).mean())

    return once


def suppress_eos(params: Params, layers: int) -> Params:
    """Return a copy of the parameters, modified so that no translation ends early.

    If all scales of a layer normalization are 1, the elements of its output add up to the sum of
    its biases. With biases of 1 and an end-token embedding whose elements are all -100, the logit
    of the end token is therefore always -100 d_model.
    """
    changed: Any = jax.tree.map(jnp.asarray, params)
    table = changed["embedding"]["table"]
    changed["embedding"]["table"] = table.at[EOS].set(-100.0)
    last = changed[f"decoder_{layers - 1}"]["after_feed_forward"]["norm"]
    last["bias"] = jnp.ones_like(last["bias"])
    return changed
