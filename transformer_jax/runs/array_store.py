"""Store trees of arrays on disk with Orbax, and validate them when they are restored.

Orbax logs long messages about errors that it also raises. Importing this module silences Orbax's
log, because callers report each error in one line.
"""

import logging
import math
import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import jax
from jaxtyping import PyTree
from orbax.checkpoint import v1 as ocp

from transformer_jax.errors import StorageError, summarize_error

logging.getLogger("absl").addFilter(lambda record: "orbax" not in Path(record.pathname).parts)

Trees = Mapping[str, PyTree]
"""Trees of arrays, or of `jax.ShapeDtypeStruct`, keyed by name ("params" and "optimizer")."""
PendingWrite = ocp.AsyncResponse[None]
# Orbax compresses arrays, so a restored checkpoint may be larger than its files. A compression
# factor above `MAX_COMPRESSION` is implausible.
MAX_COMPRESSION = 20
ALWAYS_ALLOWED_BYTES = 64 << 20
REMOVAL_SECONDS = 10.0
_STARTING = threading.Lock()


def save_async(folder: Path, trees: Trees) -> PendingWrite:
    """Start writing each tree to its own subfolder. Afterward, the arrays may be donated."""
    # Runs that train in one program save at the same time, but Orbax numbers its operations in a
    # global variable.
    with _STARTING:
        return ocp.save_checkpointables_async(str(folder.absolute()), dict(trees))


def restore(folder: Path, targets: Trees) -> dict[str, PyTree]:
    """Restore the trees in `targets`; raise a StorageError if one is damaged or does not match."""
    name = f"checkpoint {folder.name}"
    try:
        stored: Trees = ocp.checkpointables_metadata(str(folder.absolute())).metadata
        for tree, target in targets.items():
            _check_size(folder, tree, target)
            _check_chunks(name, stored[tree])
            _check_same_types(name, _types_by_path(stored[tree]), _types_by_path(target))
        return ocp.load_checkpointables(str(folder.absolute()), dict(targets))
    except StorageError:
        raise
    # Orbax and its libraries raise exceptions of many undocumented types.
    except Exception as error:
        reason = summarize_error(error.__cause__ or error)
        raise StorageError(f"{name} cannot be read: {reason}") from error


def on_device(tree: PyTree, sharding: jax.sharding.Sharding) -> PyTree:
    """Return targets for `restore`: the arrays' shapes and dtypes, all with the given sharding."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def remove_partial(folder: Path, pattern: str) -> None:
    """Remove incomplete writes. Retry for a while, because Orbax's threads may still be writing."""
    deadline = time.monotonic() + REMOVAL_SECONDS
    while (paths := sorted(folder.glob(pattern))) and time.monotonic() < deadline:
        for path in paths:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        time.sleep(0.01)


def _check_size(folder: Path, tree: str, target: PyTree) -> None:
    """Before allocating memory, reject arrays that are implausibly large for their files."""
    expected = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(target))
    stored = sum(path.stat().st_size for path in (folder / tree).rglob("*") if path.is_file())
    if expected > ALWAYS_ALLOWED_BYTES + MAX_COMPRESSION * stored:
        raise StorageError(
            f"checkpoint {folder.name} of {folder.parent.parent} is invalid: its {tree} "
            f"would take {expected >> 20} MiB, but its files have {stored >> 20} MiB"
        )


def _check_chunks(name: str, stored: PyTree) -> None:
    """Reject chunks that are larger than their array, because whole chunks are decompressed."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(stored):
        storage = leaf.storage_metadata
        shapes = (storage.chunk_shape, storage.write_shape) if storage else ()
        if any(math.prod(shape) > math.prod(leaf.shape) for shape in shapes if shape):
            array = jax.tree_util.keystr(path, simple=True, separator=".")
            raise StorageError(f"{name} is invalid: {array} has chunks larger than the array")


def _types_by_path(tree: PyTree) -> dict[str, str]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): f"{leaf.dtype}{list(leaf.shape)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _check_same_types(name: str, stored: dict[str, str], expected: dict[str, str]) -> None:
    """Reject different names, shapes, and dtypes, because Orbax silently casts dtypes."""
    differences = sorted(stored.items() ^ expected.items())
    if differences:
        path = differences[0][0]
        raise StorageError(
            f"{name} does not match the model: {path} is {stored.get(path, 'missing')}, "
            f"expected {expected.get(path, 'no such array')}"
        )
