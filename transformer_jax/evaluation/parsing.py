"""The task "parsing": score linearized trees by labeled F1 (section 6.3)."""

from collections.abc import Sequence

from transformer_jax.data.linearization import parse_linearized
from transformer_jax.data.trees import Tree
from transformer_jax.errors import DataError
from transformer_jax.evaluation.brackets import (
    CUTOFF_LENGTH,
    BracketScores,
    make_right_branching,
    score_brackets,
)
from transformer_jax.files import JsonObject


def score_parses(
    sources: Sequence[str], hypotheses: Sequence[str], references: Sequence[str]
) -> JsonObject:
    """Repair and score linearized trees, and score the right-branching baseline.

    Each scored tree takes its words from the source sentence and its tags from the reference. The
    predicted tags are ignored, because evalb finds punctuation by tags, so a wrong tag would change
    which words count.

    Raises:
        DataError: a reference is not a linearized tree over the words of its source.
    """
    expected, proposed, num_repaired = read_references(sources, references), list[Tree](), 0
    for tree, hypothesis in zip(expected, hypotheses, strict=True):
        parse = parse_linearized(hypothesis, len(tree.words))
        num_repaired += parse.is_repaired
        proposed.append(tree._replace(brackets=parse.brackets))
    baseline = list(map(make_right_branching, expected))
    return {
        **_score(expected, proposed),
        "repaired": num_repaired,
        "right_branching": _score(expected, baseline),
    }


def read_references(sources: Sequence[str], references: Sequence[str]) -> list[Tree]:
    """Parse the references and return their trees.

    Raises:
        DataError: a reference is not a linearized tree over the words of its source.
    """
    trees: list[Tree] = []
    for number, (source, reference) in enumerate(zip(sources, references, strict=True), start=1):
        # A word can contain a no-break space, so split words only at ordinary spaces.
        words = tuple(word for word in source.split(" ") if word)
        parse = parse_linearized(reference, len(words))
        if parse.is_repaired:
            raise DataError(
                f"reference {number} is not a linearized tree over the {len(words)} words of its "
                "source: data.task parsing needs such trees"
            )
        trees.append(Tree(words, parse.tags, parse.brackets))
    return trees


def describe_parses(values: JsonObject) -> list[str]:
    """Format parsing scores as the lines that `evaluate` prints."""
    baseline = values["right_branching"]
    return [
        f"F1          {_describe(values)}",
        f"  short     {_describe(values['short'])}",
        f"baseline    {_describe(baseline)}",
        f"  short     {_describe(baseline['short'])}",
        f"repaired    {values['repaired']:,} of {values['sentences']:,} trees",
        f"short: at most {CUTOFF_LENGTH} words; baseline: right-branching trees",
    ]


def _score(expected: Sequence[Tree], proposed: Sequence[Tree]) -> JsonObject:
    pairs = list(zip(expected, proposed, strict=True))
    return {
        **_to_dict(score_brackets(pairs)),
        "short": _to_dict(score_brackets(pairs, CUTOFF_LENGTH)),
    }


def _to_dict(scores: BracketScores) -> dict[str, float]:
    return {
        "f1": scores.f1,
        "precision": scores.precision,
        "recall": scores.recall,
        "complete_match": scores.complete_match,
        "sentences": scores.sentences,
    }


def _describe(scores: JsonObject) -> str:
    return (
        f"{scores['f1']:.2f}  precision {scores['precision']:.2f}, recall {scores['recall']:.2f}, "
        f"complete match {scores['complete_match']:.2f}% of {scores['sentences']:,}"
    )
