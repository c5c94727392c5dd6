"""Several runs that translate together by averaging their probabilities.

Shapes: B batch, S source positions, T target positions, N vocab_size, J hypotheses per sentence, L
maximum translation length, M members.
"""

import functools
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from transformer_jax.config.validation import checked
from transformer_jax.errors import UsageError
from transformer_jax.files import JsonObject
from transformer_jax.inference.alignments import Aligner
from transformer_jax.inference.history import MetricsTable
from transformer_jax.inference.trained_run import Run
from transformer_jax.inference.translate import Translator
from transformer_jax.model.encoder_decoder import DecodingState, EncoderDecoder, EncoderOutput
from transformer_jax.model.operations import sum_dtype


def mean_log_probs(logits: Sequence[Float[Array, "*_ N"]]) -> Float[Array, "*_ N"]:
    """Return the logarithm of the mean of the members' probabilities."""
    log_probs = [jax.nn.log_softmax(x.astype(sum_dtype(x))) for x in logits]
    return jax.nn.logsumexp(jnp.stack(log_probs), axis=0) - math.log(len(log_probs))


class EnsembleModel(EncoderDecoder, kw_only=True):
    """A model whose logits are the logarithms of the mean of its members' probabilities."""

    members: tuple[EncoderDecoder, ...]

    def setup(self) -> None:
        """Do not create an embedding, because each member has its own."""

    def encode(self, source: Int[Array, "B S"], *, train: bool = False) -> EncoderOutput:
        """Return the memory of each member."""
        return tuple(member.encode(source, train=train) for member in self.members)

    def decode(
        self,
        decoder_input: Int[Array, "B T"],
        memory: EncoderOutput,
        memory_mask: Bool[Array, "B 1 1 S"],
        *,
        train: bool = False,
    ) -> Float[Array, "B T N"]:
        """Return the log-probabilities of the next token at each position."""
        pairs = zip(self.members, memory, strict=True)
        return mean_log_probs(
            [member.decode(decoder_input, x, memory_mask, train=train) for member, x in pairs]
        )

    def init_decoding(
        self, source: Int[Array, "B S"], *, num_hypotheses: int, max_length: int
    ) -> DecodingState:
        """Return the state of each member."""
        sizes = {"num_hypotheses": num_hypotheses, "max_length": max_length}
        return tuple(member.init_decoding(source, **sizes) for member in self.members)

    def decode_step(
        self,
        tokens: Int[Array, "B J"],
        position: Int[Array, ""],
        ancestors: Int[Array, "B J L"],
        state: DecodingState,
    ) -> tuple[Float[Array, "B J N"], DecodingState]:
        """Return the log-probabilities of the next token, and the new state of each member."""
        steps = [
            member.decode_step(tokens, position, ancestors, x)
            for member, x in zip(self.members, state, strict=True)
        ]
        return mean_log_probs([logits for logits, _ in steps]), tuple(x for _, x in steps)


USE_MEMBERS = "this function looks inside a single model: use the ensemble's runs one by one"


@dataclass(frozen=True, eq=False, repr=False)
class Ensemble(Run):
    """Runs that translate together. `ensemble` creates it."""

    members: tuple[Run, ...] = ()

    def describe_members(self) -> list[JsonObject]:
        """Return each member's name, its path relative to the first member, and its checkpoints."""
        paths = [run.folder.path.resolve() for run in self.members]
        return [
            {"run": path.name, "path": os.path.relpath(path, paths[0]), "steps": list(run.steps)}
            for path, run in zip(paths, self.members, strict=True)
        ]

    def _aligner(self) -> Aligner:
        raise UsageError(USE_MEMBERS)

    def _pair_translator(self, target: str | None, decode: dict[str, Any]) -> Translator:  # noqa: ARG002
        raise UsageError(USE_MEMBERS)

    @property
    def metrics(self) -> MetricsTable:
        """An ensemble has no metrics; its members do."""
        raise UsageError(USE_MEMBERS)

    def _repr_html_(self) -> str:
        return "".join(run._repr_html_() for run in self.members)

    def __repr__(self) -> str:
        return f"Ensemble({', '.join(map(repr, self.members))})"

    @functools.cached_property
    def model(self) -> EncoderDecoder:
        """The model that averages the probabilities of the members."""
        # Flax shares the parameters of a module that occurs twice, so make copies.
        models = tuple(run.model.clone() for run in self.members)
        limits = [tuple(x or math.inf for x in model.config.max_lengths) for model in models]
        shortest = models[limits.index(min(limits))]
        if any(limit < x for y in limits for limit, x in zip(y, min(limits), strict=True)):
            raise UsageError(
                "no run of the ensemble has both the lowest limit on source length and the lowest "
                "limit on target length"
            )
        sizes = {"vocab_size": shortest.vocab_size, "source_vocab_size": shortest.source_vocab_size}
        return EnsembleModel(config=shortest.config, members=models, **sizes)


def require_single(run: Run) -> None:
    """Raise a UsageError if the run is an ensemble."""
    if isinstance(run, Ensemble):
        raise UsageError(USE_MEMBERS)


@checked
def ensemble(runs: Iterable[Run]) -> Ensemble:
    """Combine runs that share a vocabulary, such as runs that differ only in their seeds.

    The result translates, evaluates, and scores like a run. The probability of a token is the mean
    of the probabilities that the runs assign to it. The runs can have different architectures. The
    first run determines the decode config and the text that `evaluate` scores. The paper compares
    its single models with ensembles (Table 2).

    Raises:
        UsageError: there are no runs; they differ in the vocabulary, in the data type, or in the
            decoder's start token; or no run has the lowest limits on both the source and the target
            length.
    """
    # The members of an ensemble count like other runs.
    runs = [x for run in runs for x in (run.members if isinstance(run, Ensemble) else (run,))]
    if not runs:
        raise UsageError("an ensemble needs at least one run")
    first, *others = runs
    for run in others:
        for name, value in _properties(run).items():
            if value != _properties(first)[name]:
                paths = f"{first.folder.path} and {run.folder.path}"
                raise UsageError(f"{paths} cannot form an ensemble: they differ in their {name}")
    params = {f"members_{i}": run.params for i, run in enumerate(runs)}
    return Ensemble(first.folder, params, first.steps, tuple(runs))


def _properties(run: Run) -> dict[str, object]:
    """Return the properties that all members of an ensemble must share, keyed by description."""
    return {
        "vocabularies": (run.vocabulary.sizes, run.vocabulary.describe()),
        "start tokens (model.decoder_start)": run.model.config.decoder_start_id,
        "data types (model.dtype)": run.model.config.dtype,
    }
