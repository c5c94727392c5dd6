"""Manage a run's checkpoints. Each checkpoint is complete or absent, even during a write.

    checkpoints/120/           after step 120
        params/, optimizer/    Orbax arrays, which can be read separately (`array_store`)
        checkpoint.json        score, counters, and identity of the run (`checkpoint_metadata`)
        SHA256SUMS             digests, verified before Orbax reads the files (`checksums`)

A checkpoint is first written to a hidden folder, such as `.120`. Once all files of the checkpoint
are on disk, a rename makes it visible. Only then are superseded checkpoints deleted. A damaged
checkpoint is renamed, for example to `bad-120`, and the previous one is used.

A checkpoint at a scheduled step has a development score, which is recorded after the checkpoint is
saved. A checkpoint that is saved at a different step, because of a signal, a timer, or the end of
training, has no score. Only scheduled checkpoints are averaged or chosen as the best, so signals
and the timer do not affect results.
"""

import contextlib
import re
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Literal, Self

import jax
from jaxtyping import PyTree

from transformer_jax.errors import StorageError, UsageError, summarize_error
from transformer_jax.files import JsonObject, check_utf8, find_free_path, sync, write_text
from transformer_jax.progress import note
from transformer_jax.remote import copies, session
from transformer_jax.runs import array_store, checksums
from transformer_jax.runs.array_store import PendingWrite, Trees
from transformer_jax.runs.checkpoint_metadata import NAME, CheckpointMetadata, DevScores
from transformer_jax.runs.checksums import CorruptionError

STEP = re.compile(r"(0|[1-9][0-9]{0,8})\Z")


class CheckpointManager:
    """A run's checkpoints. The context manager waits for pending writes on exit."""

    def __init__(
        self,
        folder: Path,
        identity: Mapping[str, object],
        *,
        keep: int | None = None,
        metric: Literal["perplexity", "smoothed_loss"] = "perplexity",
    ) -> None:
        """Open or create a checkpoint folder. All checkpoints must have the given identity.

        The manager keeps the latest checkpoint, the best one by the given metric, and the last
        `keep` scheduled ones. If `keep` is None, the manager opens the folder read-only.
        """
        self.folder, self.run = folder, folder.parent
        self._identity, self._keep, self._metric = dict(identity), keep, metric
        # All processes write arrays, but only the primary process writes other files.
        self._is_primary = jax.process_index() == 0
        if keep is None and not folder.is_dir():
            raise UsageError(f"{self.run} has no checkpoint yet")
        # With any other path, Orbax would find no arrays.
        check_utf8(self.run, "rename the folder")
        if keep is not None and self._is_primary:
            folder.mkdir(parents=True, exist_ok=True)
            for partial in (".[0-9]*", ".old-*"):
                array_store.remove_partial(folder, partial)
            for step in self.steps:
                # `latest_valid` describes any damage.
                with contextlib.suppress(CorruptionError, OSError):
                    checksums.finish_replacement(folder / str(step))
        self._verified = set[int]()
        self._metadata: dict[int, CheckpointMetadata] = {}
        self._damage: dict[int, str] = {}
        self._read_metadata()
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None
        self._copy: Future[PendingWrite] | None = None

    @property
    def steps(self) -> list[int]:
        """The steps of the checkpoints on disk, in ascending order."""
        return sorted(int(path.name) for path in self.folder.iterdir() if STEP.match(path.name))

    @property
    def perplexities(self) -> dict[int, float]:
        """The development perplexity of each scheduled checkpoint, keyed by step."""
        return {
            step: metadata.perplexity
            for step, metadata in sorted(self._metadata.items())
            if metadata.perplexity is not None
        }

    @property
    def scores(self) -> dict[int, float]:
        """The metric of each scheduled checkpoint that has it, keyed by step; lower is better."""
        scores = {step: self._metadata[step].score(self._metric) for step in self.perplexities}
        return {step: score for step, score in scores.items() if score is not None}

    @property
    def damaged_metadata(self) -> dict[int, str]:
        """A description of the damage to each checkpoint with damaged metadata, keyed by step."""
        return dict(self._damage)

    def metadata(self, step: int) -> JsonObject:
        """Return the metadata that was passed to `save`; raise a StorageError if it is damaged."""
        self._check(step, self._damage.get(step))
        return self._metadata[step].custom_metadata

    def previous_step(self, step: int) -> int | None:
        """Return the previous scheduled step, or None if it does not exist or is unknown."""
        return self._metadata[step].previous_step if step in self._metadata else None

    def latest_valid(self) -> int | None:
        """Return the step of the latest intact checkpoint, or None if there are no checkpoints.

        For each damaged checkpoint after this step, issue a note and, unless the folder is
        read-only, rename the checkpoint. Raise a StorageError if all checkpoints are damaged.
        """
        damage: dict[int, str] = {}
        for step in reversed(self.steps):
            if (reason := self.find_damage(step)) is None:
                for bad, why in damage.items():
                    aside = self._move_aside(bad)
                    problem = f"checkpoint {bad} is damaged{aside}: {why}"
                    note(f"{problem}; checkpoint {step} is used instead")
                return step
            damage[step] = reason
        if damage:
            reasons = "; ".join(f"{step}: {reason}" for step, reason in damage.items())
            raise StorageError(f"every checkpoint of {self.run} is damaged: {reasons}")
        return None

    def find_damage(self, step: int) -> str | None:
        """Describe the damage to a checkpoint, or return None if it is intact."""
        if step in self._verified:
            return None
        try:
            self._check_files(self.folder / str(step))
        except (CorruptionError, FileNotFoundError) as error:
            if self._is_deleted(step):
                raise StorageError(f"checkpoint {step} of {self.run} has been deleted") from error
            return str(error)
        except OSError as error:
            # The checkpoint may be intact but not readable by this user, so do not rename it.
            raise StorageError(f"checkpoint {step} cannot be read: {error}") from error
        if step not in self._damage:
            self._verified.add(step)
        return self._damage.get(step)

    def _check_files(self, folder: Path) -> None:
        """Check the digests. In a copy of a run in a bucket, first download missing files."""
        try:
            checksums.check(folder)
        except CorruptionError:
            if not copies.repair(folder):
                raise
            checksums.check(folder)

    def prepare_save(self, step: int, arrays: Trees) -> None:
        """Wait for the previous write and check the disk's free space, before any process saves."""
        self.wait()
        session.check(self.run)
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(dict(arrays)))
        free = shutil.disk_usage(self.folder).free
        if free < size:
            raise StorageError(
                f"no room for checkpoint {step}: it needs {size >> 20} MiB, but {self.folder} has "
                f"{free >> 20} MiB free; earlier checkpoints are intact"
            )

    def save(
        self,
        step: int,
        arrays: Trees,
        perplexity: float | None,
        metadata: Mapping[str, object],
        smoothed_loss: float | None = None,
        *,
        awaits_score: bool = False,
    ) -> None:
        """Start writing JSON metadata and trees of arrays, after `prepare_save`.

        The caller may then donate the arrays. If `awaits_score` is true, the caller must call
        `record_score` first, and no checkpoint is deleted before that call. The next call of
        `wait`, `prepare_save`, `restore`, or `discard` raises the error of a failed write. The
        scores are None if the step is not scheduled.
        """
        previous_step = max(self.perplexities, default=None)
        content = CheckpointMetadata(perplexity, previous_step, dict(metadata), smoothed_loss)
        copied = self._writer.submit(array_store.save_async, self.folder / f".{step}", arrays)
        self._metadata[step] = content
        superseded = set[int]() if awaits_score else self._supersede()
        self._copy = copied
        self._pending = self._writer.submit(self._finish, step, copied, content, superseded)
        if not awaits_score:
            self.wait_for_copy()

    def wait_for_copy(self) -> None:
        """Wait until the host has a copy of the arrays, which may then be donated."""
        copied, self._copy = self._copy, None
        if copied is not None and copied.exception() is not None:
            self.wait()

    def record_score(
        self, step: int, scores: DevScores | None, metadata: Mapping[str, object]
    ) -> None:
        """Start replacing the scores and metadata of the latest checkpoint, as in `save`."""
        self.wait_for_copy()
        perplexity, smoothed_loss = scores or (None, None)
        content = self._metadata[step]._replace(
            perplexity=perplexity, smoothed_loss=smoothed_loss, custom_metadata=dict(metadata)
        )
        self._metadata[step] = content
        superseded, pending = self._supersede(), self._pending
        self._pending = self._writer.submit(self._finish_score, step, pending, content, superseded)

    def discard(self, step: int) -> None:
        """Delete a checkpoint after its write ends. Only the primary process deletes the files."""
        self.wait()
        del self._metadata[step]
        if self._is_primary:
            self._delete({step})

    def _supersede(self) -> set[int]:
        """Forget the superseded checkpoints, and return their steps."""
        scores = self.scores
        best = min(scores, key=lambda step: (scores[step], step), default=0)
        kept = {max(self._metadata), best, *list(self.perplexities)[-(self._keep or 1) :]}
        superseded = self._metadata.keys() - kept
        for old in superseded:
            del self._metadata[old]
        return superseded

    def is_writing(self) -> bool:
        """Return whether a write is in progress."""
        return self._pending is not None and not self._pending.done()

    def has_failed(self) -> bool:
        """Return whether the last write or an upload failed; `prepare_save` raises the error."""
        pending = self._pending
        is_written = pending is None or not pending.done() or pending.exception() is None
        return not is_written or session.has_failed(self.run)

    def wait(self) -> None:
        """Wait until the pending write is on disk; raise a StorageError if the write failed."""
        pending, self._pending = self._pending, None
        try:
            if pending is not None:
                pending.result()
        except StorageError:
            self._read_metadata()
            raise

    def restore(self, step: int, targets: Trees) -> dict[str, PyTree]:
        """Read the trees in `targets` from a checkpoint. See `array_store.restore`."""
        self.wait()
        self._check(step, self.find_damage(step))
        try:
            with checksums.listed_files(self.folder / str(step)) as folder:
                return array_store.restore(folder, targets)
        except CorruptionError as error:
            # The checkpoint has changed or disappeared since it was checked.
            raise StorageError(
                f"checkpoint {step} of {self.run} cannot be read: {error}"
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._writer:
            self.wait()

    def _read_metadata(self) -> None:
        self._metadata.clear()
        self._damage.clear()
        for step in self.steps:
            try:
                path = self.folder / str(step)
                self._metadata[step] = CheckpointMetadata.read(path, self._identity)
            except CorruptionError as error:
                if not self._is_deleted(step):
                    self._damage[step] = str(error)

    def _is_deleted(self, step: int) -> bool:
        return not (self.folder / str(step)).exists()

    def _check(self, step: int, damage: str | None) -> None:
        if damage is not None:
            raise StorageError(f"checkpoint {step} of {self.run} is damaged: {damage}")

    def _finish(
        self,
        step: int,
        copied: Future[PendingWrite],
        content: CheckpointMetadata,
        superseded: set[int],
    ) -> None:
        """Wait for Orbax, make the checkpoint visible, and then delete superseded checkpoints."""
        with self._as_storage_error(step):
            copied.result().result()
            if not self._is_primary:
                return
            temporary = self.folder / f".{step}"
            # Empty the marker file, because it contains a local path. Orbax requires only that the
            # file exists.
            for marker in temporary.glob("commit_success.txt"):
                marker.write_bytes(b"")
            write_text(temporary / NAME, content.to_json(step, self._identity))
            checksums.write(temporary)
            temporary.rename(self.folder / str(step))
            sync(self.folder)
            self._delete(superseded)
            session.commit(self.run)

    def _finish_score(
        self,
        step: int,
        pending: Future[None] | None,
        content: CheckpointMetadata,
        superseded: set[int],
    ) -> None:
        """Record a score once the checkpoint is on disk, and delete superseded checkpoints."""
        if pending is not None:
            pending.result()
        if not self._is_primary:
            return
        try:
            text = content.to_json(step, self._identity)
            checksums.replace(self.folder / str(step), NAME, text)
            self._delete(superseded)
            session.commit(self.run)
        except (OSError, CorruptionError) as error:
            raise StorageError(
                f"the score of checkpoint {step} could not be recorded: {summarize_error(error)}"
            ) from error

    def _delete(self, steps: set[int]) -> None:
        self._verified -= steps
        for step in steps:
            # Rename before deleting, so that a numeric name always implies a complete checkpoint.
            # The user may have deleted the checkpoint already.
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree((self.folder / str(step)).rename(self.folder / f".old-{step}"))

    @contextlib.contextmanager
    def _as_storage_error(self, step: int) -> Iterator[None]:
        """Convert any error to a one-line StorageError and remove the partial checkpoint."""
        try:
            yield
        # Orbax and its libraries raise exceptions of many undocumented types.
        except Exception as error:
            if self._is_primary:
                array_store.remove_partial(self.folder, f".{step}*")
            reason = summarize_error(error)
            raise StorageError(
                f"checkpoint {step} could not be written: {reason}; earlier checkpoints are intact"
            ) from error

    def _move_aside(self, step: int) -> str:
        """Rename a damaged checkpoint; return a phrase that reports its new name."""
        if self._keep is None or not self._is_primary:
            return ""
        aside = (self.folder / str(step)).rename(find_free_path(self.folder / f"bad-{step}"))
        session.commit(self.run)
        self._metadata.pop(step, None)
        self._damage.pop(step, None)
        return f" and was renamed to {aside.name}"
