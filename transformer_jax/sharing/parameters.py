"""Parameters as arrays with flat names, such as `encoder_0.self_attention.query.kernel`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from transformer_jax.errors import StorageError
from transformer_jax.model.encoder_decoder import Params
from transformer_jax.sharing.optional import import_optional

Arrays = dict[str, np.ndarray]
"""Arrays, keyed by flat parameter name."""
Shapes = Mapping[str, tuple[int, ...]]
"""Shapes, keyed by flat parameter name."""
Metadata = Mapping[str, str]
"""The metadata of a safetensors file."""


def flatten_params(params: Params) -> Arrays:
    """Flatten nested parameters into a dictionary of arrays, keyed by flat name."""
    return {name: np.asarray(x) for name, x in flatten_dict(params, sep=".").items()}


def unflatten_params(arrays: Mapping[str, np.ndarray]) -> Params:
    """Invert `flatten_params`: convert arrays with flat names to nested parameters."""
    return dict(unflatten_dict(dict(arrays), sep="."))


class StoredArray(NamedTuple):
    """An array's shape and type, as recorded in a file."""

    shape: tuple[int, ...]
    type: str
    """The type in safetensors notation, such as F32."""


def write_arrays(path: Path, arrays: Arrays, metadata: Metadata) -> None:
    """Write arrays to a safetensors file with the default permissions of a new file.

    Raises:
        UsageError: safetensors is not installed.
    """
    # `save_file` would create a file that only its owner can read.
    path.write_bytes(import_optional("safetensors.numpy").save(arrays, dict(metadata)))


def read_arrays(
    path: Path,
    expected: Shapes,
    optional: Shapes = MappingProxyType({}),
    *,
    types: Sequence[str] = ("F32",),
) -> tuple[Arrays, Metadata]:
    """Return the arrays and the metadata of a safetensors file.

    The file must contain the expected arrays, and may contain the optional arrays, but no others.
    `types` lists the allowed data types.

    Raises:
        UsageError: safetensors is not installed.
        StorageError: the file cannot be read, an array is missing or unknown, or an array has an
            unexpected shape or type.
    """
    safetensors = import_optional("safetensors")
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            names = list(file.keys())
            slices = {name: file.get_slice(name) for name in names}
            # Check all names, shapes, and types before reading the arrays.
            stored = {
                k: StoredArray(tuple(x.get_shape()), x.get_dtype()) for k, x in slices.items()
            }
            check_arrays(path, stored, expected, optional, types=types)
            return {name: file.get_tensor(name) for name in names}, file.metadata() or {}
    except (OSError, safetensors.SafetensorError) as error:
        raise StorageError(f"{path} cannot be read: {error}") from error


def check_arrays(
    source: Path,
    stored: Mapping[str, StoredArray],
    expected: Shapes,
    optional: Shapes,
    *,
    types: Sequence[str],
) -> None:
    """Raise a StorageError if an array is missing or unknown, or has the wrong shape or type."""
    for name in sorted((expected.keys() ^ stored.keys()) - optional.keys()):
        problem = "lacks the parameter" if name in expected else "has an unknown parameter"
        raise StorageError(f"{source} {problem} {name[:100]!r}, so it does not fit its config")
    for name, shape in {**expected, **optional}.items():
        if name not in stored:
            continue
        stored_shape, dtype = stored[name]
        if dtype not in types:
            raise StorageError(
                f"{source} has {name} in the type {dtype}; supported: {', '.join(types)}"
            )
        if stored_shape != shape:
            raise StorageError(
                f"{source} has the shape {stored_shape} for {name}, but its config requires {shape}"
            )
