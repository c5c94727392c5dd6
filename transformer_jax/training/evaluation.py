"""Compute perplexity, and BLEU with greedy search, on the development set during training.

For tasks other than translation, also compute the task's main score from the greedy outputs.
"""

import dataclasses
import math
import signal

from transformer_jax import progress
from transformer_jax.data.corpora import bleu_tokenizer
from transformer_jax.distributed.preemption import GracefulShutdown
from transformer_jax.errors import DivergedError, memory_errors
from transformer_jax.evaluation.perplexity import perplexity, score_with_loss, scoring_batches
from transformer_jax.evaluation.scores import check_tokenizer, score
from transformer_jax.evaluation.tasks import check_task, main_score, score_task
from transformer_jax.inference.translate import Translator
from transformer_jax.model.encoder_decoder import Params
from transformer_jax.runs.checkpoint_metadata import DevScores
from transformer_jax.training.components import RunComponents
from transformer_jax.training.metric_writer import MetricWriter
from transformer_jax.training.step import TrainState

DIVERGENCE_ADVICE = (
    "Try a smaller train.learning_rate_scale or train.peak_learning_rate, or a larger "
    "train.warmup_steps"
)
NUM_SAMPLES = 20


class EvaluationStoppedError(Exception):
    """A signal arrived during an evaluation, so the evaluation has no result."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class DevEvaluator:
    """An evaluator that scores parameters on the development set and writes the scores."""

    def __init__(
        self, run: RunComponents, writer: MetricWriter, shutdown: GracefulShutdown
    ) -> None:
        self._run, self._writer, self._shutdown = run, writer, shutdown
        config = run.folder.config
        self._bleu_tokenizer, self._task = bleu_tokenizer(config.data), config.data.task
        # Report invalid references before training instead of after the first search.
        sources, references = run.prepared.lines("dev")
        check_task(self._task, sources, references)
        if run.group.is_primary:
            check_tokenizer(self._bleu_tokenizer, references)
        self._batches = scoring_batches(*run.prepared.tokens("dev"))
        greedy = dataclasses.replace(config.decode, beam_size=1)
        self._translator = Translator(run.model, run.prepared.vocabulary, greedy)

    def evaluate(self, state: TrainState, step: int, *, translate: bool) -> DevScores:
        """Write and return the scores; if `translate` is true, also write BLEU and 20 samples.

        All processes must call this method. The primary process computes the scores and
        broadcasts them, so that all processes use exactly the same values.

        Raises:
            DivergedError: a score is not finite.
            EvaluationStoppedError: the primary process received a signal. The evaluation ends
                after the current batch, and all processes raise this error.
            OutOfMemoryError: the device does not have enough memory.
        """
        group = self._run.group
        with memory_errors(
            "the device does not have enough memory to evaluate the development set: resume on a "
            "device with more memory; earlier checkpoints are intact"
        ):
            params = self._run.sharding.to_local_device(state.evaluation_params)
            scored = self._score(params, step, translate) if group.is_primary else ((0.0, 0.0), 0)
            scores, number = group.broadcast(scored)
        if number:
            raise EvaluationStoppedError(number)
        return DevScores(*scores)

    def _score(self, params: Params, step: int, translate: bool) -> tuple[tuple[float, float], int]:
        """Return the scores and 0, or zeros and the number of the signal that arrived."""
        try:
            sources, _ = self._run.prepared.lines("dev")
            with progress.report_to(self._check_signal), progress.task("evaluating", len(sources)):
                return self._compute(params, step, translate), 0
        except EvaluationStoppedError as error:
            return (0.0, 0.0), error.number

    def _check_signal(self, activity: str, done: int, total: int) -> None:
        """Show the progress of the evaluation, or end the evaluation after a signal."""
        if self._shutdown.signal is not None:
            raise EvaluationStoppedError(self._shutdown.signal)
        self._writer.set_status(f"{activity} {done}/{total}" if done else activity)

    def _compute(self, params: Params, step: int, translate: bool) -> DevScores:
        run = self._run
        sentences, smoothed_loss = score_with_loss(
            run.model, params, self._batches, run.folder.config.train
        )
        scores = DevScores(perplexity(sentences), smoothed_loss)
        values = scores._asdict()
        for name, value in values.items():
            if not math.isfinite(value):
                raise DivergedError(
                    f"the {name.replace('_', ' ')} on the development set is {value} at step "
                    f"{step}; no checkpoint is saved at this step; earlier checkpoints are intact. "
                    f"{DIVERGENCE_ADVICE}"
                )
        if translate:
            sources, references = self._run.prepared.lines("dev")
            hypotheses = [best[0].text for best in self._translator.translate(params, sources)]
            result = score(hypotheses, references, tokenizer=self._bleu_tokenizer)
            values |= {"bleu": result.bleu, "exact": result.exact}
            values |= main_score(score_task(self._task, sources, hypotheses, references))
            samples = (lines[:NUM_SAMPLES] for lines in (sources, hypotheses, references))
            self._writer.write_samples(step, *samples)
        self._writer.report(step, "dev", values)
        return scores
