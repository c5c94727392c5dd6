"""Search against enumeration of all sequences, and against plain Python.

The step functions here look their logits up by all that a hypothesis has read so far, so a
hypothesis that gets the cache of another is noticed at once.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import Array
from numpy.typing import NDArray
from oracles import Floats, examples, floats, softmax

from transformer_jax.inference.search import (
    NEG_INF,
    PENALTIES,
    Translations,
    beam_search,
    greedy_search,
)

BOS, EOS = 1, 2
LONGEST = 5
SENTENCES = 3
SEED = st.integers(0, 100_000)
LIMITS = st.lists(st.integers(1, LONGEST), min_size=SENTENCES, max_size=SENTENCES)
# Name and alpha of length penalties: none, the paper's, the mean, and one that loves length.
KINDS = [("gnmt", 0.0), ("gnmt", 0.6), ("power", 1.0), ("power", 2.0)]

Scored = tuple[float, tuple[int, ...]]


class State(NamedTuple):
    """What a step needs: what each hypothesis has read, and its sentence's own table."""

    cache: Array
    """Pieces read, [B, J, L]."""
    table: Array
    """Logits for each position and each number of earlier pieces, [B, L, N^(L-1), N]."""


def random_table(seed: int, vocabulary: int, *, sentences: int = SENTENCES) -> Array:
    """Return the logits of a language in which each history has a next piece of its own."""
    shape = (sentences, LONGEST, vocabulary ** (LONGEST - 1), vocabulary)
    drawn = 2 * np.random.default_rng(seed).standard_normal(shape, np.float32)
    return jnp.asarray(drawn)


def step(newest: Array, position: Array, ancestors: Array, state: State) -> tuple[Array, State]:
    """Look up the logits after all pieces of each hypothesis."""
    vocabulary = state.table.shape[-1]
    cache = state.cache.at[:, :, position].set(newest)
    read = jnp.take_along_axis(cache, ancestors, axis=1)
    number = jnp.zeros(newest.shape, jnp.int32)
    # The first piece is always the beginning of the sentence.
    for place in range(1, LONGEST):
        number = jnp.where(place <= position, number * vocabulary + read[..., place], number)
    sentence = jnp.arange(len(newest))[:, None]
    logits = state.table[sentence, position, number]
    return logits, state._replace(cache=cache)


@functools.partial(jax.jit, static_argnames=("beam_size", "kind", "num_best"))
def beam(
    table: Array, limits: Array, *, beam_size: int, kind: tuple[str, float], num_best: int
) -> Translations:
    return beam_search(
        step,
        State(jnp.zeros((len(table), beam_size, LONGEST), jnp.int32), table),
        limits,
        beam_size=beam_size,
        max_length=LONGEST,
        bos=BOS,
        eos=EOS,
        length_penalty=kind[0],
        alpha=kind[1],
        num_best=num_best,
    )


@jax.jit
def greedy(table: Array, limits: Array) -> Translations:
    state = State(jnp.zeros((len(table), 1, LONGEST), jnp.int32), table)
    return greedy_search(step, state, limits, max_length=LONGEST, bos=BOS, eos=EOS)


# The same in plain Python


def log_probs_after(table: Floats, pieces: tuple[int, ...]) -> Floats:
    """Return the log-probability of each next piece; the table is one sentence's."""
    number = 0
    for piece in pieces:
        number = number * table.shape[-1] + piece
    return np.log(softmax(table[len(pieces), number]))


def log_prob(table: Floats, pieces: tuple[int, ...]) -> float:
    return sum(float(log_probs_after(table, pieces[:i])[p]) for i, p in enumerate(pieces))


def divisor(length: int, kind: tuple[str, float]) -> float:
    name, alpha = kind
    return float({"gnmt": (5 + length) / 6, "power": length}[name] ** alpha)


def all_translations(table: Floats, limit: int, kind: tuple[str, float]) -> list[Scored]:
    """Return score and pieces of all sequences that end within the limit, best first."""
    others = [piece for piece in range(table.shape[-1]) if piece != EOS]
    found: list[Scored] = []
    for length in range(1, limit + 1):
        for start in itertools.product(others, repeat=length - 1):
            pieces = (*start, EOS)
            found.append((log_prob(table, pieces) / divisor(length, kind), pieces))
    return sorted(found, reverse=True)


def beam_that_never_stops_early(
    table: Floats, limit: int, kind: tuple[str, float], beam_size: int
) -> list[Scored]:
    """Return all ends that the beam meets up to the limit, best first."""
    going: list[Scored] = [(0.0, ())]
    found: list[Scored] = []
    for length in range(1, limit + 1):
        longer: list[Scored] = [
            (so_far + float(gained), (*pieces, piece))
            for so_far, pieces in going
            for piece, gained in enumerate(log_probs_after(table, pieces))
        ]
        found += [(p / divisor(length, kind), pieces) for p, pieces in longer if pieces[-1] == EOS]
        going = sorted((x for x in longer if x[1][-1] != EOS), reverse=True)[:beam_size]
    return sorted(found, reverse=True)


def pieces_of(row: NDArray[Any]) -> tuple[int, ...]:
    """Return the pieces up to the end of the sentence; after it there are only zeros."""
    length = row.tolist().index(EOS) + 1
    assert not row[length:].any()
    return tuple(row[:length].tolist())


def assert_found(actual: Translations, sentence: int, expected: list[Scored]) -> None:
    """The first hypotheses of the sentence must be these ones."""
    for j, (score, pieces) in enumerate(expected):
        assert pieces_of(np.asarray(actual.tokens[sentence, j])) == pieces
        assert float(actual.scores[sentence, j]) == pytest.approx(score, rel=1e-4, abs=1e-4)


# Beam search


@pytest.mark.parametrize("kind", KINDS)
@given(seed=SEED, limits=LIMITS)
@examples(12)
def test_a_beam_that_holds_everything_finds_all_sequences_best_first(
    kind: tuple[str, float], seed: int, limits: list[int]
) -> None:
    # With 3 pieces there are 1 + 2 + 4 + 8 + 16 sequences of at most 5.
    table, size = random_table(seed, 3), 31
    actual = beam(table, jnp.asarray(limits), beam_size=size, kind=kind, num_best=size)
    for sentence, limit in enumerate(limits):
        expected = all_translations(floats(table[sentence]), limit, kind)
        assert len(expected) == 2**limit - 1
        assert_found(actual, sentence, expected)
        assert np.all(actual.scores[sentence, len(expected) :] == NEG_INF)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("beam_size", "num_best"), [(1, 1), (2, 2), (3, 1), (3, 2)])
@given(seed=SEED, limits=LIMITS)
@examples(12)
def test_stopping_early_misses_nothing(
    beam_size: int, num_best: int, kind: tuple[str, float], seed: int, limits: list[int]
) -> None:
    table = random_table(seed, 5)
    actual = beam(table, jnp.asarray(limits), beam_size=beam_size, kind=kind, num_best=num_best)
    for sentence, limit in enumerate(limits):
        met = beam_that_never_stops_early(floats(table[sentence]), limit, kind, beam_size)
        assert_found(actual, sentence, met[:num_best])


def test_a_narrow_beam_misses_what_a_wide_one_finds() -> None:
    """So the tests above compare beams that do differ."""
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
        pieces = pieces_of(np.asarray(actual.pieces[sentence, hypothesis]))
        assert len(pieces) <= limits[sentence]
        expected = log_prob(floats(table[sentence]), pieces) / divisor(len(pieces), kind)
        assert score == pytest.approx(expected, rel=1e-4)


def never_ending(seed: int) -> Array:
    """Return a language whose sentences would go on for ever."""
    return random_table(seed, 5).at[..., EOS].add(-20.0)


def test_sentences_are_ended_at_their_limit() -> None:
    limits = jnp.asarray([5, 2, 3])
    found = beam(never_ending(0), limits, beam_size=3, kind=("power", 2.0), num_best=1)
    for translations in (found, greedy(never_ending(0), limits)):
        lengths = [len(pieces_of(np.asarray(row[0]))) for row in translations.pieces]
        assert lengths == [5, 2, 3]


@pytest.mark.parametrize("search", ["beam", "greedy"])
def test_a_sentence_with_limit_zero_has_no_translation_and_does_no_harm(search: str) -> None:
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
def test_a_sentence_is_translated_the_same_in_any_company(seed: int, limits: list[int]) -> None:
    table = random_table(seed, 5)
    options: dict[str, Any] = {"beam_size": 3, "kind": ("gnmt", 0.6), "num_best": 3}
    together = beam(table, jnp.asarray(limits), **options)
    for sentence in range(SENTENCES):
        one = slice(sentence, sentence + 1)
        alone = beam(table[one], jnp.asarray(limits[one]), **options)
        np.testing.assert_array_equal(alone.pieces[0], together.pieces[sentence])
        np.testing.assert_allclose(alone.scores[0], together.scores[sentence], rtol=1e-6)


def test_penalties_are_their_formulas() -> None:
    lengths = np.arange(1.0, 9.0)
    for alpha in (0.0, 0.6, 1.0):
        gnmt = PENALTIES["gnmt"](jnp.asarray(lengths), alpha)
        np.testing.assert_allclose(gnmt, (5 + lengths) ** alpha / 6**alpha, rtol=1e-5)
        power = PENALTIES["power"](jnp.asarray(lengths), alpha)
        np.testing.assert_allclose(power, lengths**alpha, rtol=1e-5)
    assert set(PENALTIES) == {"gnmt", "power"}


# Greedy search


@given(seed=SEED, limits=LIMITS)
@examples(30)
def test_greedy_search_takes_the_likeliest_piece_each_time(seed: int, limits: list[int]) -> None:
    table = random_table(seed, 5)
    actual = greedy(table, jnp.asarray(limits))
    assert actual.pieces.shape == (SENTENCES, 1, LONGEST)
    for sentence, limit in enumerate(limits):
        pieces: tuple[int, ...] = ()
        while EOS not in pieces:
            likeliest = int(np.argmax(log_probs_after(floats(table[sentence]), pieces)))
            pieces += (EOS if len(pieces) + 1 == limit else likeliest,)
        assert_found(actual, sentence, [(log_prob(floats(table[sentence]), pieces), pieces)])


# Early termination


def steps_of(
    search: Callable[..., Translations], table: Array, limits: list[int], **options: Any
) -> list[int]:
    """Return the positions at which the search asked for logits."""
    asked: list[int] = []

    def counted(newest: Array, position: Array, *past: Any) -> tuple[Array, State]:
        jax.debug.callback(lambda p: asked.append(int(p)), position)
        return step(newest, position, *past)

    room = (len(table), options.get("beam_size", 1), LONGEST)
    state = State(jnp.zeros(room, jnp.int32), table)
    found = search(
        counted, state, jnp.asarray(limits), max_length=LONGEST, bos=BOS, eos=EOS, **options
    )
    jax.block_until_ready(found)
    jax.effects_barrier()
    return sorted(asked)


def ending_at(*lengths: int) -> Array:
    """Return sentences that almost surely end after so many pieces."""
    place = jnp.arange(LONGEST)[None, :, None]
    ends = place >= jnp.asarray(lengths)[:, None, None] - 1
    table = random_table(0, 5, sentences=len(lengths))
    return table.at[..., EOS].add(jnp.where(ends, 30.0, -30.0))


def test_greedy_search_stops_when_all_sentences_have_ended() -> None:
    assert steps_of(greedy_search, ending_at(2, 3), [5, 5]) == [0, 1, 2]
    assert steps_of(greedy_search, ending_at(2, 5), [5, 3]) == [0, 1, 2]
    assert steps_of(greedy_search, ending_at(2, 5), [5, 5]) == [0, 1, 2, 3, 4]


def test_beam_search_stops_when_nothing_can_become_better() -> None:
    def steps(table: Array, limits: list[int], num_best: int = 1) -> list[int]:
        return steps_of(beam_search, table, limits, beam_size=3, alpha=0.6, num_best=num_best)

    assert steps(ending_at(2, 3), [5, 5]) == [0, 1, 2]
    assert steps(ending_at(2, 5), [5, 3]) == [0, 1, 2]
    assert steps(ending_at(2, 5), [5, 5]) == [0, 1, 2, 3, 4]
    # The first step gives one translation, the second three more.
    assert steps(ending_at(1, 1), [5, 5], num_best=1) == [0]
    assert steps(ending_at(1, 1), [5, 5], num_best=3) == [0, 1]


def test_no_sentence_means_no_step() -> None:
    assert steps_of(greedy_search, random_table(0, 5), [0, 0, 0]) == []
    assert steps_of(beam_search, random_table(0, 5), [0, 0, 0], beam_size=2) == []
