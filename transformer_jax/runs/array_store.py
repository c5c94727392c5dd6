"""Trees of arrays on disk, by Orbax: what is read is what was asked for, or refused in one line."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from transformer_jax.errors import StorageError

PyTree = Any
# Orbax compresses: a checkpoint may hold more than it weighs, within reason.
MOST_COMPRESSED = 20
ALWAYS_ALLOWED = 64 << 20


def save_async(folder: Path, parts: Mapping[str, PyTree]) -> Any:
    """Begin to write trees, each to a folder of its name; then the arrays may be given away.

    Returns:
        What has a `result()`, which ends when all is written. Both this call and that may raise any
        error of Orbax.
    """
    return ocp.save_checkpointables_async(str(folder.absolute()), dict(parts))


def restore(folder: Path, targets: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """Read some of the trees that were written to a folder.

    Args:
        folder: the checkpoint's; its name is the step.
        targets: for each tree, one of `jax.ShapeDtypeStruct` with shardings: what the arrays must
            be and where they shall lie.

    Raises:
        StorageError: they cannot be read, or are others.
    """
    name = f"checkpoint {folder.name}"
    _check_plausible(folder, targets)
    try:
        stored: Any = ocp.checkpointables_metadata(str(folder.absolute())).metadata
        for part, target in targets.items():
            # Orbax itself would turn one dtype into another without a word.
            _check_same(name, _leaves(stored[part]), _leaves(target))
        return ocp.load_checkpointables(str(folder.absolute()), dict(targets))
    except StorageError:
        raise
    # Orbax and its libraries raise what they please.
    except Exception as error:
        reason = one_line(error.__cause__ or error)
        raise StorageError(f"{name} cannot be read: {reason}") from error


def on_device(tree: PyTree, sharding: jax.sharding.Sharding) -> PyTree:
    """Describe arrays like these that lie as `sharding` says."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def one_line(error: BaseException) -> str:
    """Return what an error of a library's says first."""
    if isinstance(error, OSError) and error.strerror:
        return os.strerror(error.errno) if error.errno else error.strerror
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def _check_plausible(folder: Path, targets: Mapping[str, PyTree]) -> None:
    """Refuse what claims to be huge, before there is room made for it."""
    for part, target in targets.items():
        claimed = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(target))
        there = sum(path.stat().st_size for path in (folder / part).rglob("*") if path.is_file())
        if claimed > ALWAYS_ALLOWED + MOST_COMPRESSED * there:
            raise StorageError(
                f"checkpoint {folder.name} of {folder.parent.parent} cannot be right: its {part} "
                f"would take {claimed >> 20} MiB, and it has {there >> 20}"
            )


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
