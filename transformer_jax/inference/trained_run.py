"""A trained model and everything needed to use it, as `transformer_jax.load` returns it."""

import functools
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, PyTree

from transformer_jax.backend import standard_settings, start_backend
from transformer_jax.baselines.build import build_model
from transformer_jax.config import Config
from transformer_jax.config.validation import checked
from transformer_jax.data.tokenizer import Vocabulary
from transformer_jax.errors import Setting, StorageError, UsageError, show_paths
from transformer_jax.files import JsonObject
from transformer_jax.inference.alignments import Aligner, align_pairs, head_error_rates
from transformer_jax.inference.attention import Attention, compute_attention
from transformer_jax.inference.hidden_states import HiddenStates, compute_hidden_states
from transformer_jax.inference.history import MetricsTable, metrics_table, plot_metrics
from transformer_jax.inference.pairs import PairScore, score_pairs
from transformer_jax.inference.sampling import Sampling
from transformer_jax.inference.summary import summarize
from transformer_jax.inference.translate import (
    Hypothesis,
    Translator,
    choose_minimum_risk,
    strip_lines,
)
from transformer_jax.model.encoder_decoder import EncoderDecoder, Params
from transformer_jax.model.inspect import abstract_params, check_params
from transformer_jax.progress import note
from transformer_jax.remote.copies import local_path
from transformer_jax.runs import checksums
from transformer_jax.runs.array_store import on_device
from transformer_jax.runs.checkpoint_averaging import (
    average_last_params,
    average_params,
    select_steps,
)
from transformer_jax.runs.checkpoint_manager import CheckpointManager
from transformer_jax.runs.checksums import CorruptionError
from transformer_jax.runs.run_folder import Package, RunFolder

if TYPE_CHECKING:
    from transformer_jax.evaluation.evaluate import Evaluation
    from transformer_jax.visualization.style import Picture

Option = Any
"""The value of a `DecodeConfig` field. The fields have different types."""


@dataclass(frozen=True, eq=False, repr=False)
class Run:
    """A model with its parameters and vocabulary, on JAX's default device.

    A run is equal only to itself, because comparing arrays does not give a single truth value.

    Raises:
        UsageError: the parameters do not match the model.
    """

    folder: RunFolder
    params: Params
    """Parameters for `model.apply({"params": params}, ...)`."""
    steps: tuple[int, ...]
    """The steps of the averaged checkpoints, or the step of a single checkpoint."""

    def __post_init__(self) -> None:
        check_params(self.model, self.params)

    def __repr__(self) -> str:
        count = f"{self.num_parameters:,} parameters"
        return f"Run({show_paths(str(self.folder.path))!r}, step={self.step}, {count})"

    def _repr_html_(self) -> str:
        return summarize(self.folder, self.steps, self.num_parameters)

    @property
    def num_parameters(self) -> int:
        """The number of parameters."""
        return sum(x.size for x in jax.tree.leaves(self.params))

    @property
    def step(self) -> int:
        """The step of the checkpoint, or of the last averaged checkpoint."""
        return self.steps[-1]

    @property
    def average_checkpoints(self) -> int:
        """The number of checkpoints whose parameters were averaged."""
        return len(self.steps)

    @property
    def config(self) -> Config:
        """The run's config."""
        return self.folder.config

    @property
    def vocabulary(self) -> Vocabulary:
        """The source and target tokenizers."""
        return self.folder.vocabulary

    @property
    def metrics(self) -> MetricsTable:
        """The metrics by step: a list of dictionaries that `pandas.DataFrame` accepts.

        The keys are "step" and names such as "train/loss" and "dev/perplexity". Each row contains
        only the metrics that were reported at its step. A packaged model does not contain metrics.

        Raises:
            StorageError: the run's folder does not exist, for example because a relative path
                loaded the run, and the working directory has changed.
        """
        return metrics_table(self.folder.path)

    @checked
    def plot_curves(self, *names: str) -> "Picture":
        """Plot metrics by step, with the same defaults and errors as `Comparison.plot`."""
        return plot_metrics({self.folder.path.resolve().name: [self.metrics]}, *names)

    @functools.cached_property
    def model(self) -> EncoderDecoder:
        """The architecture, as a Flax module."""
        return build_model(self.config.model, **self.vocabulary.sizes)

    @checked
    def translator(self, *, sampling: Sampling | None = None, **decode: Option) -> Translator:
        """Return a translator for the run's decode config. Keyword arguments override its fields.

        Raises:
            UsageError: an argument changes `average_checkpoints`, but the parameters are already
                loaded; or an argument selects a search, but `sampling` is given.
        """
        search = [name for name in decode if name != "max_extra_length"]
        if sampling is not None and search:
            names = ", ".join(search)
            raise UsageError(
                f"{names} cannot be used with sampling, because no search is performed"
            )
        config = self.config.decode.change(**decode)
        if config.average_checkpoints != self.config.decode.average_checkpoints:
            raise UsageError(
                f"the parameters of {self.folder.path} are already loaded; to average other "
                "checkpoints, load the run with ",
                Setting("average_checkpoints", config.average_checkpoints),
            )
        return Translator(self.model, self.vocabulary, config, sampling)

    @checked
    def translate(self, lines: Iterable[str], **options: Option) -> list[str]:
        """Return the best translation of each line, in order. A blank line translates to "".

        Line endings are not part of a line, so `lines` can be an open file. The options and the
        errors are those of `translate_best`.
        """
        best = self.translate_best(lines, 1, **options)
        return [hypotheses[0].text for hypotheses in best]

    @checked
    def translate_best(
        self,
        lines: Iterable[str],
        num_best: int,
        *,
        truncate: bool = False,
        prefixes: Iterable[str] | None = None,
        sampling: Sampling | None = None,
        **decode: Option,
    ) -> list[list[Hypothesis]]:
        """Return up to `num_best` translations of each line with their scores, best first.

        A line always has at least one translation, but it has fewer than `num_best` if the search
        does not finish enough hypotheses. Often, few hypotheses finish if `decode.beam_end` is
        "tensor2tensor" and the model rarely predicts the end of a sentence. With `sampling`, a line
        has `num_best` independent samples in the order in which they were drawn.

        Set `truncate` to shorten a line that is too long instead of raising a DataError. `prefixes`
        contains the beginning of the translation of each line; a blank prefix has no effect. The
        arguments in `decode`, such as `beam_size=1`, override fields in `DecodeConfig`. An invalid
        value raises a ConfigError.

        Raises:
            UsageError: `num_best` is less than 1 or, without `sampling`, exceeds the beam size;
                `decode` selects a search, but `sampling` is given; or the number of prefixes is
                wrong.
            DataError: a line or a prefix is not valid text or too long.
        """
        translator = self.translator(sampling=sampling, **decode)
        lines = strip_lines(lines, "line")
        prefixes = None if prefixes is None else strip_lines(prefixes, "prefix")
        options = {"num_best": num_best, "truncate": truncate, "prefixes": prefixes}
        translator.check(lines, **options)
        return translator.translate(self.params, lines, **options)

    @checked
    def translate_minimum_risk(
        self, lines: Iterable[str], num_samples: int, **options: Option
    ) -> list[str]:
        """Return the one of `num_samples` samples of each line that has the minimum Bayes risk.

        The risk of a sample is 100 - its mean chrF against all samples of its line (Eikema and Aziz
        2020). Differs from the paper, which searches for the likeliest translation. The options and
        the errors are those of `translate_best`.
        """
        if options.get("sampling") is None:
            options["sampling"] = Sampling()
        best = self.translate_best(lines, num_samples, **options)
        return [choose_minimum_risk(samples).text for samples in best]

    @checked
    def evaluate(
        self, split: Literal["dev", "test"] | None = None, **decode: Option
    ) -> "Evaluation":
        """Translate and score a split of the run's text.

        By default, the split is the test set, or the development set if there is no test set.
        `decode` overrides fields in `DecodeConfig`. The scores are not stored; the command
        `transformer-jax evaluate` stores them.

        Raises:
            UsageError: the text does not have this split.
            DataError: the text is missing, or has changed since the run was created.
        """
        from transformer_jax.evaluation.evaluate import evaluate, prepare_split

        if split is None:
            split = "test" if "test" in prepare_split(self, "dev").report else "dev"
        return evaluate(self, split, decode)

    @checked
    def score(self, sources: Iterable[str], targets: Iterable[str]) -> list[PairScore]:
        """Return the log-probability of each target and of its tokens, given its source.

        The log-probabilities are in nats, include the end-of-sentence token, and do not depend on
        the other lines. The perplexity of a corpus is exp(-s / n), where s is the sum of all
        log-probabilities and n is the number of tokens (section 6.2). Unlike the scores of beam
        search, the log-probabilities are not divided by a length penalty.

        Raises:
            UsageError: an argument is a single string, or the numbers of lines differ.
            DataError: a line is not valid text, or too long for the model.
        """
        return score_pairs(self.model, self.params, self.vocabulary, sources, targets)

    @checked
    def align(
        self,
        sources: Iterable[str],
        targets: Iterable[str],
        *,
        layer: int | None = None,
        heads: Collection[SupportsIndex] | None = None,
        truncate: bool = False,
    ) -> list[str]:
        """Align the words of parallel lines with cross-attention.

        Each target token is aligned with the source token that has the largest mean weight over the
        heads, and two words are aligned if any of their tokens are aligned. Words are separated by
        spaces. `layer` and `heads` are indices as in Python. By default, the weights are averaged
        over all heads in the penultimate layer, as in Garg et al. (2019), or in the only layer if
        there is just one. Set `truncate` to shorten a line that is too long instead of raising a
        DataError.

        Returns:
            A line for each pair in Pharaoh's format, such as "0-0 1-2": SOURCE-TARGET for each
            link, with words counted from 0. If one side is blank, the line is empty.

        Raises:
            UsageError: the model does not attend to the source, the layer or a head does not exist,
                or the numbers of lines differ.
            DataError: a line is not valid text, or too long for the model.
        """
        selection = {"layer": layer, "heads": heads}
        return align_pairs(self._aligner(), sources, targets, truncate=truncate, **selection)

    @checked
    def alignment_error_rates(
        self, sources: Iterable[str], targets: Iterable[str], gold: Iterable[str]
    ) -> Float[np.ndarray, "layer head"]:
        """Return the alignment error rate of each cross-attention head by itself.

        `gold` contains one line for each pair, as in `alignment_error_rate`. This method raises the
        same errors as `align` and `alignment_error_rate`, and a DataError if a gold link is outside
        its pair of lines.
        """
        return head_error_rates(self._aligner(), sources, targets, list(gold))

    @checked
    def attention(
        self, source: str, target: str | None = None, *, truncate: bool = False, **decode: Option
    ) -> Attention:
        """Return the attention weights for a sentence pair.

        If `target` is None, the target is the best translation of the source. `decode` overrides
        fields in `DecodeConfig` for this translation. Set `truncate` to shorten a sentence that is
        too long instead of raising a DataError.

        Raises:
            DataError: a sentence is blank or too long for the model.
            UsageError: the model does not attend to the source, the weights are not finite, or both
                `target` and `decode` are given.
        """
        translator = self._pair_translator(target, decode)
        return compute_attention(translator, self.params, source, target, truncate=truncate)

    @checked
    def hidden_states(
        self, source: str, target: str | None = None, *, truncate: bool = False, **decode: Option
    ) -> HiddenStates:
        """Return the vectors between the layers of both stacks for a sentence pair.

        The arguments are the same as for `attention`.

        Raises:
            DataError: a sentence is blank or too long for the model.
            UsageError: the architecture does not record its hidden states (`rnn`), or both `target`
                and `decode` are given.
        """
        translator = self._pair_translator(target, decode)
        return compute_hidden_states(translator, self.params, source, target, truncate=truncate)

    def describe_members(self) -> list[JsonObject]:
        """Return a description of each run of an ensemble, or an empty list for a single run."""
        return []

    def _aligner(self) -> Aligner:
        return Aligner(self.model, self.params, self.vocabulary)

    def _pair_translator(self, target: str | None, decode: dict[str, Option]) -> Translator:
        if target is not None and decode:
            names = ", ".join(decode)
            raise UsageError(
                f"{names} cannot be used with a target, because no search is performed"
            )
        return self.translator(**decode)


@checked
def load(
    path: str | Path, *, average_checkpoints: int | None = None, step: int | None = None
) -> Run:
    """Load a run onto JAX's default device, without executing or changing any of its files.

    The parameters are the mean of the last `average_checkpoints` scheduled checkpoints up to
    `step`, which defaults to the latest step. If `average_checkpoints` is 1, `load` accepts any
    checkpoint, even an unscheduled one. `average_checkpoints` defaults to the run's
    `decode.average_checkpoints`. If the run has fewer checkpoints than this default, `load` issues
    a warning and averages the existing checkpoints. `load` also warns about each file of registered
    parts that has changed since the run was created.

    Raises:
        UsageError: the run or the checkpoint at `step` does not exist, the run has too few
            checkpoints, or `average_checkpoints` is not positive.
        StorageError: the run cannot be read.
    """
    if average_checkpoints is not None and average_checkpoints < 1:
        raise UsageError(
            f"cannot average {average_checkpoints} checkpoints; to use the latest one, pass ",
            Setting("average_checkpoints", 1),
        )
    folder = RunFolder.open(local_path(path))
    note_changed_files(folder)
    return load_folder(folder, average_checkpoints, step)


def note_changed_files(folder: RunFolder) -> None:
    """Issue a note for each file of parts that has changed since the run was created."""
    for line in folder.changed_files:
        note(line)


@standard_settings()
def load_folder(
    folder: RunFolder, average_checkpoints: int | None = None, step: int | None = None
) -> Run:
    """Load an open run like `load`, but without notes about changed files."""
    start_backend()
    if folder.package is not None:
        return _load_package(folder, folder.package, average_checkpoints, step)

    def read() -> Run:
        with CheckpointManager(folder.checkpoints, folder.identity) as checkpoints:
            steps = _select_steps(checkpoints, average_checkpoints, folder, step)
            params = average_params(checkpoints, steps, _restore_target(folder))
            return Run(folder, params, tuple(steps))

    before = set(folder.checkpoints.glob("*"))
    try:
        return read()
    except (StorageError, FileNotFoundError):
        # A run that is still training may have deleted a selected checkpoint to make room for a
        # newer one.
        if set(folder.checkpoints.glob("*")) == before:
            raise
        return read()


def _select_steps(
    checkpoints: CheckpointManager, average: int | None, folder: RunFolder, step: int | None
) -> list[int]:
    if average is not None:
        return select_steps(checkpoints, average, step)
    average = folder.config.decode.average_checkpoints
    steps = select_steps(checkpoints, average, step, allow_fewer=True)
    if len(steps) < average:
        used = f"the mean of {len(steps)}" if len(steps) > 1 else f"only the one at step {steps[0]}"
        note(
            f"{folder.path} does not have {average} checkpoints to average "
            f"(decode.average_checkpoints), so {used} is used"
        )
    return steps


def _load_package(
    folder: RunFolder, package: Package, average_checkpoints: int | None, step: int | None
) -> Run:
    steps = package.steps
    if average_checkpoints not in (None, 1, len(steps)) or step not in (None, steps[-1]):
        mean = f"the mean of steps {', '.join(map(str, steps))}" if len(steps) > 1 else "one step"
        raise UsageError(f"{folder.path} is a package and contains only {mean}")
    try:
        # run.json contains the digests of the vocabulary, and the checkpoint contains its own
        # digests.
        checksums.read(folder.path, "run.json")
    except CorruptionError as error:
        raise StorageError(f"{folder.path} is damaged: {error}") from error
    stored = jax.tree.map(lambda x: x.update(dtype=package.dtype), _restore_target(folder))
    with CheckpointManager(folder.checkpoints, folder.identity) as checkpoints:
        params = checkpoints.restore(steps[-1], {"params": stored})["params"]
    return Run(folder, jax.tree.map(lambda x: x.astype(jnp.float32), params), steps)


def load_averages(
    folder: RunFolder, steps: Sequence[int], counts: Collection[int]
) -> Iterator[Run]:
    """For each k in `counts`, in ascending order, load the mean of the last k checkpoints."""
    if not counts:
        return
    note_changed_files(folder)
    with CheckpointManager(folder.checkpoints, folder.identity) as checkpoints:
        means = average_last_params(checkpoints, steps, _restore_target(folder), counts)
        try:
            for count, params in zip(sorted(counts), means, strict=True):
                yield Run(folder, params, tuple(steps[-count:]))
        except (StorageError, FileNotFoundError) as error:
            deleted = [str(step) for step in steps if step not in checkpoints.steps]
            if not deleted:
                raise
            raise StorageError(
                f"the process that trains {folder.path} has deleted old checkpoints "
                f"({', '.join(deleted)}); run the command again to use the newer ones"
            ) from error


def read_params(folder: RunFolder, steps: Sequence[int]) -> Params:
    """Return the mean parameters of these checkpoints, on JAX's default device."""
    with CheckpointManager(folder.checkpoints, folder.identity) as checkpoints:
        return average_params(checkpoints, steps, _restore_target(folder))


@standard_settings()
def _restore_target(folder: RunFolder) -> PyTree:
    model = build_model(folder.config.model, **folder.vocabulary.sizes)
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return on_device(abstract_params(model), device)
