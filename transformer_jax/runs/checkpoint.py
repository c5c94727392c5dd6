"""Checkpoints by Orbax: written in the background, the latest, the best and the last few kept.

A checkpoint has two parts, "params" and "optimizer", so that the first can be read without the
second. One of a scheduled step carries its score on the development set; one that an
interruption or the end of training made does not. Averages and the best are of scheduled steps
only, so that an interruption changes no result.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import jax.numpy as jnp
from orbax.checkpoint import v1 as ocp

from transformer_jax.errors import StorageError, UsageError

PyTree = Any
PARTS = ("params", "optimizer")


class Keep:
    """Orbax's policy of what stays: the latest, the best, and the last `scheduled` with a score."""

    def __init__(self, scheduled: int) -> None:
        self.scheduled = scheduled

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        """Say of each checkpoint whether it stays."""
        del context
        scored = [c for c in checkpoints if c.metrics is not None]
        best = min(scored, key=lambda c: c.metrics["perplexity"], default=None)
        kept = {
            c.step
            for c in [*checkpoints[-1:], *scored[-self.scheduled :], *([best] if best else [])]
        }
        return [c.step in kept for c in checkpoints]


class Checkpoints:
    """The checkpoints of a run; a context, at whose end all are on disk."""

    def __init__(self, folder: Path, *, keep: int | None = None) -> None:
        """Open the folder.

        Args:
            folder: made where it is missing, if it may be written.
            keep: how many scheduled checkpoints stay; None opens for reading only.
        """
        logging.getLogger("absl").setLevel(logging.WARNING)
        self._run = folder.parent
        if keep is None and not folder.is_dir():
            raise UsageError(f"{folder.parent} has no checkpoint yet")
        policy: Any = (
            ocp.training.preservation_policies.PreserveAll() if keep is None else Keep(keep)
        )
        self._checkpointer = ocp.training.Checkpointer(
            str(folder.absolute()),
            preservation_policy=policy,
            cleanup_tmp_directories=keep is not None,
        )
        self._pending: Any = None

    @property
    def latest(self) -> int | None:
        """The newest step, or None."""
        latest = self._checkpointer.latest
        return None if latest is None else latest.step

    @property
    def scores(self) -> dict[int, float]:
        """Perplexity on the development set of each scheduled step that is kept."""
        kept: Any = self._checkpointer.checkpoints
        return {c.step: c.metrics["perplexity"] for c in kept if c.metrics is not None}

    def save(
        self,
        step: int,
        params: PyTree,
        optimizer: PyTree,
        perplexity: float | None,
        unreported: Sequence[Sequence[float]] = (),
    ) -> None:
        """Begin to write a checkpoint; the arrays may be given away once this returns.

        Args:
            step: updates done.
            params: of the model.
            optimizer: its state.
            perplexity: on the development set, for a scheduled step; else None.
            unreported: what the next report needs of the steps since the last one.
        """
        self.wait()
        self._pending = self._checkpointer.save_checkpointables_async(
            step,
            dict(zip(PARTS, (params, optimizer), strict=True)),
            metrics=None if perplexity is None else {"perplexity": perplexity},
            custom_metadata={"unreported": [list(sums) for sums in unreported]},
            # Whenever it is called, not by Orbax's own schedule.
            force=True,
        )

    def unreported(self, step: int) -> list[list[float]]:
        """Return what `save` was given under this name."""
        metadata: Any = self._checkpointer.checkpointables_metadata(step).custom_metadata
        return metadata["unreported"]

    def wait(self) -> None:
        """Wait until what was begun is on disk.

        Raises:
            StorageError: it could not be written.
        """
        pending, self._pending = self._pending, None
        try:
            if pending is not None:
                pending.result()
        except (OSError, ValueError) as error:
            raise StorageError(f"a checkpoint could not be written: {error}") from error

    def restore(self, step: int, targets: dict[str, PyTree]) -> dict[str, PyTree]:
        """Read parts of a checkpoint.

        Args:
            step: which.
            targets: for each part, a tree of `jax.ShapeDtypeStruct` with shardings: what the
                arrays must be and where they shall lie.

        Raises:
            StorageError: it cannot be read, or holds something else.
        """
        self.wait()
        try:
            stored: Any = self._checkpointer.checkpointables_metadata(step).metadata
            for part, target in targets.items():
                # Orbax itself would turn one dtype into another without a word.
                _check_same(f"checkpoint {step}", _leaves(stored[part]), _leaves(target))
            return self._checkpointer.load_checkpointables(step, targets)
        except (OSError, ValueError, KeyError) as error:
            reason = str(error.__cause__ or error).strip().splitlines()[0]
            raise StorageError(f"checkpoint {step} cannot be read: {reason}") from error

    def choose(self, average: int = 1, step: int | None = None) -> list[int]:
        """Return the steps of the checkpoints that are meant, oldest first.

        Args:
            average: how many. One may be of any step; more are scheduled ones.
            step: the last of them; None for the newest there is.

        Raises:
            UsageError: there is none, none of this step, or there are not so many.
        """
        if self.latest is None:
            raise UsageError(f"{self._run} has no checkpoint yet")
        kept: Any = self._checkpointer.checkpoints
        steps = sorted(self.scores if average > 1 else [c.step for c in kept])
        if step not in (None, *steps):
            kind = "scheduled checkpoint" if average > 1 else "checkpoint"
            there = ", ".join(map(str, steps)) or "none"
            raise UsageError(f"{self._run} has no {kind} of step {step}; there are: {there}")
        steps = [s for s in steps if step is None or s <= step][-average:]
        if len(steps) < average:
            until = "" if step is None else f" up to step {step}"
            raise UsageError(
                f"the mean of {average} checkpoints was asked for, but the run has "
                f"{len(steps)} scheduled ones{until}: `--average 1` takes the newest by itself"
            )
        return steps

    def mean_params(self, steps: Sequence[int], target: PyTree) -> PyTree:
        """Return the mean of the parameters of these steps (section 6.1)."""
        total = self.restore(steps[0], {"params": target})["params"]
        for step in steps[1:]:
            found = self.restore(step, {"params": target})["params"]
            total = jax.tree.map(jnp.add, total, found)
        return total if len(steps) == 1 else jax.tree.map(lambda x: x / len(steps), total)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.wait()
        finally:
            self._checkpointer.close()


def _leaves(tree: PyTree) -> dict[str, str]:
    """Return what each array is, by its path in the tree."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): f"{leaf.dtype}{list(leaf.shape)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _check_same(name: str, stored: dict[str, str], wanted: dict[str, str]) -> None:
    differing = sorted(stored.items() ^ wanted.items())
    if differing:
        path = differing[0][0]
        raise StorageError(
            f"{name} does not fit: {path} is {stored.get(path, 'missing')}, "
            f"not {wanted.get(path, 'there')}"
        )


def on_device(tree: PyTree, sharding: jax.sharding.Sharding) -> PyTree:
    """Describe arrays like these that lie as `sharding` says."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)
