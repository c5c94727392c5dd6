import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import numpy as np
import pytest
from example_configs import SMALL, read_pairs
from run_files import write_untrained_run

from transformer_jax.console import format_for_shell
from transformer_jax.data.batches import Ragged
from transformer_jax.data.prepare import Prepared, prepare_text
from transformer_jax.errors import DataError, OutOfMemoryError, UsageError
from transformer_jax.inference import translate
from transformer_jax.inference.pairs import token_log_probs
from transformer_jax.inference.sampling import Sampling
from transformer_jax.inference.trained_run import Run, load
from transformer_jax.inference.translate import (
    FULL_WIDTH,
    MIN_WIDTH,
    ROWS,
    Hypothesis,
    Sentence,
    Translator,
    group_by_width,
    pad_rows,
    translate_batch,
)
from transformer_jax.model.build import POSITIONS, build_transformer
from transformer_jax.model.encoder_decoder import init_params
from transformer_jax.special_tokens import EOS

Translate = Callable[..., list[list[Hypothesis]]]
WIDTH = 32
LONG_LINE = " ".join(["one"] * 200)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """An untrained run that produces different translations for different lines.

    The model rarely predicts the end-of-sentence token, so this run allows every hypothesis in the
    beam to finish.
    """
    path = tmp_path_factory.mktemp("runs") / "run"
    config = SMALL.change(decode={"beam_end": "any"})
    return load(write_untrained_run(path, config, steps=(8,), scale=3.0).path)


@pytest.fixture(scope="module")
def prepared(run: Run) -> Prepared:
    return prepare_text(run.config.data, run.vocabulary)


@pytest.fixture(scope="module")
def lines(run: Run) -> list[str]:
    """Lines that are padded to the same width, to limit the number of XLA compilations."""
    translator = run.translator()
    sources = [source for source, _ in [*read_pairs("dev"), *read_pairs("train")]]
    widths = [translator.width(len(tokens)) for tokens in translator.encode(sources)]
    assert len(set(widths)) > 1
    return [x for x, width in zip(sources, widths, strict=True) if width == WIDTH][: 2 * ROWS + 4]


def test_a_translation_depends_only_on_its_sentence(run: Run, lines: list[str]) -> None:
    together = run.translate_best(lines, 4)
    alone = [run.translate_best([line], 4)[0] for line in lines[::9]]
    order = np.random.default_rng(0).permutation(len(lines))
    shuffled = run.translate_best([lines[i] for i in order], 4)
    for actual, expected in [
        *zip(alone, together[::9], strict=True),
        *((shuffled[position], together[i]) for position, i in enumerate(order)),
    ]:
        assert [h.text for h in actual] == [h.text for h in expected]
        np.testing.assert_allclose(
            [h.score for h in actual], [h.score for h in expected], rtol=1e-5
        )
    # This test is meaningful only if different lines have different translations.
    assert len({best[0].text for best in together}) > 10


def test_translations_are_in_the_order_of_more_lines_than_a_batch_has(
    run: Run, lines: list[str]
) -> None:
    assert len(lines) > 2 * ROWS
    one_by_one = [run.translate([line], beam_size=1)[0] for line in lines]
    assert run.translate(lines, beam_size=1) == one_by_one


def test_the_best_translations_come_first_and_do_not_depend_on_their_number(
    run: Run, lines: list[str]
) -> None:
    best = run.translate_best(lines[:10], 4)
    for hypotheses in best:
        scores = [hypothesis.score for hypothesis in hypotheses]
        assert scores == sorted(scores, reverse=True)
        assert len(hypotheses) == 4
    assert [hypotheses[0].text for hypotheses in best] == run.translate(lines[:10])


@pytest.mark.slow
def test_a_wider_beam_finds_better_scores(run: Run, lines: list[str]) -> None:
    narrow = [best[0].score for best in run.translate_best(lines, 1, beam_size=4)]
    wide = [best[0].score for best in run.translate_best(lines, 1, beam_size=12)]
    assert np.mean(wide) > np.mean(narrow)


def test_scores_are_the_log_probabilities_of_the_model(run: Run, lines: list[str]) -> None:
    source = np.zeros((ROWS, WIDTH), np.int32)
    tokens = run.vocabulary.source.encode(lines[:ROWS])
    for row, sentence in zip(source, tokens, strict=True):
        row[: len(sentence)] = sentence
    longer = run.config.decode.max_extra_length
    limit = np.array([len(sentence) + longer for sentence in tokens])
    best = translate_batch(run.model, run.config.decode, 4, run.params, source, limit)
    model: Any = jax.jit(lambda s, t: run.model.apply({"params": run.params}, s, t))
    for rank in (0, 1):
        target = best.tokens[:, rank]
        logits = model(jax.numpy.asarray(source), target)
        log_probs = jax.nn.log_softmax(logits)
        chosen = np.take_along_axis(np.asarray(log_probs), np.asarray(target)[..., None], 2)[..., 0]
        lengths = np.sum(target != 0, axis=1)
        expected = np.sum(chosen, axis=1, where=target != 0) / ((5 + lengths) / 6) ** 0.6
        np.testing.assert_allclose(best.scores[:, rank], expected, rtol=1e-4)


def test_a_line_that_is_too_long_is_an_error_with_its_number(run: Run, lines: list[str]) -> None:
    with pytest.raises(DataError, match=r"line 3 has \d+ tokens, but the model reads at most 64"):
        run.translate([lines[0], "", LONG_LINE])
    assert len(run.translate([lines[0], "", LONG_LINE], truncate=True, beam_size=1)) == 3


def test_a_single_string_is_not_a_list_of_lines(run: Run) -> None:
    with pytest.raises(UsageError, match="lines must be a list of strings, got 'one'"):
        run.translate("one")


def test_a_line_that_is_not_utf_8_is_an_error(run: Run) -> None:
    with pytest.raises(DataError, match="line 2 is not UTF-8: see character 2"):
        run.translate(["one", "a\udcff"])
    with pytest.raises(DataError, match="the target sentence is not UTF-8: see character 1"):
        run.attention("one", "\udcff")


def test_translation_and_training_encode_a_line_in_the_same_way(
    run: Run, prepared: Prepared
) -> None:
    sources, _ = prepared.tokens("dev")
    trained = [tokens.tolist() for tokens in np.split(sources.flat, sources.offsets[1:-1])]
    assert run.translator().encode(prepared.lines("dev")[0]) == trained
    assert all(tokens.count(EOS) == 1 for tokens in trained)


def test_truncation_keeps_the_beginning_and_the_end_token(run: Run) -> None:
    [tokens] = run.translator().encode([LONG_LINE], truncate=True)
    assert len(tokens) == 64
    assert tokens[-1] == EOS


def test_each_width_is_compiled_once(run: Run, lines: list[str]) -> None:
    unique = dataclasses.replace(run.config.decode, beam_size=1, max_extra_length=3)
    cache_size = cast(Any, translate_batch)._cache_size
    before = cache_size()
    for some in (["one", *lines[:10]], lines[10:]):
        Translator(run.model, run.vocabulary, unique).translate(run.params, some)
    assert cache_size() - before == 2


def test_all_exponents_of_the_length_penalty_share_a_program(run: Run, lines: list[str]) -> None:
    decode = dataclasses.replace(run.config.decode, beam_size=3, max_extra_length=4)
    cache_size = cast(Any, translate_batch)._cache_size
    scores, programs = list[list[float]](), list[int]()
    for alpha in (1.0, 0.5):
        config = dataclasses.replace(decode, length_penalty_alpha=alpha, average_checkpoints=2)
        found = Translator(run.model, run.vocabulary, config).translate(run.params, lines[:4])
        scores.append([best[0].score for best in found])
        programs.append(cache_size())
    assert programs[0] == programs[1]
    # Here, the exponent is a constant in the program.
    translator = Translator(run.model, run.vocabulary, decode)
    [tokens] = translator.encode(lines[:1])
    source, limit = pad_rows([tokens], 1, WIDTH), np.array([translator.limit(len(tokens))])
    static = dataclasses.replace(decode, length_penalty_alpha=0.5)
    best = translate_batch(run.model, static, 1, run.params, source, limit)
    assert scores[1][0] == pytest.approx(float(best.scores[0, 0]), rel=1e-5)
    assert scores[1][0] != pytest.approx(scores[0][0], rel=1e-2)


@pytest.mark.parametrize(
    "positions",
    [
        pytest.param(scheme, marks=[] if scheme in ("learned", "relative") else [pytest.mark.slow])
        for scheme in POSITIONS
    ],
)
def test_every_kind_of_position_reads_the_longest_source(run: Run, positions: str) -> None:
    config = SMALL.change(
        model={"positions": positions, "max_length": 40},
        data={"max_length": 40},
        decode={"beam_size": 1},
    )
    model = build_transformer(config.model, len(run.vocabulary.target))
    params = init_params(model, jax.random.key(0))
    translator = Translator(model, run.vocabulary, config.decode)
    [[best]] = translator.translate(params, [LONG_LINE], truncate=True)
    assert np.isfinite(best.score)


def with_table(run: Run, out_of_range_positions: str, extra: int = 40) -> Translate:
    """Return a greedy `translate` function; its model has 20 positions and never predicts `EOS`."""
    learned = {
        "positions": "learned",
        "max_positions": 20,
        "out_of_range_positions": out_of_range_positions,
    }
    config = SMALL.change(
        model=learned,
        data={"max_length": 20},
        decode={"beam_size": 1, "max_extra_length": extra},
    )
    model = build_transformer(config.model, len(run.vocabulary.target))
    params = init_params(model, jax.random.key(1))
    # The logit of `EOS` is 0 and the largest logit is positive, so `EOS` is never the best token.
    table = params["embedding"]["table"]
    params["embedding"]["table"] = table.at[EOS].set(0)
    translator = Translator(model, run.vocabulary, config.decode)
    return functools.partial(translator.translate, params)


@pytest.mark.slow
def test_a_line_longer_than_the_learned_table_is_an_error_unless_positions_are_clamped(
    run: Run,
) -> None:
    lines = ["one", " ".join(["one"] * 15)]
    [short, long] = map(len, run.vocabulary.source.encode(lines))
    assert short < 20 < long
    strict = with_table(run, "error")
    message = rf"^line 2 has {long} tokens, but the model reads at most 20 \(model.max_positions\)"
    with pytest.raises(DataError, match=message):
        strict(lines)
    assert len(strict(lines, truncate=True)) == len(with_table(run, "clamp")(lines)) == 2


def test_a_translation_ends_at_the_last_learned_position_unless_positions_are_clamped(
    run: Run,
) -> None:
    def translation(out_of_range_positions: str, extra: int) -> Hypothesis:
        [[best]] = with_table(run, out_of_range_positions, extra)(["one"])
        return best

    # With this extra length, a translation has exactly as many tokens as the position table has
    # rows.
    extra = 20 - len(run.translator().encode(["one"])[0])
    expected = translation("clamp", extra)
    assert translation("error", 40) == expected
    assert len(translation("clamp", 40).text) > len(expected.text)


def test_a_model_that_computes_nan_still_gives_one_translation_per_line(
    run: Run, lines: list[str]
) -> None:
    broken = jax.tree.map(lambda x: x * np.nan, run.params)
    best = run.translator().translate(broken, [lines[0], "", lines[1]])
    assert [len(hypotheses) for hypotheses in best] == [1, 1, 1]


def test_a_vocabulary_of_another_size_than_the_model_is_an_error(run: Run) -> None:
    size = len(run.vocabulary.target)
    model = build_transformer(run.config.model, size - 1)
    message = rf"has \({size}, {size}\) tokens, but the model has \({size - 1}, {size - 1}\)"
    with pytest.raises(ValueError, match=message):
        Translator(model, run.vocabulary, run.config.decode)


def test_an_out_of_memory_error_suggests_a_smaller_beam_only_if_there_is_one(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out_of_memory(*_: Any, **__: Any) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")

    monkeypatch.setattr(translate, "translate_batch", run_out_of_memory)
    for beam_size, advice in ((4, "such as --beam-size 1"), (1, "use a device with more memory")):
        with pytest.raises(OutOfMemoryError) as caught:
            run.translate(["forty-two"], beam_size=beam_size)
        assert f"of 16 tokens with a beam of {beam_size}: " in format_for_shell(caught.value)
        assert format_for_shell(caught.value).endswith(advice)


@pytest.mark.parametrize(
    ("options", "alpha"),
    [
        ({"beam_size": 1}, 0.0),
        ({"beam_size": 3, "length_penalty_alpha": 0.6}, 0.6),
        ({"sampling": Sampling(seed=1)}, 0.0),
    ],
    ids=["greedy", "beam", "sampling"],
)
def test_a_translation_continues_its_prefix_with_the_probabilities_of_score(
    run: Run, lines: list[str], options: dict[str, Any], alpha: float
) -> None:
    sources, prefixes = lines[:3], ["zwei", "", "hundertein und"]
    translator = run.translator(**options)
    forced = [tokens[:-1] for tokens in run.vocabulary.target.encode(prefixes)]
    pairs = zip(translator.encode(sources), forced, strict=True)
    [(indices, best)] = translator.translate_batches(run.params, [Sentence(*x) for x in pairs], 1)
    targets = [[t for t in tokens if t] for tokens in best.tokens[:3, 0].tolist()]
    encoded = Ragged.from_lists(translator.encode(sources)), Ragged.from_lists(targets)
    log_probs = token_log_probs(run.model, run.params, encoded)
    hypotheses = run.translate_best(sources, 1, prefixes=prefixes, **options)
    for i, prefix in zip(indices, prefixes, strict=True):
        assert targets[i][: len(forced[i])] == forced[i]
        assert hypotheses[i][0].text.startswith(prefix)
        expected = log_probs[i].sum() / ((5 + len(targets[i])) / 6) ** alpha
        assert hypotheses[i][0].score == pytest.approx(expected, rel=1e-4)
    # A blank prefix has no effect, even if other lines have a prefix.
    [free] = run.translate([sources[1]], **options)
    assert hypotheses[1][0].text == free


def test_batches_of_very_long_sentences_have_fewer_rows() -> None:
    widths = [MIN_WIDTH, *[8 * FULL_WIDTH] * 2, *[FULL_WIDTH] * (ROWS + 1), *[2 * FULL_WIDTH] * 9]
    batches = [(width, len(indices)) for width, indices in group_by_width(widths)]
    short = [(MIN_WIDTH, 1), (FULL_WIDTH, ROWS), (FULL_WIDTH, 1)]
    # Attention in 8 rows of twice the width needs as much memory as in 32 rows.
    assert batches == [*short, *[(2 * FULL_WIDTH, n) for n in (8, 1)], *[(8 * FULL_WIDTH, 1)] * 2]


def test_a_prefix_that_cannot_begin_a_translation_is_an_error(run: Run) -> None:
    with pytest.raises(UsageError, match=r"^the numbers of lines and prefixes differ: 2 and 1$"):
        run.translate(["one", "two"], prefixes=["eins"])
    with pytest.raises(DataError, match=r"^line 2 is blank, so prefix 2 must be blank, too$"):
        run.translate(["one", ""], prefixes=["", "eins"])
    with pytest.raises(DataError, match=r"^prefix 2 is not UTF-8: see character 1"):
        run.translate(["one", "two"], prefixes=["", "\udcff"])
    [tokens] = run.translator().encode(["one"])
    most = run.translator().limit(len(tokens)) - 1
    message = rf"^prefix 1 has \d+ tokens, but a translation of line 1 has at most {most}: short"
    with pytest.raises(DataError, match=message):
        run.translate(["one"], prefixes=["eins " * most])
    for extra in (0, 8):
        assert run.translate([""], prefixes=[" "], max_extra_length=extra) == [""]
