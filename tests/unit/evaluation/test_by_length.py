"""Test that each source-length bucket is scored as if it were a complete test set."""

import sacrebleu
from example_configs import read_pairs

from transformer_jax.evaluation.by_length import score_by_length
from transformer_jax.evaluation.perplexity import SentenceScore, perplexity

REFERENCES = [target for _, target in read_pairs("train")][:12]
HYPOTHESES = [line[: -(i % 3)] if i % 3 else line for i, line in enumerate(REFERENCES)]
LENGTHS = [1, 10, 11, 20, 21, 35, 35, 60, 61, 70, 500, 9]
SENTENCES = [SentenceScore(length, 5 + i, 0.7 * i) for i, length in enumerate(LENGTHS)]


def test_each_bucket_has_the_scores_of_its_sentences_alone() -> None:
    buckets = score_by_length(HYPOTHESES, REFERENCES, SENTENCES, "char")
    members = {1: [0, 1, 11], 11: [2, 3], 21: [4], 31: [5, 6], 51: [7], 61: [8, 9, 10]}
    assert [bucket["first"] for bucket in buckets] == list(members)
    assert [bucket["last"] for bucket in buckets] == [10, 20, 30, 40, 60, None]
    for bucket, indices in zip(buckets, members.values(), strict=True):
        lines = ([lines[i] for i in indices] for lines in (HYPOTHESES, REFERENCES))
        hypotheses, references = lines
        bleu = sacrebleu.corpus_bleu(hypotheses, [references], tokenize="char")
        assert bucket["bleu"] == bleu.score
        assert bucket["perplexity"] == perplexity([SENTENCES[i] for i in indices])
        assert bucket["sentences"] == len(indices)
    assert len({bucket["bleu"] for bucket in buckets}) > 3
