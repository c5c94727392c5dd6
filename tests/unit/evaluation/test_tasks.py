"""Test the scores of tasks other than translation."""

from transformer_jax.evaluation.tasks import main_score, score_task

REFERENCE = "(S (NP XX XX )NP (VP XX (NP XX XX )NP )VP . )S"
SENTENCE = "the cat sees a dog ."


def test_translation_has_no_score_of_its_own() -> None:
    assert score_task("translation", ["a"], ["b"], ["c"]) is None
    assert main_score(None) == {}
    assert main_score(score_task("parsing", [SENTENCE], [REFERENCE], [REFERENCE])) == {"f1": 100}
