"""Scores on the development set during training: perplexity, and BLEU by greedy search."""

import dataclasses
import math

from transformer_jax.config import Config
from transformer_jax.data.corpora import bleu_tokenizer
from transformer_jax.data.prepare import Prepared
from transformer_jax.errors import DivergedError
from transformer_jax.inference.evaluate import score
from transformer_jax.inference.perplexity import perplexity, score_sentences
from transformer_jax.inference.translate import Translator
from transformer_jax.model.transformer import Params, Transformer
from transformer_jax.training.metric_writer import MetricWriter

DIVERGENCE_ADVICE = "Try a smaller train.learning_rate_scale or a larger train.warmup_steps"
NUM_SAMPLES = 20


class DevEvaluator:
    """Scores parameters on the development set and reports the scores."""

    def __init__(self, config: Config, model: Transformer, prepared: Prepared) -> None:
        """Prepare the evaluation.

        Args:
            config: the experiment. Its beam size is ignored, because the search is greedy.
            model: the model to score.
            prepared: the text, with the split "dev".
        """
        self._model = model
        self._prepared = prepared
        self._bleu_tokenizer = bleu_tokenizer(config.data)
        greedy = dataclasses.replace(config.decode, beam_size=1)
        self._translator = Translator(model, prepared.vocabulary, greedy)

    def evaluate(
        self, step: int, params: Params, writer: MetricWriter, *, translate: bool
    ) -> float:
        """Report the scores of a step; return the perplexity per token.

        Args:
            step: the step that returned the parameters.
            params: the parameters, on one device of this process.
            writer: writes the scores and the samples.
            translate: whether to translate the set and report BLEU.

        Raises:
            DivergedError: the perplexity is not finite.
        """
        writer.set_status("evaluating")
        scores = score_sentences(self._model, params, *self._prepared.tokens("dev"))
        values = {"perplexity": perplexity(scores)}
        if not math.isfinite(values["perplexity"]):
            raise DivergedError(
                f"the perplexity of the development set is {values['perplexity']} at step {step}; "
                f"this step is not saved; earlier checkpoints are intact. {DIVERGENCE_ADVICE}"
            )
        if translate:
            sources, references = self._prepared.lines("dev")
            beams = self._translator.translate(params, sources)
            hypotheses = [hypotheses[0].text for hypotheses in beams]
            result = score(hypotheses, references, tokenizer=self._bleu_tokenizer)
            values |= {"bleu": result.bleu, "exact": result.exact}
            samples = (lines[:NUM_SAMPLES] for lines in (sources, hypotheses, references))
            writer.write_samples(step, *samples)
        writer.report(step, "dev", values)
        return values["perplexity"]
