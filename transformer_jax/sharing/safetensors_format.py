"""Write a model to a folder that contains a safetensors file, or read it from such a folder.

The folder contains:

    run.json            the config and versions, as in a run
    tokenizer.model     the vocabulary
    model.safetensors   the parameters in float32, by flat name
"""

from pathlib import Path

import jax
import jax.numpy as jnp

from transformer_jax.baselines.build import build_model
from transformer_jax.errors import StorageError, UsageError
from transformer_jax.inference.trained_run import Run
from transformer_jax.model.inspect import abstract_params, digest_params, parameter_shapes
from transformer_jax.optional import require_library
from transformer_jax.runs.run_folder import RunFolder
from transformer_jax.sharing.packaging import build_package
from transformer_jax.sharing.parameters import (
    flatten_params,
    read_arrays,
    unflatten_params,
    write_arrays,
)

WEIGHTS = "model.safetensors"


def export_safetensors(run: Run, path: Path) -> None:
    """Write a run's parameters, description, and vocabulary to a new folder.

    Raises:
        UsageError: the folder exists, or safetensors is not installed.
        StorageError: the folder cannot be written.
    """
    require_library("safetensors")
    with build_package(run, path) as folder:
        metadata = {"sha256": digest_params(run.params)}
        write_arrays(folder.path / WEIGHTS, flatten_params(run.params), metadata)


def read_safetensors(path: Path) -> Run:
    """Read a folder that `export_safetensors` wrote, without executing anything in it.

    Raises:
        UsageError: the path is not an exported model, or safetensors is not installed.
        StorageError: a file is damaged or cannot be read, or its parameters do not match the
            config.
    """
    folder, weights = RunFolder.open(path), path / WEIGHTS
    if folder.package is None or not weights.is_file():
        raise UsageError(f"{path} is not an exported model: it has no {WEIGHTS}")
    model = build_model(folder.config.model, **folder.vocabulary.sizes)
    arrays, metadata = read_arrays(weights, parameter_shapes(abstract_params(model)))
    params = unflatten_params(arrays)
    if metadata.get("sha256") != digest_params(params):
        raise StorageError(f"{weights} is damaged: it differs from what was written")
    return Run(folder, jax.tree.map(jnp.asarray, params), folder.package.steps)
