"""The beginning of a run: its text is prepared, its folder is made."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from transformer_jax.config import Config
from transformer_jax.data.encode import SIDES, Progress, ignore_progress
from transformer_jax.data.prepare import Prepared, prepare
from transformer_jax.distributed import heartbeat
from transformer_jax.errors import DataError, UsageError
from transformer_jax.inference.trained_run import Run, load
from transformer_jax.model.build import build_transformer
from transformer_jax.model.inspect import abstract_params
from transformer_jax.runs.checkpoint_manager import CheckpointManager
from transformer_jax.runs.run_directory import RunDirectory, check_available
from transformer_jax.training.loop import checkpoint_metadata
from transformer_jax.training.step import init_state


def create_run(
    config: Config,
    path: Path,
    console: Console,
    *,
    init_from: Path | None = None,
    progress: Progress = ignore_progress,
) -> RunDirectory:
    """Prepare the text and make the folder of a new run.

    Args:
        config: the experiment.
        path: where the folder shall be.
        console: where notes go.
        init_from: a run whose newest parameters, and vocabulary, this one begins with.
        progress: told of the preparation.

    Raises:
        UsageError: the folder is taken, or the other run has parameters of other shapes.
        DataError: the text cannot be used.
    """
    check_available(path)

    def tell(doing: str, done: int, total: int) -> None:
        heartbeat.busy(doing)
        progress(doing, done, total)

    other = None if init_from is None else load(init_from, average_checkpoints=1)
    vocabulary = None if other is None else other.vocabulary
    prepared = prepare(config.data, vocabulary, progress=tell)
    sizes = prepared.vocabulary.sizes
    for key, pieces in sizes.items():
        asked = getattr(config.data, key)
        if pieces != asked:
            console.print(f"note: data.{key} is {pieces}, not {asked}")
            config = config.change(data={key: pieces})
    _check_lengths(config, prepared)
    model = build_transformer(config.model, **sizes)
    if other is not None:
        _check_same_shapes(abstract_params(model), abstract_params(other.model), other)

    def begin(folder: RunDirectory) -> None:
        if other is not None:
            state = init_state(model, config.train)
            with CheckpointManager(folder.checkpoints, folder.identity, keep=1) as checkpoints:
                arrays = {"params": other.params, "optimizer": state.optimizer}
                checkpoints.prepare_save(0, arrays)
                checkpoints.save(0, arrays, None, checkpoint_metadata(state, []))

    return RunDirectory.create(path, config, prepared.vocabulary, prepared.fingerprint, begin)


def _check_lengths(config: Config, prepared: Prepared) -> None:
    """Refuse sets that the model cannot read, before hours go by."""
    limits = config.model.max_lengths
    cure = "raise model.max_length"
    if config.model.max_positions is not None:
        cure += " and model.max_positions, or choose model.out_of_range_positions clamp"
    for split in (split for split in ("dev", "test") if split in prepared.report):
        for side, pieces, limit in zip(SIDES, prepared.tokens(split), limits, strict=True):
            longest = int(pieces.lengths.max())
            if limit is not None and longest > limit:
                raise DataError(
                    f"a {side} of {split} has {longest} pieces, and the model reads {limit}: {cure}"
                )


def _check_same_shapes(mine: Any, theirs: Any, other: Run) -> None:
    def shapes(tree: Any) -> Iterable[tuple[str, tuple[int, ...]]]:
        return (
            (jax.tree_util.keystr(k), x.shape) for k, x in jax.tree_util.tree_leaves_with_path(tree)
        )

    differing = dict(shapes(mine)).items() ^ dict(shapes(theirs)).items()
    if differing:
        raise UsageError(
            f"the parameters of {other.folder.path} do not fit this model: "
            f"they differ at {min(differing)[0]}"
        )
