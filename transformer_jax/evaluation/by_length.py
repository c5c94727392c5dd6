"""Scores by source length. Attention was invented to improve the translation of long sentences."""

from collections.abc import Sequence

from transformer_jax.evaluation.perplexity import SentenceScore, perplexity
from transformer_jax.evaluation.scores import sacrebleu_metrics
from transformer_jax.files import JsonObject

# The width of a bucket, in source tokens. The last bucket has no upper limit.
BUCKET_WIDTH = 10
LAST_BUCKET = 60


def score_by_length(
    hypotheses: Sequence[str],
    references: Sequence[str],
    sentences: Sequence[SentenceScore],
    tokenizer: str,
    *,
    last_bucket: int = LAST_BUCKET,
) -> list[JsonObject]:
    """Return BLEU and perplexity for sentences with 1 to 10 source tokens, 11 to 20, and so on.

    The number of tokens includes the end-of-sentence token. Sentences with more than `last_bucket`
    tokens form one bucket, whose "last" value is None. Buckets without sentences are omitted.
    """
    members: dict[int, list[int]] = {}
    for index, sentence in enumerate(sentences):
        start = min((sentence.source_tokens - 1) // BUCKET_WIDTH * BUCKET_WIDTH, last_bucket)
        members.setdefault(start, []).append(index)
    bleu, _ = sacrebleu_metrics(tokenizer, warn=False)
    return [
        {
            "first": start + 1,
            "last": start + BUCKET_WIDTH if start < last_bucket else None,
            "sentences": len(indices),
            "bleu": bleu.corpus_score(
                [hypotheses[i] for i in indices], [[references[i] for i in indices]]
            ).score,
            "perplexity": perplexity([sentences[i] for i in indices]),
        }
        for start, indices in sorted(members.items())
    ]
