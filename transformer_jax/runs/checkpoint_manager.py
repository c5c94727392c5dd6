"""Checkpoints: arrays by Orbax, written in the background, whole or not there at all.

checkpoints/120/             after step 120
    params/, optimizer/      Orbax's; each can be read without the other (`arrays`)
    checkpoint.json          what else the run needs to go on, and whose it is (`record`)
    SHA256SUMS               of all these files, checked before Orbax opens any (`manifest`)

A checkpoint is made under a name that begins with a dot and appears by rename, when all of it is
on disk; only then older ones go. One that is damaged is moved aside, as bad-120, and the one
before is used.

One of a scheduled step carries its score on the development set; one that an interruption, the
clock or the end of training made does not. Averages and the best are of scheduled steps only, so
that no interruption and no clock changes a result.
"""

import contextlib
import logging
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import jax.numpy as jnp

from transformer_jax.console import stderr
from transformer_jax.errors import StorageError, UsageError
from transformer_jax.runs import array_store, checksums
from transformer_jax.runs.array_store import PyTree
from transformer_jax.runs.checkpoint_metadata import CheckpointMetadata
from transformer_jax.runs.checksums import CorruptionError

STEP = re.compile(r"(0|[1-9][0-9]{0,8})\Z")
SWEEP_SECONDS = 10.0


def steps_to_keep(scores: Mapping[int, float | None], scheduled: int) -> set[int]:
    """Return the steps that stay: the latest, the best, the last `scheduled` that have a score.

    Args:
        scores: perplexity of each step there is; None where it is none of the schedule's.
        scheduled: how many.
    """
    scored = [step for step in sorted(scores) if scores[step] is not None]
    best = min(scored, key=lambda step: (scores[step], step), default=max(scores))
    return {max(scores), best, *scored[-scheduled:]}


class CheckpointManager:
    """The checkpoints of a run; a context, at whose end all are on disk."""

    def __init__(
        self,
        folder: Path,
        identity: Mapping[str, Any],
        *,
        keep: int | None = None,
        say: Callable[[str], object] = stderr.print,
    ) -> None:
        """Open the folder.

        Args:
            folder: made where it is missing, if it may be written.
            identity: what a run must have in common with a checkpoint of it, by name.
            keep: how many scheduled checkpoints stay; None opens for reading only.
            say: told, in one line, of what is damaged.
        """
        # What goes wrong is told by us, in one line.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        self.folder, self._run = folder, folder.parent
        self._identity, self._keep, self._say = dict(identity), keep, say
        # Of the processes of a run all write arrays, and one all else.
        self._is_main = jax.process_index() == 0
        if keep is None and not folder.is_dir():
            raise UsageError(f"{folder.parent} has no checkpoint yet")
        if keep is not None and self._is_main:
            folder.mkdir(parents=True, exist_ok=True)
            self._remove_partial(".*")
        self._good = set[int]()
        self._records = self._read_records()
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None

    @property
    def steps(self) -> list[int]:
        """The steps that are on disk, in order."""
        return sorted(int(path.name) for path in self.folder.iterdir() if STEP.match(path.name))

    @property
    def scores(self) -> dict[int, float]:
        """Perplexity on the development set of each scheduled step that is kept."""
        return {
            step: record.perplexity
            for step, record in sorted(self._records.items())
            if isinstance(record, CheckpointMetadata) and record.perplexity is not None
        }

    def metadata(self, step: int) -> dict[str, Any]:
        """Return what `save` was given under this name.

        Raises:
            StorageError: the checkpoint is damaged.
        """
        record = self._records[step]
        if isinstance(record, CorruptionError):
            raise StorageError(f"checkpoint {step} of {self._run} is damaged: {record}")
        return record.notes

    def _read_records(self) -> dict[int, CheckpointMetadata | CorruptionError]:
        found: dict[int, CheckpointMetadata | CorruptionError] = {}
        for step in self.steps:
            try:
                found[step] = CheckpointMetadata.read(self.folder / str(step), self._identity)
            except CorruptionError as error:
                found[step] = error
        return found

    def latest_valid(self) -> int | None:
        """Return the newest step whose files are as they were written, or None.

        Who may write moves newer ones aside; nothing is ever deleted.

        Raises:
            StorageError: there are checkpoints, and all are damaged.
        """
        damaged: dict[int, str] = {}
        for step in reversed(self.steps):
            if (fault := self._fault(step)) is None:
                for bad, why in damaged.items():
                    aside = self._move_aside(bad)
                    self._say(f"checkpoint {bad} is damaged{aside}: {why}; {step} is used instead")
                return step
            damaged[step] = fault
        if damaged:
            told = "; ".join(f"{step}: {fault}" for step, fault in damaged.items())
            raise StorageError(f"every checkpoint of {self._run} is damaged: {told}")
        return None

    def _fault(self, step: int) -> str | None:
        """Return what is wrong with the files of a checkpoint, if anything is."""
        if step in self._good:
            return None
        try:
            checksums.check(self.folder / str(step))
        except (CorruptionError, FileNotFoundError) as error:
            return str(error)
        except OSError as error:
            # It may be whole, for someone who may read it.
            raise StorageError(f"checkpoint {step} cannot be read: {error}") from error
        record = self._records.get(step)
        if isinstance(record, CorruptionError):
            return str(record)
        self._good.add(step)
        return None

    def _remove_partial(self, pattern: str) -> None:
        """Remove what is half written; Orbax may be writing still, in threads of its own."""
        until = time.monotonic() + SWEEP_SECONDS
        while (found := sorted(self.folder.glob(pattern))) and time.monotonic() < until:
            for path in found:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
            time.sleep(0.01)

    def _move_aside(self, step: int) -> str:
        if self._keep is None or not self._is_main:
            return ""
        name, count = f"bad-{step}", 1
        while (self.folder / name).exists():
            count += 1
            name = f"bad-{step}-{count}"
        (self.folder / str(step)).rename(self.folder / name)
        self._records.pop(step, None)
        return f" and now called {name}"

    def prepare_save(self, step: int, parts: Mapping[str, PyTree]) -> None:
        """Wait until the checkpoint before is written; see that there is room for this one.

        Of several processes none may go on to `save` before all have done this.

        Raises:
            StorageError: it could not be written, or there is none.
        """
        self.wait()
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(dict(parts)))
        free = shutil.disk_usage(self.folder).free
        if free < size:
            raise StorageError(
                f"no room for checkpoint {step}: it takes {size >> 20} MiB and {self.folder} has "
                f"{free >> 20} left; those before are untouched"
            )

    def save(
        self,
        step: int,
        parts: Mapping[str, PyTree],
        perplexity: float | None,
        notes: Mapping[str, Any],
    ) -> None:
        """Begin to write a checkpoint, after `make_ready`; then the arrays may be given away.

        Args:
            step: batches seen.
            parts: the parameters, and what else training needs, by name.
            perplexity: on the development set, for a scheduled step; else None.
            notes: what else training needs, as plain data.

        Raises:
            StorageError: it could not be begun.
        """
        temporary = self.folder / f".{step}"
        record = CheckpointMetadata(perplexity, max(self.scores, default=None), dict(notes))
        with self._as_storage_error(step, temporary):
            begun = array_store.save_async(temporary, parts)
        self._records[step] = record
        whole = {
            s: r.perplexity for s, r in self._records.items() if isinstance(r, CheckpointMetadata)
        }
        doomed = whole.keys() - steps_to_keep(whole, self._keep or 1)
        for old in doomed:
            del self._records[old]
        self._pending = self._writer.submit(self._finish, step, begun, record, doomed)

    def _finish(self, step: int, begun: Any, record: CheckpointMetadata, doomed: set[int]) -> None:
        """Wait for Orbax, and let the checkpoint appear; then older ones may go."""
        temporary = self.folder / f".{step}"
        with self._as_storage_error(step, temporary):
            begun.result()
            if not self._is_main:
                return
            record.write(temporary, step, self._identity)
            checksums.write(temporary)
            temporary.rename(self.folder / str(step))
            checksums.sync(self.folder)
            self._good -= doomed
            for old in doomed:
                # By rename first: whatever happens, a name that is a number is a whole checkpoint.
                gone = (self.folder / str(old)).rename(self.folder / f".old-{old}")
                shutil.rmtree(gone)

    @contextlib.contextmanager
    def _as_storage_error(self, step: int, temporary: Path) -> Any:
        """Turn whatever goes wrong into one line, and leave nothing half written."""
        try:
            yield
        # Orbax and its libraries raise what they please.
        except Exception as error:
            if self._is_main:
                self._remove_partial(f"{temporary.name}*")
            raise StorageError(
                f"checkpoint {step} could not be written: {array_store.one_line(error)}; "
                f"those before are untouched"
            ) from error

    def is_writing(self) -> bool:
        """Tell whether one is being written."""
        return self._pending is not None and not self._pending.done()

    def has_failed(self) -> bool:
        """Tell whether the last one could not be written: what comes next will say why."""
        pending = self._pending
        return pending is not None and pending.done() and pending.exception() is not None

    def wait(self) -> None:
        """Wait until what was begun is on disk.

        Raises:
            StorageError: it could not be written.
        """
        pending, self._pending = self._pending, None
        try:
            if pending is not None:
                pending.result()
        except StorageError:
            self._records = self._read_records()
            raise

    def restore(self, step: int, targets: Mapping[str, PyTree]) -> dict[str, PyTree]:
        """Read parts of a checkpoint.

        Args:
            step: which.
            targets: for each part, a tree of `jax.ShapeDtypeStruct` with shardings: what the
                arrays must be and where they shall lie.

        Raises:
            StorageError: it cannot be read, is damaged, or holds something else.
        """
        self.wait()
        if (fault := self._fault(step)) is not None:
            raise StorageError(f"checkpoint {step} of {self._run} is damaged: {fault}")
        return array_store.restore(self.folder / str(step), targets)

    def select_steps(self, average: int = 1, step: int | None = None) -> list[int]:
        """Return the steps of the checkpoints that are meant, oldest first.

        Args:
            average: how many. One may be of any step; more are scheduled ones.
            step: the last of them; None for the newest there is.

        Raises:
            UsageError: there is none, none of this step, or there are not so many.
            StorageError: the newest is meant, and all are damaged.
        """
        if not self.steps:
            raise UsageError(f"{self._run} has no checkpoint yet")
        if average == 1 and step is None and (newest := self.latest_valid()) is not None:
            return [newest]
        there = sorted(self.scores) if average > 1 else self.steps
        if step not in (None, *there):
            kind = "scheduled checkpoint" if average > 1 else "checkpoint"
            told = ", ".join(map(str, there)) or "none"
            raise UsageError(f"{self._run} has no {kind} of step {step}; there are: {told}")
        steps = [s for s in there if step is None or s <= step]
        if average > 1 and steps:
            steps = self._in_a_row(steps[-1], average)
            if step is not None and steps[-1:] != [step]:
                raise StorageError(f"checkpoint {step} of {self._run} is damaged")
        steps = steps[-average:]
        if len(steps) < average:
            until = "" if step is None else f" up to step {step}"
            raise UsageError(
                f"the mean of {average} checkpoints was asked for, but the run has "
                f"{len(steps)} scheduled ones in a row{until}: `--average-checkpoints 1` takes the newest by "
                f"itself"
            )
        return steps

    def _in_a_row(self, last: int | None, most: int) -> list[int]:
        """Return scheduled steps up to this one between which none is gone or damaged."""
        row: list[int] = []
        while last is not None and last in self.scores and len(row) < most:
            if (fault := self._fault(last)) is None:
                row.insert(0, last)
            else:
                self._say(f"checkpoint {last} is damaged, and no part of a mean: {fault}")
                if row:
                    break
            record = self._records[last]
            last = record.previous_step if isinstance(record, CheckpointMetadata) else None
        return row

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
            self._writer.shutdown()
