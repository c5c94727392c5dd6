"""Parameters as arrays with flat names, such as `encoder_0.self_attention.query.kernel`.

This module also reads and writes files of such arrays: safetensors files, and `pytorch_model.bin`
with PyTorch's weights-only loader, which does not execute code.
"""

import re
import struct
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from types import MappingProxyType, ModuleType
from typing import NamedTuple

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from transformer_jax.errors import StorageError, UsageError, summarize_error
from transformer_jax.model.encoder_decoder import Params
from transformer_jax.optional import import_optional

Arrays = dict[str, np.ndarray]
Shapes = Mapping[str, tuple[int, ...]]
Metadata = Mapping[str, str]


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
    """Write arrays to a safetensors file with the default permissions of a new file."""
    # `save_file` would create a file that only its owner can read.
    path.write_bytes(import_optional("safetensors.numpy").save(arrays, dict(metadata)))


def read_arrays(
    path: Path,
    expected: Shapes,
    optional: Shapes = MappingProxyType({}),
    *,
    types: Sequence[str] = ("F32",),
) -> tuple[Arrays, Metadata]:
    """Return a safetensors file's arrays, which must be the expected ones, and its metadata."""
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
    # Early versions of safetensors cannot read bfloat16 into NumPy arrays.
    except (OSError, AttributeError, TypeError, safetensors.SafetensorError) as error:
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


# In earlier versions of PyTorch, a malicious file can make the weights-only loader execute code.
MIN_TORCH = (2, 10)
TYPES = {"torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16"}
# The types of parameters that an import converts to float32.
FLOATS = tuple(TYPES.values())


def read_torch_arrays(path: Path, expected: Shapes, optional: Shapes, max_bytes: int) -> Arrays:
    """Read a PyTorch file with the expected arrays, in one of `FLOATS`, and convert to float32."""
    torch = import_optional("torch")
    version = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))
    if version < MIN_TORCH:
        raise UsageError(f"{path} needs torch 2.10 or later, and this is {torch.__version__}")
    content = _load(torch, path, max_bytes)
    if not isinstance(content, Mapping) or not all(
        isinstance(name, str) and isinstance(x, torch.Tensor) and x.layout is torch.strided
        for name, x in content.items()
    ):
        raise StorageError(f"{path} cannot be read: it contains something other than arrays")
    stored = {
        name: StoredArray(tuple(x.shape), TYPES.get(str(x.dtype), str(x.dtype)))
        for name, x in content.items()
    }
    check_arrays(path, stored, expected, optional, types=FLOATS)
    return {name: x.detach().float().contiguous().numpy() for name, x in content.items()}


def _load(torch: ModuleType, path: Path, max_bytes: int) -> object:
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                entries = archive.infolist()
            # PyTorch never compresses files, so a file's size bounds the memory needed to read it.
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                raise StorageError(f"{path} is invalid: it is compressed")
            if sum(entry.file_size for entry in entries) > max_bytes:
                raise StorageError(f"{path} is invalid: it unpacks to more than its config implies")
        with warnings.catch_warnings():
            # PyTorch issues warnings about files that it then rejects.
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        raise StorageError(
            f"{path} cannot be read: it contains something other than arrays, which could be code"
        ) from error
    except (
        *(OSError, EOFError, RuntimeError, MemoryError, ValueError, TypeError, LookupError),
        *(AttributeError, OverflowError, struct.error, zipfile.BadZipFile),
    ) as error:
        raise StorageError(f"{path} cannot be read: {summarize_error(error)}") from error
