"""Read `pytorch_model.bin` with PyTorch's weights-only loader, which does not execute code."""

import re
import struct
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from types import ModuleType

from transformer_jax.errors import StorageError, UsageError, summarize_error
from transformer_jax.sharing.optional import import_optional
from transformer_jax.sharing.parameters import Arrays, Shapes, StoredArray, check_arrays

# In earlier versions of PyTorch, a malicious file can make the weights-only loader execute code.
MIN_TORCH = (2, 10)
TYPES = {"torch.float32": "F32", "torch.float16": "F16"}


def read_torch_arrays(path: Path, expected: Shapes, optional: Shapes, max_bytes: int) -> Arrays:
    """Read a PyTorch file that contains the expected float32 or float16 arrays and no unknown ones.

    The file may also contain the optional arrays. `max_bytes` limits the size of the unpacked file.

    Raises:
        UsageError: PyTorch is not installed or is too old.
        StorageError: the file cannot be read, it is compressed or too large, it contains something
            other than arrays, an array is missing or unknown, or an array has an unexpected shape
            or type.
    """
    torch = import_optional("torch", "'torch>=2.10'")
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
    check_arrays(path, stored, expected, optional, types=("F32", "F16"))
    return {name: x.detach().contiguous().numpy() for name, x in content.items()}


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
