"""Does the best learning rate transfer across widths?

    python -m experiments.width
    python -m experiments.width --rates --seeds 2

The first command is the coordinate check of Yang et al. (2022, appendix D.1): it trains models of
different widths for a few steps and prints how much their hidden states and logits change. If a
rule for the learning rate works for all widths, the changes do not depend on the width. The second
command trains with several learning rates and prints the loss by width, which shows whether the
best learning rate depends on the width.

All models have 1 + 1 layers and 4 heads, and learn number words without dropout.
"""

import math
import sys
from collections.abc import Iterable, Sequence
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from tyro.conf import FlagCreatePairsOff

from transformer_jax.backend import start_backend
from transformer_jax.baselines.build import build_model
from transformer_jax.commands.arguments import parse_program
from transformer_jax.config import Config
from transformer_jax.console import run_and_report, stdout
from transformer_jax.data.batches import Batch, Batches
from transformer_jax.data.prepare import prepare_text
from transformer_jax.errors import UsageError
from transformer_jax.model.inspect import hidden_states
from transformer_jax.reports.tables import Table, to_markdown
from transformer_jax.training.step import (
    Numbers,
    StepMetrics,
    TrainState,
    TrainStep,
    init_state,
)

Rule = Literal["one rate", "the paper", "base_width"]
"""How the learning rate depends on the width: not at all, as in the paper, or by
`train.base_width`. All rules are equal at `BASE_WIDTH`."""
BASE_WIDTH = 32
WIDTHS = (32, 64, 128, 256)
# The learning rates at BASE_WIDTH.
CHECKED_RATE, RATES = 2.0**-11, tuple(2.0**-n for n in range(11, 4, -1))
CHECKED_STEPS, SWEEP_STEPS, LAST_STEPS = 4, 150, 20


def make_config(width: int, rule: Rule, rate: float, **train: object) -> Config:
    """Return the config of a model, given its learning rate at `BASE_WIDTH`."""
    config = Config().change(
        model={
            "num_layers": 1,
            "d_model": width,
            "d_ff": 2 * width,
            "num_heads": 4,
            "d_k": width // 4,
            "d_v": width // 4,
            "dropout": 0.0,
            "max_length": 64,
        },
        data={"vocab_size": 128, "max_length": 64, "batch_tokens": 256, "max_batch_shapes": 1},
        train={"warmup_steps": 1, "schedule": "constant", **train},
    )
    scale = rate * (BASE_WIDTH * config.train.warmup_steps) ** 0.5
    rules: dict[Rule, dict[str, object]] = {
        "one rate": {"peak_learning_rate": rate},
        "the paper": {"learning_rate_scale": scale},
        "base_width": {"learning_rate_scale": scale, "base_width": BASE_WIDTH},
    }
    return config.change(train=rules[rule])


def make_batches(config: Config) -> Batches:
    """Return batches of number words, which all have the same shape."""
    return prepare_text(config.data).batches(config)


def measure_changes(config: Config, batches: Batches, steps: int) -> dict[str, list[float]]:
    """Return how much the activations in batch 0 have changed after each of the first steps.

    The changes of the logits, and of the last hidden states in each stack, are mean absolute
    values. Those of the states are relative to the mean absolute initial states.
    """
    model = build_model(config.model, config.data.vocab_size)
    inputs = [jnp.asarray(tokens) for tokens in batches[0]]

    @jax.jit
    def activations(state: TrainState) -> dict[str, Array]:
        states = hidden_states(model, state.params, *inputs)
        last = {stack: values[-1] for stack, values in states.items()}
        logits = model.apply({"params": state.params}, *inputs)
        return {**last, "logits": jnp.asarray(logits)}

    step, state = jax.jit(TrainStep(model, config.train)), init_state(model, config.train)
    first = activations(state)
    units = {name: jnp.abs(values).mean() for name, values in first.items()} | {"logits": 1.0}
    changes: dict[str, list[float]] = {name: [] for name in first}
    for number in range(steps):
        state, _ = step(state, batches[number])
        for name, values in activations(state).items():
            changes[name].append(float(jnp.abs(values - first[name]).mean() / units[name]))
    return changes


def train_losses(configs: Sequence[Config], batches: Batches) -> list[float]:
    """Return each config's mean loss per token in the last steps, in one compiled program.

    The configs differ only in their numeric settings. Training ends within the first pass over the
    text, so the model has not yet seen the sentences in the loss.
    """
    first = configs[0]
    model = build_model(first.model, first.data.vocab_size)
    step = TrainStep(model, first.train)
    stacked = jax.tree.map(lambda *x: np.stack(x), *(batches[n] for n in range(first.train.steps)))

    @jax.jit
    def train(state: TrainState, numbers: Numbers) -> Float[Array, ""]:
        own = step.with_numbers(numbers)

        def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
            return own(state, batch)

        _, metrics = jax.lax.scan(train_step, state, stacked)
        loss = jax.tree.map(lambda x: x[-LAST_STEPS:].sum(), metrics.loss)
        return loss.nll / loss.count

    state = init_state(model, first.train)
    numbers = (TrainStep(model, config.train).make_numbers() for config in configs)
    return [float(train(state, x)) for x in numbers]


def check_table(widths: Iterable[int] = WIDTHS) -> Table:
    """Return the changes after the last step of the coordinate check, by rule and width."""
    table = [["rule", "width", "encoder", "decoder", "logits"]]
    for rule in get_args(Rule):
        for width in widths:
            config = make_config(width, rule, CHECKED_RATE)
            changes = measure_changes(config, make_batches(config), CHECKED_STEPS)
            table.append([rule, str(width), *(f"{x[-1]:.3f}" for x in changes.values())])
    return table


def rate_table(widths: Iterable[int] = WIDTHS, seeds: int = 1) -> Table:
    """Return the mean loss over seeds and the best rate, by rule, width, and learning rate.

    The learning rates are those at `BASE_WIDTH`.
    """
    names = [f"2^{math.log2(rate):.0f}" for rate in RATES]
    table = [["rule", "width", *names, "best"]]
    for rule in ("the paper", "base_width"):
        for width in widths:
            losses = []
            for seed in range(seeds):
                fields = {"schedule": "inverse_square_root", "warmup_steps": SWEEP_STEPS // 5}
                fields |= {"seed": seed, "steps": SWEEP_STEPS}
                configs = [make_config(width, rule, rate, **fields) for rate in RATES]
                losses.append(train_losses(configs, make_batches(configs[0])))
            means = np.mean(losses, axis=0)
            best = names[int(np.nanargmin(means))]
            table.append([rule, str(width), *(f"{x:.3f}" for x in means), best])
    return table


def measure(
    rates: FlagCreatePairsOff[bool] = False, seeds: int = 1, widths: tuple[int, ...] = WIDTHS
) -> None:
    """Compare rules for the learning rate by width, and print a Markdown table.

    Args:
        rates: Train with several learning rates.
        seeds: The number of random seeds, with --rates.
        widths: The widths, each a multiple of 4.
    """
    if seeds < 1:
        raise UsageError(f"--seeds must be positive, got {seeds}")
    if not widths:
        raise UsageError("--widths needs a value")
    if any(width < 4 or width % 4 for width in widths):
        raise UsageError(f"--widths must be multiples of 4, got {' '.join(map(str, widths))}")
    start_backend()
    stdout.print(to_markdown(rate_table(widths, seeds) if rates else check_table(widths)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code. Print any error as one line."""
    prog = "python -m experiments.width"
    return run_and_report(lambda: parse_program(prog, measure, arguments))


if __name__ == "__main__":
    sys.exit(main())
