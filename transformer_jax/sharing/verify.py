"""Verify an exported model by comparing its translations with those of its run (section 6.1).

The comparison uses greedy search, because this package and the other programs have different
stopping rules for beam search. The compared scores are both programs' log-probabilities of the same
translations.
"""

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np
import sentencepiece

from transformer_jax.baselines.build import build_model
from transformer_jax.data.corpora import CORPORA
from transformer_jax.errors import TransformerJaxError
from transformer_jax.inference.trained_run import Option, Run
from transformer_jax.inference.translate import Sentence, Translator
from transformer_jax.optional import import_optional
from transformer_jax.special_tokens import EOS, UNKNOWN

NUM_SENTENCES = 20
# The number of tokens in a random sentence, for runs whose text is not available.
RANDOM_LENGTH = 8
# In float32, an exported model must reproduce at least a `MIN_EQUAL` fraction of the run's
# translations, and scores may differ by at most `MAX_SCORE_DIFFERENCE`. Rounding and the epsilon in
# Marian's layer normalization change scores by less than this limit. However, if two tokens are
# almost equally likely, these changes can affect which token the search chooses.
MIN_EQUAL = 0.9
MAX_SCORE_DIFFERENCE = 0.05


@runtime_checkable
class System(Protocol):
    """An exported model, loaded in the program that it was exported for."""

    options: dict[str, float]
    """Arguments of the program's search, which is greedy by default."""

    def translate(self, line: str, max_tokens: int) -> list[str]:
        """Return a translation of up to `max_tokens` tokens, without the end-of-sentence token."""

    def score(self, line: str, tokens: Sequence[str]) -> float:
        """Return the log-probability of a translation, including the end-of-sentence token."""


class Verification(NamedTuple):
    """The result of comparing an exported model with its run."""

    sentences: int
    equal: int
    """The number of sentences that the run and the exported model translate to the same tokens."""
    score_difference: float
    """The largest difference between the log-probabilities of the same translation, or NaN."""

    @property
    def is_close(self) -> bool:
        """Whether the differences are as small as expected for a float32 model."""
        has_equal = self.equal >= MIN_EQUAL * self.sentences
        return has_equal and self.score_difference <= MAX_SCORE_DIFFERENCE

    def __str__(self) -> str:
        return (
            f"{self.equal} of {self.sentences} translations are equal; "
            f"largest score difference {self.score_difference:.1e}"
        )


class Translation(NamedTuple):
    """A translation by this package."""

    tokens: list[str]
    """The translation's tokens, excluding the end-of-sentence token."""
    score: float
    """The log-probability of the translation, divided by the length penalty in a beam search."""
    max_tokens: int
    """The maximum number of tokens in a translation of this sentence."""


def verify(run: Run, system: System, lines: Sequence[str] | None = None) -> Verification:
    """Compare the translations of a run, computed in float32, with those of its exported model."""
    lines = sample_lines(run) if lines is None else lines
    equal, differences = 0, [0.0]
    for line, ours in zip(lines, find_translations(run, lines), strict=True):
        equal += system.translate(line, ours.max_tokens) == ours.tokens
        differences.append(abs(system.score(line, ours.tokens) - ours.score))
    return Verification(len(lines), equal, float(np.max(differences)))


def sample_lines(run: Run, count: int = NUM_SENTENCES) -> list[str]:
    """Return source lines from the development set, or random lines if too few are available."""
    lines = dev_lines(run, count)
    if len(lines) < count:
        vocabulary = run.vocabulary.source
        shape = 10 * count, min(RANDOM_LENGTH, run.translator().longest_source - 1)
        rng = np.random.default_rng(0)
        lines = vocabulary.decode(rng.integers(UNKNOWN + 1, len(vocabulary), shape).tolist())
        # Re-encoding the decoded text can yield more tokens than the random sequence contained.
        lines = _select_lines(run, lines)[:count]
    return lines


def dev_lines(run: Run, count: int) -> list[str]:
    """Return up to `count` lines of the development set; [] if unavailable without a download."""
    data = run.config.data
    # Reading a dataset from TensorFlow Datasets may start a download.
    if data.corpus == "tfds":
        return []
    try:
        sources = (source for source, _ in CORPORA[data.corpus](data).read("dev"))
        lines = [line for line in itertools.islice(sources, 10 * count) if line.strip()]
    except TransformerJaxError:
        return []
    return _select_lines(run, lines)[:count]


def _select_lines(run: Run, lines: Sequence[str]) -> list[str]:
    longest = run.translator().longest_source
    encoded = zip(lines, run.vocabulary.source.encode(lines), strict=True)
    return [line for line, tokens in encoded if 1 < len(tokens) <= longest]


def find_translations(run: Run, lines: Sequence[str], **decode: Option) -> list[Translation]:
    """Translate non-blank lines with this package, using float32 and, by default, greedy search."""
    config = replace(run.config.model, dtype="float32", attention_implementation="full")
    model = build_model(config, **run.vocabulary.sizes)
    search = replace(replace(run.config.decode, beam_size=1), **decode)
    translator = Translator(model, run.vocabulary, search)
    sentences = [Sentence(tokens) for tokens in translator.encode(lines)]
    texts = run.vocabulary.target.token_texts
    translations: dict[int, Translation] = {}
    # By default, GPUs and TPUs round the inputs of float32 matrix products.
    with jax.default_matmul_precision("highest"):
        for indices, best in translator.translate_batches(run.params, sentences, 1):
            for index, tokens, scores in zip(indices, best.tokens, best.scores, strict=False):
                text = [texts[token] for token in tokens[0, : list(tokens[0]).index(EOS)]]
                # `limit` includes the end-of-sentence token, but `max_tokens` does not.
                max_tokens = translator.limit(len(sentences[index].source)) - 1
                translations[index] = Translation(text, float(scores[0]), max_tokens)
    return [translations[index] for index in range(len(lines))]


class CTranslate2System:
    """A model in CTranslate2's format, run by CTranslate2 on one CPU thread.

    A line must not begin with a language code, because SentencePiece would split the code.
    """

    def __init__(self, folder: Path, quantization: str = "float32") -> None:
        """Load the model; raise a UsageError if CTranslate2 is not installed."""
        # The search is greedy. By default, CTranslate2 never returns an empty translation.
        self.options: dict[str, float] = {"beam_size": 1, "min_decoding_length": 0}
        self._tokenizer = sentencepiece.SentencePieceProcessor(str(folder / "source.spm"))
        # Not every CPU supports bfloat16.
        compute_type = "int8" if quantization == "int8" else "float32"
        self._translator = import_optional("ctranslate2").Translator(
            str(folder), compute_type=compute_type, intra_threads=1
        )

    def translate(self, line: str, max_tokens: int) -> list[str]:
        """Return a translation of up to `max_tokens` tokens, without the end-of-sentence token."""
        source = [self._tokenizer.encode(line, out_type=str)]
        [result] = self._translator.translate_batch(
            source, max_decoding_length=max_tokens, **self.options
        )
        return list(result.hypotheses[0])

    def score(self, line: str, tokens: Sequence[str]) -> float:
        """Return the log-probability of a translation, including the end-of-sentence token."""
        source = [self._tokenizer.encode(line, out_type=str)]
        [result] = self._translator.score_batch(source, [list(tokens)])
        return sum(result.log_probs)


class MarianSystem:
    """A model in Marian's format, run by Hugging Face's transformers library."""

    def __init__(self, folder: Path) -> None:
        """Load the model; raise a UsageError if PyTorch or the transformers library is missing."""
        self.options: dict[str, float] = {"num_beams": 1}
        self._torch = import_optional("torch")
        transformers = import_optional("transformers")
        transformers.utils.logging.disable_progress_bar()
        self._tokenizer = transformers.MarianTokenizer.from_pretrained(folder)
        self._model = transformers.MarianMTModel.from_pretrained(folder).eval()
        name = "target_vocab.json" if self._tokenizer.separate_vocabs else "vocab.json"
        self._ids = json.loads((folder / name).read_bytes())
        config = self._model.config
        self._begin, self._end = config.decoder_start_token_id, config.eos_token_id

    def translate(self, line: str, max_tokens: int) -> list[str]:
        """Return a translation of up to `max_tokens` tokens, without the end-of-sentence token."""
        source = self._tokenizer(line, return_tensors="pt")
        # Two additional tokens mark the beginning and end of the sentence.
        [tokens] = self._model.generate(**source, max_length=max_tokens + 2, **self.options)
        tokens = tokens.tolist()[1:]
        return list(self._tokenizer.convert_ids_to_tokens(tokens[: tokens.index(self._end)]))

    def score(self, line: str, tokens: Sequence[str]) -> float:
        """Return the log-probability of a translation, including the end-of-sentence token."""
        source = self._tokenizer(line, return_tensors="pt")
        target = [*(self._ids[token] for token in tokens), self._end]
        decoder_input = self._torch.tensor([[self._begin, *target[:-1]]])
        with self._torch.inference_mode():
            logits = self._model(**source, decoder_input_ids=decoder_input).logits[0]
        log_probs = self._torch.log_softmax(logits.double(), dim=-1)
        return float(log_probs[range(len(target)), target].sum())
