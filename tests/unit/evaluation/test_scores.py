"""Test BLEU and chrF against sacreBLEU, and the paper's BLEU against hand-computed values."""

import math

import pytest
import sacrebleu
from run_files import write_untrained_run

from transformer_jax import optional
from transformer_jax.errors import DataError, UsageError
from transformer_jax.evaluation.evaluate import Evaluation, evaluate
from transformer_jax.evaluation.scores import (
    check_tokenizer,
    choose_tokenizer,
    compound_bleu,
    score,
)
from transformer_jax.inference.trained_run import Run, load
from transformer_jax.progress import Note

GREEDY = {"beam_size": 1}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = write_untrained_run(tmp_path_factory.mktemp("runs") / "run", scale=3.0)
    return load(run.path, average_checkpoints=1)


@pytest.fixture(scope="module")
def evaluation(run: Run) -> Evaluation:
    return evaluate(run, "dev", GREEDY)


def test_scores_are_those_of_sacrebleu() -> None:
    hypotheses, references = ["the cat sat", "a dog ran off"], ["the cat sat", "a dog ran away"]
    scores = score(hypotheses, references)
    bleu = sacrebleu.corpus_bleu(hypotheses, [references])
    assert scores.bleu == bleu.score
    assert scores.chrf == sacrebleu.corpus_chrf(hypotheses, [references]).score
    assert scores.exact == 0.5
    assert "tok:13a" in scores.bleu_signature
    assert (scores.precisions, scores.brevity_penalty) == (bleu.precisions, bleu.bp)
    assert scores.lengths == [bleu.sys_len, bleu.ref_len]
    assert "tok:char" in score(hypotheses, references, tokenizer="char").bleu_signature


def test_spaces_that_a_model_cannot_generate_do_not_matter_for_exact_matches() -> None:
    references = [" the cat  sat\t", "a dog ran"]
    assert score(["the cat sat", "a dogran"], references).exact == 0.5


@pytest.mark.parametrize(
    ("hypotheses", "references", "message"),
    [
        (["a"], ["a", "b"], "cannot score 1 translations with 2 references"),
        (["a", "b"], ["a"], "cannot score 2 translations with 1 references"),
        ([], [], "cannot score 0 translations"),
    ],
)
def test_missing_lines_are_an_error(
    hypotheses: list[str], references: list[str], message: str
) -> None:
    with pytest.raises(DataError, match=message) as caught:
        score(hypotheses, references)
    assert caught.value.exit_code == 65


def test_tokenized_text_is_scored_word_by_word_without_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # sacreBLEU warns if more than 100 lines end in a tokenized period.
    references = [f"this is line {i} ." for i in range(120)]
    hypotheses = [line.replace("is line", "was line") for line in references]
    scores = score(hypotheses, references, tokenizer="none")
    assert "tok:none" in scores.bleu_signature
    assert scores.precisions[0] == pytest.approx(80)
    assert not caplog.records


def fourth_root(numerator: float, denominator: float) -> float:
    """Return BLEU in percent, given the product of the four n-gram precisions as a fraction."""
    return 100 * (numerator / denominator) ** 0.25


@pytest.mark.parametrize(
    ("tokenizer", "hypothesis", "reference", "expected"),
    [
        # The n-gram precisions of "a b ##AT##-##AT## c d e" are 5/6, 4/5, 3/4, and 2/3.
        ("none", "a b-c d e", "a b-c d f", fourth_root(1, 3)),
        # The pattern consumes the letters on both sides, so "x-b-c" is split only at its first
        # hyphen.
        ("none", "x-b-c d e f", "y-b-c d e f", fourth_root(1, 3)),
        # A hyphen surrounded by spaces is a word, so the n-gram precisions are 5/6, 4/5, 3/4, and
        # 2/3.
        ("none", "a - b c d e", "a - b c d f", fourth_root(1, 3)),
        # The translation has 4 words instead of 5. Every n-gram matches, and the brevity penalty is
        # exp(1 - 5/4).
        ("none", "a b c d", "a b c d e", 100 * math.exp(-1 / 4)),
        # There is no smoothing, so without a matching 4-gram the score is zero.
        ("none", "a b c x d", "a b c y d", 0.0),
        # The abbreviation and the ordinal keep their periods, so there are 7 words. The word "Juni"
        # is in 1 of 7 unigrams, 2 of 6 bigrams, 2 of 5 trigrams, and 2 of 4 four-grams.
        ("13a", "Sie kam z.B. am 3. Juni.", "Sie kam z.B. am 3. Mai.", fourth_root(72, 420)),
        # Quotation marks become separate words, as in `„ Ja " , rief er .`. In the reference, only
        # the first of these 7 words is different.
        ("13a", "„Ja“, rief er.", "»Ja“, rief er.", fourth_root(6 * 5 * 4 * 3, 7 * 6 * 5 * 4)),
        # Typographic punctuation is replaced before tokenization.
        ("13a", "Er sagt: “So geht es …”", 'Er sagt: "So geht es ..."', 100.0),
        # The text is tokenized before it is split at hyphens, so the result is
        # "im Text ##AT##-##AT## Format , bitte !".
        ("13a", "im Text-Format, bitte!", "im Text-Format, bitte?", fourth_root(360, 840)),
    ],
)
def test_the_papers_bleu_is_computed_by_hand(
    tokenizer: str, hypothesis: str, reference: str, expected: float
) -> None:
    assert compound_bleu(tokenizer, [hypothesis], [reference]) == pytest.approx(expected)


def test_the_papers_bleu_sums_over_the_corpus() -> None:
    # In total, 4 of 6 unigrams, 2 of 4 bigrams, and 0 of 2 trigrams match, so the score is zero.
    assert compound_bleu("none", ["a b", "c d e f"], ["a b", "c d x y"]) == 0
    # In total, 6 of 7 unigrams, 4 of 5 bigrams, 2 of 3 trigrams, and 1 of 1 four-grams match.
    hypotheses, references = ["a b c d", "e f g"], ["a b c d", "e f h"]
    score = compound_bleu("none", hypotheses, references)
    assert score == pytest.approx(fourth_root(6 * 4 * 2 * 1, 7 * 5 * 3 * 1))


def test_characters_have_no_compounds(evaluation: Evaluation) -> None:
    assert compound_bleu("char", ["a-b"], ["a-b"]) is None
    assert evaluation.result["compound_bleu"] is None


@pytest.mark.parametrize(
    ("tokenizer", "reference"),
    [
        ("zh", "这只红色的狗在雪地里看见了一只小猫。"),
        ("zh", "他在 GitHub 上工作了三年。"),
        ("char", "この赤い犬は雪の中で猫を見ました。"),
        ("char", "สุนัขสีแดงเห็นแมวในหิมะ"),
        ("char", "ឆ្កែក្រហមឃើញឆ្មានៅក្នុងព្រិល"),
        ("char", "ໝາສີແດງເຫັນແມວໃນຫິມະ"),
        ("char", "ခွေးနီသည်ကြောင်ကိုမြင်သည်"),
        ("char", "ཁྱི་དམར་པོས་ཞི་མི་མཐོང་།"),
        ("13a", "빨간 개가 눈 속에서 고양이를 봅니다."),
        ("13a", "The word 狗 means dog."),
        ("13a", "Der rote Hund sieht eine Katze."),
        ("13a", "Красная собака видит кошку."),
        ("13a", "लाल कुत्ता बिल्ली को देखता है"),
        ("13a", "12 - 34"),
        ("13a", ""),
    ],
)
def test_the_script_of_the_references_selects_the_tokenizer(tokenizer: str, reference: str) -> None:
    scores = score([reference], [reference])
    assert f"tok:{tokenizer}" in scores.bleu_signature
    assert choose_tokenizer("auto", [reference] * 3) == tokenizer
    assert choose_tokenizer("intl", [reference]) == "intl"


def test_a_good_translation_without_spaces_has_a_high_score() -> None:
    found, expected = "这只红色的狗在雪地里看到了一只小猫。", "这只红色的狗在雪地里看见了一只小猫。"
    scores = score([found], [expected])
    assert scores.bleu == sacrebleu.corpus_bleu([found], [[expected]], tokenize="zh").score > 80
    assert score([found], [expected], tokenizer="13a").bleu == 0
    assert compound_bleu("zh", [found], [expected]) is None


def test_references_of_few_words_get_a_note_before_the_work_begins() -> None:
    with pytest.warns(Note, match=r"only 0 of 9 references have 4 or more words.*bleu_tokenizer"):
        check_tokenizer("auto", ["eine katze"] * 9)
    check_tokenizer("auto", ["eine katze"] * 5 + ["eine katze im schnee"])
    check_tokenizer("char", ["katze"])
    check_tokenizer("auto", ["这只红色的狗"])


def test_a_tokenizer_without_its_library_is_an_error_before_the_work_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(optional, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r"needs MeCab: pip install 'sacrebleu\[ja\]'"):
        check_tokenizer("ja-mecab", ["この赤い犬は雪の中で猫を見ました。"])
