"""Select checkpoints and average their parameters (section 6.1)."""

from collections.abc import Collection, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from transformer_jax.errors import Setting, StorageError, UsageError
from transformer_jax.progress import note
from transformer_jax.runs.checkpoint_manager import CheckpointManager


def select_steps(
    checkpoints: CheckpointManager,
    average: int = 1,
    step: int | None = None,
    *,
    allow_fewer: bool = False,
) -> list[int]:
    """Return the steps of the checkpoints to average, oldest first.

    The last selected step is `step`, which defaults to the step of the latest intact checkpoint. If
    `average` is more than 1, the steps are those of consecutive scheduled checkpoints. With
    `allow_fewer`, the result may contain fewer than `average` steps. If the checkpoint at `step` is
    not scheduled, or if no checkpoint is scheduled, the result then contains only `step`.

    Raises:
        UsageError: the checkpoint does not exist, or there are fewer than `average` checkpoints.
        StorageError: the checkpoint at `step` is damaged (checked only if `average` is more than
            1), or all checkpoints are damaged.
    """
    run = checkpoints.run
    if not checkpoints.steps:
        raise UsageError(f"{run} has no checkpoint yet")
    if average == 1 and step is None and (newest := checkpoints.latest_valid()) is not None:
        return [newest]
    available = sorted(checkpoints.perplexities) if average > 1 else checkpoints.steps
    is_unscheduled = step not in available and step in checkpoints.steps
    if allow_fewer and (is_unscheduled or not available):
        return select_steps(checkpoints, 1, step)
    for damaged, reason in checkpoints.damaged_metadata.items() if average > 1 else ():
        if damaged == step:
            raise StorageError(f"checkpoint {step} of {run} is damaged: {reason}")
        note(f"checkpoint {damaged} is damaged and not averaged: {reason}")
    if step not in (None, *available):
        kind = "checkpoint to average" if average > 1 else "checkpoint"
        names = ", ".join(map(str, checkpoints.steps if allow_fewer else available)) or "none"
        raise UsageError(f"{run} has no {kind} at step {step}; available steps: {names}")
    steps = [s for s in available if step is None or s <= step][-average:]
    if average > 1 and steps:
        steps = _consecutive_steps(checkpoints, steps[-1], average)
        if step is not None and steps[-1:] != [step]:
            raise StorageError(f"checkpoint {step} of {run} is damaged")
    if len(steps) < (1 if allow_fewer else average):
        until = "" if step is None else f" up to step {step}"
        raise UsageError(
            f"cannot average {average} checkpoints: {run} has only {len(steps)} that can be "
            f"averaged{until}; to use the latest one alone, pass ",
            Setting("average_checkpoints", 1),
        )
    return steps


def average_params(checkpoints: CheckpointManager, steps: Sequence[int], target: PyTree) -> PyTree:
    """Return the mean of the parameters at these steps. See `array_store.restore` for `target`."""
    return next(average_last_params(checkpoints, steps, target, [len(steps)]))


def average_last_params(
    checkpoints: CheckpointManager, steps: Sequence[int], target: PyTree, counts: Collection[int]
) -> Iterator[PyTree]:
    """For each k in `counts`, in ascending order, yield the mean parameters of the last k steps.

    Each checkpoint is read once. Parameters are added from the last step to the first, so that no
    result depends on the other counts.
    """
    total: PyTree = None
    for count, step in enumerate(reversed(steps[-max(counts) :]), start=1):
        params = checkpoints.restore(step, {"params": target})["params"]
        total = params if count == 1 else _add(total, params)
        if count in counts:
            yield total if count == 1 else _divide(total, np.float32(count))


@jax.jit
def _add(left: PyTree, right: PyTree) -> PyTree:
    return jax.tree.map(jnp.add, left, right)


@jax.jit
def _divide(total: PyTree, count: Float[Array, ""]) -> PyTree:
    # Division by a constant could be compiled to a multiplication, which rounds differently.
    return jax.tree.map(lambda x: x / count, total)


def _consecutive_steps(checkpoints: CheckpointManager, last: int, limit: int) -> list[int]:
    """Return up to `limit` consecutive steps with intact checkpoints, counting back from `last`."""
    steps: list[int] = []
    step: int | None = last
    while step is not None and step in checkpoints.perplexities and len(steps) < limit:
        if (reason := checkpoints.find_damage(step)) is None:
            steps.insert(0, step)
        else:
            note(f"checkpoint {step} is damaged and not averaged: {reason}")
            if steps:
                break
        step = checkpoints.previous_step(step)
    return steps
