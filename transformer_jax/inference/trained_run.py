"""A trained model, from its folder alone: `transformer_jax.load("runs/x")`."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from transformer_jax.cache import enable_compilation_cache
from transformer_jax.config import Config, DecodeConfig
from transformer_jax.data.tokenizer import Vocabulary
from transformer_jax.errors import StorageError, UsageError
from transformer_jax.inference.translate import Hypothesis, Translator
from transformer_jax.model.build import build_transformer
from transformer_jax.model.inspect import abstract_params
from transformer_jax.model.transformer import Params, Transformer
from transformer_jax.runs.array_store import on_device
from transformer_jax.runs.checkpoint_manager import CheckpointManager
from transformer_jax.runs.run_directory import RunDirectory


@dataclass(frozen=True)
class Run:
    """A model with its parameters and vocabulary, on the device that JAX calls its default."""

    folder: RunDirectory
    params: Params
    """As `model.apply({"params": params}, ...)` takes them."""
    steps: tuple[int, ...]
    """Of the checkpoint, or of those of which the parameters are the mean."""

    @property
    def step(self) -> int:
        """Of the checkpoint; of the last one, where it is a mean."""
        return self.steps[-1]

    @property
    def average_checkpoints(self) -> int:
        """Of how many checkpoints the parameters are the mean."""
        return len(self.steps)

    @property
    def config(self) -> Config:
        """The experiment."""
        return self.folder.config

    @property
    def vocabulary(self) -> Vocabulary:
        """The tokenizers of source and target."""
        return self.folder.vocabulary

    @functools.cached_property
    def model(self) -> Transformer:
        """The architecture, as a Flax module."""
        return build_transformer(self.config.model, **self.vocabulary.sizes)

    @functools.cached_property
    def _translators(self) -> dict[DecodeConfig, Translator]:
        return {}

    def translator(self, **decode: Any) -> Translator:
        """Return the search, by the run's own `decode` config with these fields changed."""
        config = replace(self.config.decode, **decode)
        if config not in self._translators:
            self._translators[config] = Translator(self.model, self.vocabulary, config)
        return self._translators[config]

    def translate(
        self, lines: Sequence[str], *, truncate: bool = False, **decode: Any
    ) -> list[str]:
        """Return the best translation of each line, in order; a blank line's is empty.

        Args:
            lines: sentences.
            truncate: read the beginning of a line that is too long, in place of an error.
            decode: fields of `DecodeConfig` to change, such as `beam_size=1`.

        Raises:
            DataError: a line is longer than the model reads.
            ConfigError: a value in `decode` breaks its rule.
        """
        found = self.translator(**decode).translate(self.params, lines, truncate=truncate)
        return [hypotheses[0].text for hypotheses in found]

    def translate_best(
        self, lines: Sequence[str], num_best: int, *, truncate: bool = False, **decode: Any
    ) -> list[list[Hypothesis]]:
        """Return the best few translations of each line with their scores, best first."""
        translator = self.translator(**decode)
        if not 1 <= num_best <= translator.config.beam_size:
            raise UsageError(
                f"a beam of {translator.config.beam_size} has no {num_best} best: "
                f"ask for fewer, or a larger decode.beam_size"
            )
        return translator.translate(self.params, lines, num_best=num_best, truncate=truncate)


def read_params(folder: RunDirectory, model: Transformer, steps: Sequence[int]) -> Params:
    """Return the mean of the parameters of some checkpoints, on JAX's default device."""
    with CheckpointManager(folder.checkpoints, folder.identity) as checkpoints:
        return checkpoints.mean_params(steps, _target(model))


def _target(model: Transformer) -> Any:
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return on_device(abstract_params(model), device)


def load(
    path: str | Path, *, average_checkpoints: int | None = None, step: int | None = None
) -> Run:
    """Read a run's parameters onto this machine's default device, whatever it was trained on.

    Args:
        path: the run's folder; nothing in it is executed or changed.
        average: take the mean of the last so many scheduled checkpoints; 1 takes the newest
            one as it is; None does as the run's `decode.average_checkpoints` says.
        step: the last of these checkpoints; None for the newest there is.

    Raises:
        UsageError: there is no run, no checkpoint of this step, or not so many; `average` is not
            positive.
        StorageError: the run cannot be read.
    """
    if average_checkpoints is not None and average_checkpoints < 1:
        raise UsageError(f"average must be positive, got {average_checkpoints}")
    enable_compilation_cache()
    folder = RunDirectory.open(Path(path))
    model = build_transformer(folder.config.model, **folder.vocabulary.sizes)
    average_checkpoints = (
        folder.config.decode.average_checkpoints
        if average_checkpoints is None
        else average_checkpoints
    )

    def read() -> Run:
        with CheckpointManager(folder.checkpoints, folder.identity) as checkpoints:
            steps = checkpoints.select_steps(average_checkpoints, step)
            return Run(folder, checkpoints.mean_params(steps, _target(model)), tuple(steps))

    there = set(folder.checkpoints.glob("*"))
    try:
        return read()
    except (StorageError, FileNotFoundError):
        # A trainer that goes on may have removed what was chosen: then there are newer ones.
        if set(folder.checkpoints.glob("*")) == there:
            raise
        return read()
