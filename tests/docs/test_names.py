"""Test that the page that maps names from other code names only what exists."""

import importlib
import re

import jax
import pytest
from pages import ROOT

from transformer_jax.config import Config, ModelConfig
from transformer_jax.config.rows import split_field
from transformer_jax.model.build import build_transformer
from transformer_jax.model.inspect import abstract_params

TEXT = (ROOT / "docs/names.md").read_text("utf-8")
# The names in the last column of each table.
NAMES = sorted(
    {
        name
        for line in TEXT.splitlines()
        if line.startswith("|")
        for name in re.findall(r"`([^`]+)`", line.split("|")[-2])
    }
)
OBJECTS = [name for name in NAMES if name.count(".") > 1]
FIELDS = [name for name in NAMES if name.count(".") == 1]


@pytest.mark.parametrize("name", OBJECTS)
def test_each_object_exists(name: str) -> None:
    parts = ["transformer_jax", *name.split(".")]
    # A module's name is in lower case, and the names of a class and its method follow.
    for end in (len(parts) - 1, len(parts) - 2):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            found = getattr(found, part)
        assert callable(found)
        return
    pytest.fail(f"{name} does not exist")


@pytest.mark.parametrize("name", FIELDS)
def test_each_field_exists(name: str) -> None:
    section, key = split_field(name)
    assert hasattr(getattr(Config(), section), key)


def test_each_parameter_exists() -> None:
    params = abstract_params(build_transformer(ModelConfig(num_layers=1), 100))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    names = {name for path in paths for name in re.findall(r"\['(\w+)'\]", path)}
    parameters = set(NAMES) - {*OBJECTS, *FIELDS}
    assert parameters <= names
    assert {"query", "key", "value", "output", "inner", "outer"} <= parameters


@pytest.mark.parametrize(
    "name",
    [
        *("subsequent_mask", "LabelSmoothing", "NoamOpt", "temperature", "n_head"),
        *("w_qs", "w_ks", "d_inner", "n_src_vocab"),
    ],
)
def test_the_page_has_well_known_names(name: str) -> None:
    assert f"`{name}`" in TEXT
