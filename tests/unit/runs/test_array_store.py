import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from run_files import params_of, target_like

from transformer_jax.errors import StorageError
from transformer_jax.runs import array_store


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that contains the arrays of checkpoint 1."""
    folder = tmp_path_factory.mktemp("checkpoints") / "1"
    array_store.save_async(folder, {"params": params_of(1)}).result()
    return folder


def test_threads_can_start_writes_at_the_same_time(tmp_path: Path) -> None:
    def save(step: int) -> None:
        array_store.save_async(tmp_path / str(step), {"params": params_of(step)}).result()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(save, range(1, 9)))
    for step in range(1, 9):
        target = {"params": target_like(params_of(step))["params"]}
        restored = array_store.restore(tmp_path / str(step), target)["params"]
        jax.tree.map(np.testing.assert_array_equal, restored, params_of(step))


@pytest.mark.parametrize(
    ("other", "path"),
    [
        ({"layer": {"kernel": jnp.zeros((3, 9)), "bias": jnp.zeros(2)}}, "layer.kernel"),
        ({"layer": {"kernel": jnp.zeros((3, 2))}, "more": jnp.zeros(1)}, "layer.bias"),
        (
            {"layer": {"kernel": jnp.zeros((3, 2), jnp.bfloat16), "bias": jnp.zeros(2)}},
            "layer.kernel",
        ),
    ],
    ids=["shape", "names", "dtype"],
)
def test_arrays_that_do_not_match_are_rejected_in_one_line(
    stored: Path, other: dict[str, Any], path: str
) -> None:
    with pytest.raises(StorageError, match=f"checkpoint 1 does not match .*: {path} is") as caught:
        array_store.restore(stored, target_like(other))
    assert "\n" not in str(caught.value)


def test_an_implausibly_large_array_is_rejected_before_memory_is_allocated(stored: Path) -> None:
    huge = target_like({"x": jax.ShapeDtypeStruct((10**6, 10**6), jnp.float32)})
    message = "its params would take 3814697 MiB, but its files have 0 MiB"
    with pytest.raises(StorageError, match=message):
        array_store.restore(stored, huge)


def test_an_error_of_orbax_is_one_line(stored: Path) -> None:
    with pytest.raises(StorageError, match=r"checkpoint 2 cannot be read: ") as caught:
        array_store.restore(stored.with_name("2"), target_like(params_of(0)))
    assert "\n" not in str(caught.value)


def test_a_chunk_that_is_larger_than_its_array_is_rejected_before_it_is_read(stored: Path) -> None:
    folder = stored.with_name("3")
    shutil.copytree(stored, folder)
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{folder / 'params'}/"}).result()
    [key] = [x for x in store.list().result() if x.endswith(b"bias/zarr.json")]
    array = json.loads(store.read(key).result().value)
    # A chunk of this size takes 400 GB of memory.
    array["chunk_grid"]["configuration"]["chunk_shape"] = [10**11]
    array["codecs"] = [{"name": "bytes", "configuration": {"endian": "little"}}]
    store.write(key, json.dumps(array).encode()).result()
    with pytest.raises(StorageError, match=r"layer\.bias has chunks larger than the array"):
        array_store.restore(folder, target_like(params_of(0)))
