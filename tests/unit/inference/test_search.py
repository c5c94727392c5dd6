"""Test beam search against exhaustive enumeration and against searches in plain Python.

The step function in these tests looks up the logits for a hypothesis's entire token history. A
hypothesis that reads another hypothesis's cache therefore gets the wrong logits.
"""

import functools
import inspect
import itertools
from typing import Any, NamedTuple, get_args, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import Array
from numpy.typing import NDArray
from oracles import Floats, examples, floats, softmax

from transformer_jax.config import DecodeConfig
from transformer_jax.inference.search import (
    END_RULES,
    NEG_INF,
    PENALTIES,
    Translations,
    beam_search,
    first_argmax,
    greedy_search,
)

BOS, EOS = 1, 2
LONGEST = 5
SENTENCES = 3
SEED = st.integers(0, 100_000)
LIMITS = st.lists(st.integers(1, LONGEST), min_size=SENTENCES, max_size=SENTENCES)
# The length penalties, each with a name and an alpha: none, the paper's penalty, the mean
# log-probability per token, and a penalty that favors long translations.
KINDS = [("gnmt", 0.0), ("gnmt", 0.6), ("power", 1.0), ("power", 2.0)]


def sizes_and_kinds(*sizes: tuple[int, int]) -> list[Any]:
    """Return a test case for each combination of a search size and a length penalty.

    A search size consists of a beam size and a number of results. The fast tests pair the first
    size with the first penalty, the second size with the second penalty, and so on. All other
    combinations are slow tests.
    """
    return [
        pytest.param(*size, kind, marks=[pytest.mark.slow] if i != j else [])
        for i, size in enumerate(sizes)
        for j, kind in enumerate(KINDS)
    ]


@pytest.mark.parametrize("size", [1, 7, 24, 607, 1000, 9712])
def test_the_first_maximum_is_found_as_numpy_does(size: int) -> None:
    rng = np.random.default_rng(size)
    # Small integers are often equal.
    x = rng.integers(0, 5, (8, size)).astype(np.float32)
    x[1], x[2, -1], x[3, 0] = -np.inf, np.inf, 9
    np.testing.assert_array_equal(first_argmax(jnp.asarray(x)), np.argmax(x, axis=-1))
    x[:, size // 2] = np.nan
    assert all(0 <= index < size for index in first_argmax(jnp.asarray(x)))


Scored = tuple[float, tuple[int, ...]]


class State(NamedTuple):
    """The state of the step function: each beam slot's tokens and each sentence's logits."""

    cache: Array
    """The tokens read by each beam slot of each sentence, [B, J, L]."""
    table: Array
    """The logits for each sentence, position, and history, [B, L, N^(L-1), N]. A history is a
    sequence of tokens. The index of a history is the number whose base-N digits are its tokens.
    """


def random_table(seed: int, vocabulary: int, *, sentences: int = SENTENCES) -> Array:
    """Return random logits for the token that follows each possible history."""
    shape = (sentences, LONGEST, vocabulary ** (LONGEST - 1), vocabulary)
    drawn = 2 * np.random.default_rng(seed).standard_normal(shape, np.float32)
    return jnp.asarray(drawn)


def step(newest: Array, position: Array, ancestors: Array, state: State) -> tuple[Array, State]:
    """Look up the logits for the history of each hypothesis."""
    vocabulary = state.table.shape[-1]
    cache = state.cache.at[:, :, position].set(newest)
    read = jnp.take_along_axis(cache, ancestors, axis=1)
    number = jnp.zeros(newest.shape, jnp.int32)
    # The first token is always `BOS`, so leave it out of the number.
    for p in range(1, LONGEST):
        number = jnp.where(p <= position, number * vocabulary + read[..., p], number)
    sentence = jnp.arange(len(newest))[:, None]
    logits = state.table[sentence, position, number]
    return logits, state._replace(cache=cache)


STATIC = ("beam_size", "kind", "num_best", "beam_end", "suppress_tokens")


@functools.partial(jax.jit, static_argnames=STATIC)
def beam(
    table: Array,
    limits: Array,
    *,
    beam_size: int,
    kind: tuple[str, float],
    num_best: int,
    beam_end: str = "any",
    suppress_tokens: tuple[int, ...] = (),
    prefix: Array | None = None,
) -> Translations:
    return beam_search(
        step,
        State(jnp.zeros((len(table), beam_size, LONGEST), jnp.int32), table),
        limits,
        beam_size=beam_size,
        max_length=LONGEST,
        start=BOS,
        eos=EOS,
        length_penalty=kind[0],
        alpha=kind[1],
        beam_end=beam_end,
        num_best=num_best,
        suppress_tokens=suppress_tokens,
        prefix=prefix,
    )


@functools.partial(jax.jit, static_argnames="suppress_tokens")
def greedy(
    table: Array,
    limits: Array,
    suppress_tokens: tuple[int, ...] = (),
    prefix: Array | None = None,
) -> Translations:
    state = State(jnp.zeros((len(table), 1, LONGEST), jnp.int32), table)
    options: dict[str, Any] = {"suppress_tokens": suppress_tokens, "prefix": prefix}
    return greedy_search(step, state, limits, max_length=LONGEST, start=BOS, eos=EOS, **options)


def log_probs_after(table: Floats, tokens: tuple[int, ...]) -> Floats:
    """Return the log-probability of each token that can follow `tokens` in one sentence's table."""
    number = 0
    for token in tokens:
        number = number * table.shape[-1] + token
    return np.log(softmax(table[len(tokens), number]))


def log_prob(table: Floats, tokens: tuple[int, ...]) -> float:
    return sum(float(log_probs_after(table, tokens[:i])[t]) for i, t in enumerate(tokens))


def divisor(length: int, kind: tuple[str, float]) -> float:
    name, alpha = kind
    return float({"gnmt": (5 + length) / 6, "power": length}[name] ** alpha)


def all_translations(table: Floats, limit: int, kind: tuple[str, float]) -> list[Scored]:
    """Return the scores and tokens of all sequences that end within the limit, best first."""
    others = [token for token in range(table.shape[-1]) if token != EOS]
    translations: list[Scored] = []
    for length in range(1, limit + 1):
        for prefix in itertools.product(others, repeat=length - 1):
            tokens = (*prefix, EOS)
            translations.append((log_prob(table, tokens) / divisor(length, kind), tokens))
    return sorted(translations, reverse=True)


def continuations(table: Floats, live: list[Scored], prefix: tuple[int, ...] = ()) -> list[Scored]:
    """Return the log-probability and tokens of every one-token extension of each hypothesis.

    Omit the extensions that do not begin with the prefix.
    """
    return [
        (prefix_log_prob + float(token_log_prob), (*tokens, token))
        for prefix_log_prob, tokens in live
        for token, token_log_prob in enumerate(log_probs_after(table, tokens))
        if token in prefix[len(tokens) : len(tokens) + 1] or len(tokens) >= len(prefix)
    ]


def exhaustive_beam(
    table: Floats,
    limit: int,
    kind: tuple[str, float],
    beam_size: int,
    prefix: tuple[int, ...] = (),
) -> list[Scored]:
    """Return all translations that beam search would find without early stopping, best first."""
    live: list[Scored] = [(0.0, ())]
    finished: list[Scored] = []
    for length in range(1, limit + 1):
        longer = continuations(table, live, prefix)
        finished += [
            (p / divisor(length, kind), tokens) for p, tokens in longer if tokens[-1] == EOS
        ]
        live = sorted((x for x in longer if x[1][-1] != EOS), reverse=True)[:beam_size]
    return sorted(finished, reverse=True)


def tensor2tensor_beam(
    table: Floats,
    limit: int,
    kind: tuple[str, float],
    beam_size: int,
    prefix: tuple[int, ...] = (),
) -> list[Scored]:
    """Return the `beam_size` best translations that Tensor2Tensor's search finishes, best first.

    Each step sorts the continuations of all hypotheses and keeps the 2 x `beam_size` best ones.
    Continuations that end with `EOS` become finished translations, and the `beam_size` most likely
    of the others stay in the beam. If no hypothesis has finished when the search reaches the limit,
    all hypotheses end there.
    """
    live: list[Scored] = [(0.0, ())]
    finished: list[Scored] = []
    for length in range(1, limit + 1):
        longer = continuations(table, live, prefix)
        kept = sorted(longer, reverse=True)[: 2 * beam_size]
        if length == limit and not finished and not any(x[1][-1] == EOS for x in kept):
            kept = longer
        finished += [(p / divisor(length, kind), x) for p, x in kept if x[-1] == EOS]
        finished = sorted(finished, reverse=True)[:beam_size]
        live = [x for x in kept if x[1][-1] != EOS][:beam_size]
    return finished


def until_eos(tokens: NDArray[Any]) -> tuple[int, ...]:
    """Return the tokens up to and including `EOS`, and check that only zeros follow."""
    length = tokens.tolist().index(EOS) + 1
    assert not tokens[length:].any()
    return tuple(tokens[:length].tolist())


def assert_best(actual: Translations, sentence: int, expected: list[Scored]) -> None:
    """Check that a sentence's top hypotheses are the expected ones."""
    for j, (score, tokens) in enumerate(expected):
        assert until_eos(np.asarray(actual.tokens[sentence, j])) == tokens
        assert float(actual.scores[sentence, j]) == pytest.approx(score, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind[1] > 1 else [pytest.mark.slow]) for kind in KINDS]
)
@given(seed=SEED, limits=LIMITS)
@examples(12)
def test_a_large_enough_beam_finds_all_sequences_best_first(
    kind: tuple[str, float], seed: int, limits: list[int]
) -> None:
    # With a vocabulary of 3 tokens, there are 1 + 2 + 4 + 8 + 16 translations of at most 5 tokens.
    table, size = random_table(seed, 3), 31
    actual = beam(table, jnp.asarray(limits), beam_size=size, kind=kind, num_best=size)
    for sentence, limit in enumerate(limits):
        expected = all_translations(floats(table[sentence]), limit, kind)
        assert len(expected) == 2**limit - 1
        assert_best(actual, sentence, expected)
        assert np.all(actual.scores[sentence, len(expected) :] == NEG_INF)


@pytest.mark.parametrize(
    ("beam_size", "num_best", "kind"), sizes_and_kinds((1, 1), (2, 2), (3, 1), (3, 2))
)
@given(seed=SEED, limits=LIMITS)
@examples(12)
def test_early_stopping_changes_no_result(
    beam_size: int, num_best: int, kind: tuple[str, float], seed: int, limits: list[int]
) -> None:
    table = random_table(seed, 5)
    actual = beam(table, jnp.asarray(limits), beam_size=beam_size, kind=kind, num_best=num_best)
    for sentence, limit in enumerate(limits):
        expected = exhaustive_beam(floats(table[sentence]), limit, kind, beam_size)
        assert_best(actual, sentence, expected[:num_best])


@pytest.mark.parametrize(
    ("beam_size", "num_best", "kind"), sizes_and_kinds((1, 1), (2, 2), (3, 1), (3, 3))
)
@given(seed=SEED, limits=LIMITS, end_bias=st.sampled_from([0.0, -2.0, -4.0]))
@examples(12)
def test_the_papers_search_is_that_of_tensor2tensor(
    beam_size: int,
    num_best: int,
    kind: tuple[str, float],
    seed: int,
    limits: list[int],
    end_bias: float,
) -> None:
    table = random_table(seed, 8).at[..., EOS].add(end_bias)
    options: dict[str, Any] = {"beam_size": beam_size, "kind": kind, "num_best": num_best}
    actual = beam(table, jnp.asarray(limits), beam_end="tensor2tensor", **options)
    for sentence, limit in enumerate(limits):
        expected = tensor2tensor_beam(floats(table[sentence]), limit, kind, beam_size)
        assert_best(actual, sentence, expected[:num_best])
        assert np.all(actual.scores[sentence, len(expected) : num_best] == NEG_INF)


def test_every_beam_end_of_the_config_has_one_rule() -> None:
    names = get_args(get_type_hints(DecodeConfig)["beam_end"])
    assert list(END_RULES) == list(names)
    # The first beam-end rule is the default in both the config and the search.
    assert DecodeConfig().beam_end == names[0]
    assert inspect.signature(beam_search).parameters["beam_end"].default == names[0]


def test_only_the_papers_search_forbids_an_unlikely_end() -> None:
    """At the first step, `EOS` ranks fifth of six tokens, and a beam of size 2 keeps only four.

    All later tokens are equally likely, so every longer translation has a lower log-probability.
    """
    first = jnp.asarray([0.0, 0.0, -0.5, 0.0, 0.0, -5.0])
    table = jnp.zeros((1, LONGEST, 6 ** (LONGEST - 1), 6)).at[:, 0].set(first)
    options: dict[str, Any] = {"beam_size": 2, "kind": ("gnmt", 0.0), "num_best": 1}
    lengths = {
        rule: len(until_eos(np.asarray(best.tokens[0, 0])))
        for rule in ("any", "tensor2tensor")
        for best in [beam(table, jnp.asarray([LONGEST]), beam_end=rule, **options)]
    }
    assert lengths == {"any": 1, "tensor2tensor": 2}


def test_a_wide_beam_finds_better_translations_than_a_narrow_one() -> None:
    """If a wide beam never helped, the other tests could not detect a beam that is too narrow."""
    limits = jnp.full(SENTENCES, LONGEST)
    kind = ("gnmt", 0.6)
    better = 0
    for seed in range(5):
        narrow, wide = (
            beam(random_table(seed, 5), limits, beam_size=size, kind=kind, num_best=1)
            for size in (1, 3)
        )
        better += int(np.sum(wide.scores[:, 0] > narrow.scores[:, 0] + 0.01))
    assert better > 0


@given(seed=SEED, limits=LIMITS)
@examples(20)
def test_a_score_is_the_log_probability_over_the_penalty(seed: int, limits: list[int]) -> None:
    table, kind = random_table(seed, 5), ("gnmt", 0.6)
    actual = beam(table, jnp.asarray(limits), beam_size=3, kind=kind, num_best=3)
    for sentence, hypothesis in np.ndindex(SENTENCES, 3):
        score = float(actual.scores[sentence, hypothesis])
        if score == NEG_INF:
            assert limits[sentence] == 1
            continue
        tokens = until_eos(np.asarray(actual.tokens[sentence, hypothesis]))
        assert len(tokens) <= limits[sentence]
        expected = log_prob(floats(table[sentence]), tokens) / divisor(len(tokens), kind)
        assert score == pytest.approx(expected, rel=1e-4)


def never_ending(seed: int) -> Array:
    """Return logits that make `EOS` very unlikely at every position."""
    return random_table(seed, 5).at[..., EOS].add(-20.0)


@pytest.mark.parametrize("beam_end", ["any", "tensor2tensor"])
def test_translations_end_at_their_limit(beam_end: str) -> None:
    limits, options = jnp.asarray([5, 2, 3]), {"kind": ("power", 2.0), "beam_end": beam_end}
    by_beam = beam(never_ending(0), limits, beam_size=2, num_best=1, **options)
    for translations in (by_beam, greedy(never_ending(0), limits)):
        lengths = [len(until_eos(np.asarray(best[0]))) for best in translations.tokens]
        assert lengths == [5, 2, 3]


def test_a_token_that_never_occurs_does_not_change_the_probabilities_of_others() -> None:
    # The bias makes token 0 so likely that the best translations contain it.
    table, kind = random_table(7, 4).at[..., 0].add(3.0), ("gnmt", 0.0)
    limits = jnp.full(SENTENCES, LONGEST)
    options: dict[str, Any] = {"beam_size": 31, "kind": kind, "num_best": 31}
    actual, likeliest = (
        beam(table, limits, suppress_tokens=(0,), **options),
        greedy(table, limits, (0,)),
    )
    for sentence in range(SENTENCES):
        scores = floats(table[sentence])
        every = all_translations(scores, LONGEST, kind)
        allowed = [x for x in every if 0 not in x[1]]
        assert 0 in every[0][1]
        assert len(allowed) == 31
        assert_best(actual, sentence, allowed)
        tokens = until_eos(np.asarray(likeliest.tokens[sentence, 0]))
        for i, token in enumerate(tokens[: LONGEST - 1]):
            assert token == 1 + np.argmax(log_probs_after(scores, tokens[:i])[1:])
        expected = log_prob(scores, tokens)
        assert float(likeliest.scores[sentence, 0]) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("search", ["beam", "greedy"])
def test_a_sentence_with_limit_zero_has_no_translation_and_changes_no_other(search: str) -> None:
    def run(table: Array, limits: list[int]) -> Translations:
        if search == "greedy":
            return greedy(table, jnp.asarray(limits))
        return beam(table, jnp.asarray(limits), beam_size=2, kind=("gnmt", 0.6), num_best=2)

    table = random_table(3, 5)
    full, actual = run(table, [5, 4, 3]), run(table, [5, 0, 3])
    assert not np.any(actual.tokens[1])
    np.testing.assert_array_equal(actual.scores[1], NEG_INF)
    for sentence in (0, 2):
        np.testing.assert_array_equal(actual.tokens[sentence], full.tokens[sentence])
        np.testing.assert_array_equal(actual.scores[sentence], full.scores[sentence])
    assert not np.any(run(table, [0, 0, 0]).tokens)


@given(seed=SEED, limits=LIMITS)
@examples(15)
def test_a_translation_does_not_depend_on_the_other_sentences(seed: int, limits: list[int]) -> None:
    table = random_table(seed, 5)
    options: dict[str, Any] = {"beam_size": 3, "kind": ("gnmt", 0.6), "num_best": 3}
    together = beam(table, jnp.asarray(limits), **options)
    for sentence in range(SENTENCES):
        one = slice(sentence, sentence + 1)
        alone = beam(table[one], jnp.asarray(limits[one]), **options)
        np.testing.assert_array_equal(alone.tokens[0], together.tokens[sentence])
        np.testing.assert_allclose(alone.scores[0], together.scores[sentence], rtol=1e-6)


def test_length_penalties_equal_their_formulas() -> None:
    lengths = np.arange(1.0, 9.0)
    for alpha in (0.0, 0.6, 1.0):
        gnmt = PENALTIES["gnmt"](jnp.asarray(lengths), alpha)
        np.testing.assert_allclose(gnmt, (5 + lengths) ** alpha / 6**alpha, rtol=1e-5)
        power = PENALTIES["power"](jnp.asarray(lengths), alpha)
        np.testing.assert_allclose(power, lengths**alpha, rtol=1e-5)
    assert set(PENALTIES) == {"gnmt", "power"}


@given(seed=SEED, limits=LIMITS)
@examples(30)
def test_greedy_search_takes_the_likeliest_token_at_each_step(seed: int, limits: list[int]) -> None:
    table = random_table(seed, 5)
    actual = greedy(table, jnp.asarray(limits))
    assert actual.tokens.shape == (SENTENCES, 1, LONGEST)
    for sentence, limit in enumerate(limits):
        tokens: tuple[int, ...] = ()
        while EOS not in tokens:
            likeliest = int(np.argmax(log_probs_after(floats(table[sentence]), tokens)))
            tokens += (EOS if len(tokens) + 1 == limit else likeliest,)
        assert_best(actual, sentence, [(log_prob(floats(table[sentence]), tokens), tokens)])


PREFIXES = [(3, 4), (), (1,)]
"""The tokens with which the translations of each sentence begin."""
FORCED = jnp.asarray([[*x, *[0] * (LONGEST - len(x))] for x in PREFIXES])


@pytest.mark.parametrize(
    ("rule", "oracle"), [("any", exhaustive_beam), ("tensor2tensor", tensor2tensor_beam)]
)
@pytest.mark.parametrize("beam_size", [1, 3])
@given(seed=SEED, extra=LIMITS)
@examples(10)
def test_a_beam_search_with_prefixes_finds_the_best_translations_that_begin_with_them(
    beam_size: int, rule: str, oracle: Any, seed: int, extra: list[int]
) -> None:
    # With a small bias, the token of the prefix is often the least likely one.
    table, kind = random_table(seed, 5).at[:, :2, :, 3:].add(-4.0), ("gnmt", 0.6)
    limits = [min(len(x) + n, LONGEST) for x, n in zip(PREFIXES, extra, strict=True)]
    options: dict[str, Any] = {"beam_size": beam_size, "num_best": beam_size, "beam_end": rule}
    actual = beam(table, jnp.asarray(limits), kind=kind, prefix=FORCED, **options)
    for i, (limit, prefix) in enumerate(zip(limits, PREFIXES, strict=True)):
        expected = oracle(floats(table[i]), limit, kind, beam_size, prefix)[:beam_size]
        assert expected[0][1][: len(prefix)] == prefix
        assert_best(actual, i, expected)
        assert np.all(actual.scores[i, len(expected) :] <= NEG_INF / 2)


@given(seed=SEED, extra=LIMITS)
@examples(10)
def test_a_greedy_search_with_prefixes_continues_them(seed: int, extra: list[int]) -> None:
    table = random_table(seed, 5)
    limits = [min(len(x) + n, LONGEST) for x, n in zip(PREFIXES, extra, strict=True)]
    actual = greedy(table, jnp.asarray(limits), prefix=FORCED)
    for i, (limit, tokens) in enumerate(zip(limits, PREFIXES, strict=True)):
        while EOS not in tokens:
            likeliest = int(np.argmax(log_probs_after(floats(table[i]), tokens)))
            tokens += (EOS if len(tokens) + 1 == limit else likeliest,)
        assert_best(actual, i, [(log_prob(floats(table[i]), tokens), tokens)])


RECORDED: list[int] = []
"""The positions at which a search has called `recording_step`."""


def recording_step(newest: Array, position: Array, *past: Any) -> tuple[Array, State]:
    jax.debug.callback(lambda p: RECORDED.append(int(p)), position)
    return step(newest, position, *past)


@functools.partial(jax.jit, static_argnames=("beam_size", "num_best"))
def recorded(table: Array, limits: Array, *, beam_size: int, num_best: int) -> Translations:
    state = State(jnp.zeros((len(table), beam_size, LONGEST), jnp.int32), table)
    options = {"max_length": LONGEST, "start": BOS, "eos": EOS}
    if beam_size == 1:
        return greedy_search(recording_step, state, limits, **options)
    return beam_search(
        recording_step, state, limits, beam_size=beam_size, num_best=num_best, **options
    )


def positions(
    table: Array, limits: list[int], *, beam_size: int = 3, num_best: int = 1
) -> list[int]:
    """Return the positions at which a search calls its step function."""
    RECORDED.clear()
    jax.block_until_ready(
        recorded(table, jnp.asarray(limits), beam_size=beam_size, num_best=num_best)
    )
    jax.effects_barrier()
    return sorted(RECORDED)


def ending_at(*lengths: int) -> Array:
    """Return logits that almost certainly produce translations of the given lengths."""
    position = jnp.arange(LONGEST)[None, :, None]
    is_end = position >= jnp.asarray(lengths)[:, None, None] - 1
    table = random_table(0, 5, sentences=len(lengths))
    return table.at[..., EOS].add(jnp.where(is_end, 30.0, -30.0))


@pytest.mark.parametrize("beam_size", [1, 3])
def test_a_search_stops_when_no_result_can_improve(beam_size: int) -> None:
    assert positions(ending_at(2, 3), [5, 5], beam_size=beam_size) == [0, 1, 2]
    assert positions(ending_at(2, 5), [5, 3], beam_size=beam_size) == [0, 1, 2]
    assert positions(ending_at(2, 5), [5, 5], beam_size=beam_size) == [0, 1, 2, 3, 4]
    # If every limit is zero, the search does not take a single step.
    assert positions(ending_at(2, 5), [0, 0], beam_size=beam_size) == []


def test_a_search_for_several_results_continues_until_it_has_them() -> None:
    # The first step finishes one translation, and the second step finishes three more.
    assert positions(ending_at(1, 1), [5, 5], num_best=1) == [0]
    assert positions(ending_at(1, 1), [5, 5], num_best=3) == [0, 1]
