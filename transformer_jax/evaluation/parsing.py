"""The task "parsing": score linearized trees by labeled F1 (section 6.3, Table 4).

Brackets count according to the rules of evalb (Sekine and Collins, 1997), which is the standard
program for scoring parsers on the Penn Treebank. The parameter files COLLINS.prm and new.prm define
these rules:

1. Empty elements and words with punctuation tags are deleted. Brackets without words are also
   deleted, and so is a TOP bracket around the whole tree.
2. Function tags are ignored (NP-SBJ counts as NP), and the labels ADVP and PRT count as equal.
3. Every remaining bracket counts, even if another bracket has the same label and words.
4. A sentence is skipped if its proposed tree has no words. A sentence counts as an error if its
   proposed tree and its reference tree have different words. The scores exclude both kinds of
   sentences.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from transformer_jax.data.linearization import PUNCTUATION_TAGS, parse_linearized
from transformer_jax.data.trees import EMPTY_ELEMENT, TOP_LABELS, Bracket, Tree, strip_function_tags
from transformer_jax.errors import DataError
from transformer_jax.files import JsonObject

# The second table in evalb's output covers sentences of at most this many words, including
# punctuation.
CUTOFF_LENGTH = 40
DELETED_TAGS = PUNCTUATION_TAGS | {EMPTY_ELEMENT}
EQUIVALENT_LABELS = {"PRT": "ADVP"}


@dataclass(frozen=True)
class BracketScores:
    """Counts over all sentences, and the percentages that evalb computes from these counts."""

    sentences: int = 0
    errors: int = 0
    skipped: int = 0
    complete: int = 0
    """The number of sentences whose brackets are all correct."""
    matched: int = 0
    """The number of correct brackets."""
    expected: int = 0
    """The number of brackets in the reference trees."""
    proposed: int = 0
    """The number of brackets in the proposed trees."""

    @property
    def recall(self) -> float:
        """The percentage of brackets in the reference trees that were proposed."""
        return _percentage(self.matched, self.expected)

    @property
    def precision(self) -> float:
        """The percentage of proposed brackets that are correct."""
        return _percentage(self.matched, self.proposed)

    @property
    def f1(self) -> float:
        """The harmonic mean of precision and recall, in percent."""
        return _percentage(2 * self.matched, self.expected + self.proposed)

    @property
    def complete_match(self) -> float:
        """The percentage of scored sentences whose brackets are all correct."""
        return _percentage(self.complete, self.sentences - self.errors - self.skipped)


def score_brackets(
    pairs: Iterable[tuple[Tree, Tree]], max_length: int | None = None
) -> BracketScores:
    """Score pairs of a reference and a proposed tree, with up to `max_length` words if given.

    Skip proposed trees that have no words except punctuation.
    """
    totals = Counter[str]()
    for reference, proposed in pairs:
        length = sum(tag != EMPTY_ELEMENT for tag in reference.tags)
        if max_length is not None and length > max_length:
            continue
        totals["sentences"] += 1
        if not _scored_words(proposed):
            totals["skipped"] += 1
        elif _scored_words(reference) != _scored_words(proposed):
            totals["errors"] += 1
        else:
            ours, theirs = scored_brackets(proposed), scored_brackets(reference)
            totals["complete"] += ours == theirs
            totals["matched"] += (ours & theirs).total()
            totals["expected"] += theirs.total()
            totals["proposed"] += ours.total()
    return BracketScores(**totals)


def scored_brackets(tree: Tree) -> Counter[Bracket]:
    """Count the brackets that evalb scores, with positions that ignore deleted words."""
    position = [0]
    for tag in tree.tags:
        position.append(position[-1] + (tag not in DELETED_TAGS))
    brackets = Counter[Bracket]()
    for label, first, last in tree.brackets:
        category, start, end = strip_function_tags(label), position[first], position[last]
        if start < end and category not in TOP_LABELS:
            brackets[Bracket(EQUIVALENT_LABELS.get(category, category), start, end)] += 1
    return brackets


def make_right_branching(tree: Tree) -> Tree:
    """Return the right-branching tree: each word forms a constituent with the words that follow it.

    The outermost constituent is an S that covers the whole sentence. All other constituents are VPs
    that neither begin with punctuation nor consist of a single word.
    """
    starts = [i for i, tag in enumerate(tree.tags) if tag not in DELETED_TAGS][:-1]
    labels = ["S", *["VP"] * len(starts)]
    end = len(tree.words)
    nested = [Bracket(label, i, end) for label, i in zip(labels, [0, *starts[1:]], strict=False)]
    return tree._replace(brackets=tuple(nested))


def _scored_words(tree: Tree) -> list[str]:
    pairs = zip(tree.words, tree.tags, strict=True)
    return [word for word, tag in pairs if tag not in DELETED_TAGS]


def _percentage(part: int, whole: int) -> float:
    return 100 * part / whole if whole else 0.0


def score_parses(
    sources: Sequence[str], hypotheses: Sequence[str], references: Sequence[str]
) -> JsonObject:
    """Repair and score linearized trees, and score the right-branching baseline.

    The tags come from the references, because evalb finds punctuation by tags.
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
    """Parse the references and return their trees."""
    trees: list[Tree] = []
    for number, (source, reference) in enumerate(zip(sources, references, strict=True), start=1):
        # A word can contain a no-break space, so split words only at ordinary spaces.
        words = tuple(word for word in source.split(" ") if word)
        parse = parse_linearized(reference, len(words))
        if parse.is_repaired:
            raise DataError(
                f"reference {number} is not a linearized tree over the {len(words)} words of its "
                "source, which data.task parsing needs"
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
    names = ("f1", "precision", "recall", "complete_match", "sentences")
    return {name: getattr(scores, name) for name in names}


def _describe(scores: JsonObject) -> str:
    return (
        f"{scores['f1']:.2f}  precision {scores['precision']:.2f}, recall {scores['recall']:.2f}, "
        f"complete match {scores['complete_match']:.2f}% of {scores['sentences']:,}"
    )
