"""Package a trained model as a data-only folder that can be loaded like a run but not resumed.

The folder contains:

    README.md            model card, with metadata for the Hugging Face Hub
    run.json             config, versions, and the steps of the averaged checkpoints
    tokenizer.model      the vocabulary
    checkpoints/120/     the parameters, without optimizer state
    SHA256SUMS           digests of all files, for `sha256sum -c SHA256SUMS`

For other programs, a folder in safetensors format contains only run.json, tokenizer.model, and
model.safetensors: the parameters in float32, by flat name.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp

from transformer_jax.backend import start_backend
from transformer_jax.baselines.build import build_model
from transformer_jax.errors import StorageError, UsageError
from transformer_jax.inference.trained_run import Run
from transformer_jax.model.inspect import abstract_params, digest_params, parameter_shapes
from transformer_jax.optional import require_library
from transformer_jax.runs import checksums
from transformer_jax.runs.checkpoint_manager import CheckpointManager
from transformer_jax.runs.run_folder import Dtype, Package, RunFolder
from transformer_jax.sharing.model_card import StoredScores, find_languages, find_scores, write_card
from transformer_jax.sharing.parameters import (
    flatten_params,
    read_arrays,
    unflatten_params,
    write_arrays,
)

# Patterns for license (SPDX) and language (BCP 47) identifiers on the Hugging Face Hub.
LICENSE = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+-]*")
LANGUAGE = re.compile(r"[A-Za-z]{2,3}(-[A-Za-z0-9]+)*")
WEIGHTS = "model.safetensors"


def package_run(
    run: Run,
    path: Path,
    *,
    dtype: Dtype = "float32",
    license_id: str = "unknown",
    languages: tuple[str, str] | None = None,
    data_note: str = "",
    versions: Mapping[str, str] | None = None,
    scores: Sequence[StoredScores] | None = None,
) -> RunFolder:
    """Write a loaded run's parameters and description to a new folder, along with a model card.

    If `languages` is None, `find_languages` determines the languages. `data_note` is Markdown text
    that describes the data. `versions` and `scores` default to the values stored in the run.
    """
    if not LICENSE.fullmatch(license_id):
        raise UsageError(f"a license is an identifier such as cc-by-4.0, got {license_id!r}")
    languages = languages or find_languages(run.config.data)
    for language in languages or ():
        if not LANGUAGE.fullmatch(language):
            raise UsageError(f"a language is an identifier such as en, got {language!r}")

    # Escape bytes in the name that are not valid UTF-8, because the card is written in UTF-8.
    name = path.resolve().name.encode(errors="backslashreplace").decode()

    with build_package(run, path, dtype, versions) as folder:
        arrays = {"params": jax.tree.map(lambda x: x.astype(dtype), run.params)}
        with CheckpointManager(folder.checkpoints, folder.identity, keep=1) as checkpoints:
            checkpoints.prepare_save(run.step, arrays)
            checkpoints.save(run.step, arrays, None, {})
        card = write_card(
            name,
            folder.config,
            folder.versions,
            find_scores(run.folder.path, run.steps) if scores is None else scores,
            steps=run.steps,
            parameters=run.num_parameters,
            dtype=dtype,
            license_id=license_id,
            languages=languages,
            data_note=data_note,
        )
        (folder.path / "README.md").write_text(card, "utf-8")
        checksums.write(folder.path)

    return replace(folder, path=path)


def build_package(
    run: Run, path: Path, dtype: Dtype = "float32", versions: Mapping[str, str] | None = None
) -> AbstractContextManager[RunFolder]:
    """Return a context manager that creates a package without parameters.

    The package's config omits `data.folder` and reduces absolute paths of text to file names.
    """
    fields: dict[str, tuple[str, ...] | None] = {"folder": None}
    for split in ("train", "dev", "test"):
        if names := getattr(run.config.data, split):
            fields[split] = tuple(Path(x).name if Path(x).is_absolute() else x for x in names)
    return RunFolder.build(
        path,
        run.config.change(data=fields),
        run.vocabulary,
        run.folder.fingerprint,
        package=Package(run.steps, dtype),
        versions=run.folder.software_versions if versions is None else versions,
        init_from=run.folder.init_from,
    )


def export_safetensors(run: Run, path: Path) -> None:
    """Write a run's parameters, description, and vocabulary to a new folder."""
    require_library("safetensors")
    with build_package(run, path) as folder:
        metadata = {"sha256": digest_params(run.params)}
        write_arrays(folder.path / WEIGHTS, flatten_params(run.params), metadata)


def read_safetensors(path: Path) -> Run:
    """Read a folder that `export_safetensors` wrote, without executing anything in it."""
    start_backend()
    folder, weights = RunFolder.open(path), path / WEIGHTS
    if folder.package is None or not weights.is_file():
        raise UsageError(f"{path} is not an exported model: it has no {WEIGHTS}")
    model = build_model(folder.config.model, **folder.vocabulary.sizes)
    arrays, metadata = read_arrays(weights, parameter_shapes(abstract_params(model)))
    params = unflatten_params(arrays)
    if metadata.get("sha256") != digest_params(params):
        raise StorageError(f"{weights} is damaged: it differs from what was written")
    return Run(folder, jax.tree.map(jnp.asarray, params), folder.package.steps)
