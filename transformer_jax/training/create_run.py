"""Create a run: prepare the text and create the run folder."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from transformer_jax import progress
from transformer_jax.backend import describe_environment
from transformer_jax.baselines.build import build_model
from transformer_jax.config import Config, ModelConfig
from transformer_jax.config.validation import ON_INIT_FROM, marked
from transformer_jax.data.batches import Batch
from transformer_jax.data.encode import SIDES
from transformer_jax.data.prepare import Prepared, find_prepared, prepare_text
from transformer_jax.errors import DataError, Setting, UsageError
from transformer_jax.evaluation.scores import LIBRARIES
from transformer_jax.evaluation.tasks import check_task
from transformer_jax.inference.trained_run import Run, load
from transformer_jax.model.encoder_decoder import (
    EncoderDecoder,
    Params,
    init_params,
    make_rng,
)
from transformer_jax.model.inspect import check_params, digest_params
from transformer_jax.optional import require_library
from transformer_jax.progress import note
from transformer_jax.registry import describe_foreign, foreign_names
from transformer_jax.runs.checkpoint_manager import CheckpointManager
from transformer_jax.runs.run_folder import RunFolder, check_available
from transformer_jax.special_tokens import BOS, EOS, PAD, UNKNOWN
from transformer_jax.training.checkpointing import checkpoint_arrays, checkpoint_metadata
from transformer_jax.training.step import TrainStep, init_state


def create_run(
    config: Config, path: Path, console: Console, *, init_from: Path | None = None
) -> RunFolder:
    """Prepare the text and create a run folder, which appears only when it is complete.

    If `init_from` is given, the new run starts with the vocabulary and latest parameters of the run
    at that path. The stored config contains the actual vocabulary sizes; a note on the console
    reports any difference from the requested sizes.
    """
    check_available(path)
    other = None if init_from is None else load(init_from, average_checkpoints=1)
    if other is not None:
        _check_same_meaning(config, other)
    vocabulary = None if other is None else other.vocabulary
    prepared = prepare_text(config.data, vocabulary)
    prepared.note_problems()
    # Report an unsuitable task or a missing library before the folder exists. The evaluation
    # repeats these checks.
    check_task(config.data.task, *prepared.lines("dev"))
    if library := LIBRARIES.get(config.data.bleu_tokenizer):
        require_library(library)
    sizes = prepared.vocabulary.sizes
    for field, size in sizes.items():
        if size != (requested_size := getattr(config.data, field)):
            console.print(f"note: data.{field} is {size}, not {requested_size}")
    # The number of shapes must not change if the run is extended.
    config = config.change(data=sizes).with_batch_shapes()
    _check_lengths(config.model, prepared)
    model = build_model(config.model, **sizes)
    if other is not None:
        try:
            check_params(model, other.params)
        except UsageError as error:
            message = f"the parameters of {other.folder.path} do not fit this model: {error}"
            raise UsageError(message) from error

    if parts := describe_foreign(config.parts()):
        _check_parts(model, config, parts)
        if any(field.startswith("model.") for field in parts):
            _check_masks(model)

    arguments = path, config, prepared.vocabulary, prepared.fingerprint
    start = "" if other is None else _describe_start(other)
    built = RunFolder.build(*arguments, environment=describe_environment(), init_from=start)
    with built as folder:
        if other is not None:
            state = init_state(model, config.train, other.params)
            with CheckpointManager(folder.checkpoints, folder.identity, keep=1) as manager:
                arrays = checkpoint_arrays(state)
                manager.prepare_save(0, arrays)
                manager.save(0, arrays, None, checkpoint_metadata(state, [], config))
    return replace(folder, path=path)


def _describe_start(other: Run) -> str:
    """Describe the parameters of another run, which a new run begins with."""
    name = other.folder.path.resolve().name.encode(errors="backslashreplace").decode()
    return f"{name}, step {other.step}, sha256 {digest_params(other.params)}"


def open_run(path: Path, config: Config, *, init_from: Path | None = None) -> RunFolder:
    """Open a run to continue it with the config that `create_run` received."""
    folder = RunFolder.open(path)
    sizes = folder.vocabulary.sizes
    if init_from is None and sizes != {field: getattr(config.data, field) for field in sizes}:
        # The text may be too short for the requested sizes. `create_run` stored the actual sizes.
        sizes = prepare_text(config.data).vocabulary.sizes
    shapes = folder.config.data.max_batch_shapes
    # The run may have been extended.
    steps = max(config.train.steps, folder.steps_done)
    config = config.change(data=sizes, train={"steps": steps}).with_batch_shapes(shapes)
    resumed = folder.with_config(config)
    paths = {field: getattr(config.data, field) for field in ("train", "dev", "test", "folder")}
    moved = replace(folder.config.data, **paths)
    if moved != folder.config.data:
        # If the text is already cached, `find_prepared` does not report any progress, so report
        # the start of the check here.
        progress.report("checking the moved text")
        expected = folder.vocabulary, folder.fingerprint
        find_prepared(moved, *expected, verify_text=True)
    return resumed


def _check_parts(
    model: EncoderDecoder, config: Config, parts: Mapping[str, Mapping[str, str]]
) -> None:
    """Trace a training step, so that an error in a part occurs before the run folder exists."""

    def step() -> object:
        tokens = jnp.ones((2, 3), jnp.int32)
        return TrainStep(model, config.train)(
            init_state(model, config.train), Batch(tokens, tokens)
        )

    try:
        jax.eval_shape(step)
    except Exception as error:
        names = (f"{k} {v['name']!r} of {v.get('file', 'a notebook')}" for k, v in parts.items())
        error.add_note(
            f"This run uses {', '.join(names)}. The page docs/extending.md describes how parts are "
            "called and what they must return."
        )
        raise


def _check_masks(model: EncoderDecoder) -> None:
    """Issue a note if, with random parameters, a prediction depends on a later token or padding."""
    config = model.config
    if config.dtype == "float64" or min(config.max_length, *config.max_positions_per_stack) < 4:
        return
    apply: Any = model.apply
    # The targets differ in their third token, which only the last prediction may depend on.
    target = jnp.array([[BOS, UNKNOWN, BOS, EOS], [BOS, UNKNOWN, EOS, EOS]])
    source = jnp.array([[BOS, UNKNOWN, EOS, PAD]] * 2)

    @jax.jit
    def predict(params: Params) -> tuple[jax.Array, ...]:
        padded = apply({"params": params}, source, target)
        [unpadded] = apply({"params": params}, source[:1, :3], target[:1])
        return *padded[:, :3], unpadded[:3]

    params = init_params(model, make_rng(0))
    first, second, unpadded = (np.asarray(x, np.float32) for x in predict(params))
    # Programs for different shapes round differently.
    limit = 0.02 * np.abs(first).max()
    changes = {"later target tokens": second, "padding of the source": unpadded}
    if found := [name for name, x in changes.items() if np.abs(first - x).max() > limit]:
        note(
            f"the model's predictions depend on {' and '.join(found)}, so its scores are not "
            "comparable: a part that combines positions must use the mask that it receives"
        )


def _check_lengths(config: ModelConfig, prepared: Prepared) -> None:
    """Raise `DataError` if a sentence in the development or test set is too long for the model."""
    advice = "raise model.max_length"
    if config.max_positions is not None and config.out_of_range_positions == "error":
        advice += " and model.max_positions, or set model.out_of_range_positions to clamp"
    for split in ("dev", "test"):
        tokens = prepared.tokens(split) if split in prepared.report else ()
        for side, one_side, limit in zip(SIDES, tokens, config.max_lengths, strict=False):
            longest = int(one_side.lengths.max())
            if limit is not None and longest > limit:
                raise DataError(
                    f"a {side} sentence in {split} has {longest} tokens, but the model reads at "
                    f"most {limit}: {advice}"
                )


def _check_same_meaning(config: Config, other: Run) -> None:
    """Raise `UsageError` if the other run's parameters or vocabulary have a different meaning."""
    ours, theirs = _function_fields(config.model), _function_fields(other.config.model)
    params = f"the parameters of {other.folder.path} were trained"
    checks = [(params, f"model.{key}", ours.get(key, x), x) for key, x in theirs.items()]
    vocabulary = f"the vocabulary of {other.folder.path} was made"
    own, made = config.data.normalization, other.config.data.normalization
    checks.append((vocabulary, "data.normalization", own, made))
    for origin, field, value, needed in checks:
        if value != needed:
            message = f"{origin} with {field} {needed}, not {value}: use "
            raise UsageError(message, Setting(field, needed))


def _function_fields(config: ModelConfig) -> dict[str, object]:
    """Return the fields that, together with the parameters, determine what the model computes."""
    fields = {**asdict(config), "num_decoder_layers": config.layers_per_stack[1]}
    ignored = marked(ModelConfig, ON_INIT_FROM)
    if config.attention_implementation not in foreign_names("model.attention_implementation"):
        # All implementations in this package compute the same function.
        fields["attention_implementation"] = "full"
    if config.positions == "learned":
        # These fields determine the sizes of the position tables.
        ignored -= {"max_positions"} if config.max_positions else {"max_positions", "max_length"}
    if config.positions != "relative":
        ignored.add("max_relative_position")
    if config.positions != "t5":
        ignored.add("position_buckets")
    return {field: value for field, value in fields.items() if field not in ignored}
