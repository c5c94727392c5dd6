"""Test that files of arrays contain exactly the arrays that a model needs."""

from pathlib import Path

import numpy as np
import pytest

from transformer_jax.errors import StorageError
from transformer_jax.sharing.parameters import (
    flatten_params,
    read_arrays,
    unflatten_params,
    write_arrays,
)

PARAMS = {"encoder_0": {"query": {"kernel": np.ones((2, 3), np.float32)}}, "bias": np.zeros(2)}
NAME = "encoder_0.query.kernel"
SHAPES = {NAME: (2, 3)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    pytest.importorskip("safetensors")
    write_arrays(tmp_path / "a.safetensors", {NAME: np.ones((2, 3), np.float32)}, {"x": "y"})
    return tmp_path / "a.safetensors"


def test_flat_names_join_the_names_of_modules_and_can_be_split_again() -> None:
    flat = flatten_params(PARAMS)
    assert set(flat) == {NAME, "bias"}
    np.testing.assert_equal(unflatten_params(flat), PARAMS)


def test_a_file_is_read_as_it_was_written(path: Path) -> None:
    arrays, metadata = read_arrays(path, SHAPES)
    np.testing.assert_equal(arrays, {NAME: np.ones((2, 3), np.float32)})
    assert metadata == {"x": "y"}
    assert read_arrays(path, {}, SHAPES)[0].keys() == {NAME}


@pytest.mark.parametrize(
    ("expected", "types", "message"),
    [
        ({**SHAPES, "other": (1,)}, ("F32",), "lacks the parameter 'other'"),
        ({}, ("F32",), f"has an unknown parameter '{NAME}'"),
        ({NAME: (3, 2)}, ("F32",), r"has the shape \(2, 3\) for .* requires \(3, 2\)"),
        (SHAPES, ("F16",), "in the type F32; supported: F16"),
    ],
)
def test_a_file_that_does_not_fit_its_config_names_the_parameter(
    path: Path, expected: dict[str, tuple[int, ...]], types: tuple[str, ...], message: str
) -> None:
    with pytest.raises(StorageError, match=message):
        read_arrays(path, expected, types=types)


def test_a_damaged_file_is_a_storage_error(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(StorageError, match="cannot be read"):
        read_arrays(path, SHAPES)
