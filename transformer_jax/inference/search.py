"""Greedy and beam search over any step function (section 6.1).

A step function reads the latest token of each hypothesis and returns the logits of the next one.
The search space is all sequences of at most `limit` tokens that end in `eos`: at the last position,
only `eos` is allowed.

Shapes: B sentences, J hypotheses (the beam), N tokens in the vocabulary, L tokens in the longest
translation.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

State = Any
"""Data that a step function keeps between positions, such as keys and values: a tree of arrays."""

Step = Callable[
    [Int[Array, "B J"], Int[Array, ""], Int[Array, "B J L"], State],
    tuple[Float[Array, "B J N"], State],
]
"""Maps (latest tokens, their position, ancestors, state) to (logits of the next tokens, state).

ancestors[b, j, l] is the beam slot that read token l of the hypothesis now in slot j.
"""

# This value is lower than any log-probability. It is finite because zero times infinity is NaN.
NEG_INF = -1.0e9


def gnmt(length: Float[Array, "..."], alpha: float) -> Float[Array, "..."]:
    """Return ((5 + length) / 6)^alpha, the length penalty of Wu et al. (2016), equation 14."""
    return ((5.0 + length) / 6.0) ** alpha


def power(length: Float[Array, "..."], alpha: float) -> Float[Array, "..."]:
    """Return length^alpha. Differs from the paper, which uses `gnmt`."""
    return length**alpha


PENALTIES = {"gnmt": gnmt, "power": power}


class Translations(NamedTuple):
    """The best hypotheses of each sentence, best first."""

    tokens: Int[Array, "B J L"]
    """Tokens up to and including `eos`, followed by zeros."""
    scores: Float[Array, "B J"]
    """Log-probability divided by the length penalty; `NEG_INF` for a slot without a hypothesis."""


class _Search(NamedTuple):
    step: Step
    limit: Int[Array, " B"]
    eos: int
    penalty: Callable[[Float[Array, "..."]], Float[Array, "..."]]
    num_best: int
    beam_end: str


class _Beam(NamedTuple):
    position: Int[Array, ""]
    newest: Int[Array, "B J"]
    live: Int[Array, "B J L"]
    ancestors: Int[Array, "B J L"]
    log_probs: Float[Array, "B J"]
    finished: Int[Array, "B J L"]
    scores: Float[Array, "B J"]
    is_done: Bool[Array, " B"]
    state: State


class _Greedy(NamedTuple):
    position: Int[Array, ""]
    newest: Int[Array, " B"]
    tokens: Int[Array, "B L"]
    log_probs: Float[Array, " B"]
    is_done: Bool[Array, " B"]
    state: State


def beam_search(
    step: Step,
    state: State,
    limit: Int[Array, " B"],
    *,
    beam_size: int,
    max_length: int,
    bos: int,
    eos: int,
    alpha: float = 0.6,
    length_penalty: str = "gnmt",
    beam_end: str = "tensor2tensor",
    num_best: int = 1,
) -> Translations:
    """Keep the `beam_size` likeliest prefixes at each step, and the best finished hypotheses.

    `limit` is the maximum length of each translation, including `eos`, and at most `max_length`.
    `alpha` is at least 0, and `length_penalty` is a name in `PENALTIES`.

    `beam_end` decides which live hypotheses can finish at each step. "tensor2tensor" is the rule of
    the authors' code: a hypothesis can finish if its end is one of the sentence's 2 J likeliest
    continuations, or if none has finished at the limit. "any" differs from the paper: all can.

    A sentence is done when no live hypothesis can still become one of its `num_best` results.
    Log-probabilities never increase, and the penalty that divides them is largest at `limit`, so
    log_prob / penalty(limit) bounds every score that a live hypothesis can reach. Finished
    hypotheses have separate slots and never displace live ones.
    """
    penalty = functools.partial(PENALTIES[length_penalty], alpha=alpha)
    search = _Search(step, limit, eos, penalty, num_best, beam_end)
    shape = (len(limit), beam_size)
    empty = jnp.zeros((*shape, max_length), jnp.int32)
    # All hypotheses start out equal, so only the first one is live.
    first = jnp.where(jnp.arange(beam_size) == 0, 0.0, NEG_INF)
    beam = _Beam(
        position=jnp.zeros((), jnp.int32),
        newest=jnp.full(shape, bos, jnp.int32),
        live=empty,
        ancestors=empty,
        log_probs=jnp.broadcast_to(first, shape),
        finished=empty,
        scores=jnp.full(shape, NEG_INF),
        is_done=limit <= 0,
        state=state,
    )
    last = jax.lax.while_loop(lambda b: ~jnp.all(b.is_done), lambda b: _extend(search, b), beam)
    return Translations(last.finished, last.scores)


def _extend(search: _Search, beam: _Beam) -> _Beam:
    """Finish the hypotheses that may end, and extend the likeliest hypotheses by one token."""
    sentences, beam_size = beam.newest.shape
    is_last = (beam.position + 1 >= search.limit)[:, None]
    ancestors = beam.ancestors.at[:, :, beam.position].set(jnp.arange(beam_size))
    logits, state = search.step(beam.newest, beam.position, ancestors, beam.state)
    logits = logits.astype(jnp.float32)
    # Normalize only the selected logits, not the whole vocabulary.
    offset = beam.log_probs - jax.nn.logsumexp(logits, axis=-1)
    length = (beam.position + 1).astype(jnp.float32)

    # The best candidates of a sentence are among the best of each hypothesis.
    num_candidates = 2 * beam_size if search.beam_end == "tensor2tensor" else beam_size
    allowed = jnp.where(jnp.arange(logits.shape[-1]) == search.eos, NEG_INF, logits)
    candidates, tokens = jax.lax.top_k(allowed, min(num_candidates, logits.shape[-1]))
    candidates = jnp.maximum(offset[..., None] + candidates, NEG_INF).reshape(sentences, -1)

    ending = offset + logits[..., search.eos]
    may_end = beam.log_probs > NEG_INF / 2
    if search.beam_end == "tensor2tensor":
        continuations = jnp.concatenate([ending, candidates], axis=1)
        threshold = jax.lax.top_k(continuations, num_candidates)[0][:, -1:]
        is_likely = may_end & (ending >= threshold)
        has_none = beam.scores[:, :1] <= NEG_INF / 2
        has_none &= ~jnp.any(is_likely, axis=1, keepdims=True)
        may_end = is_likely | (may_end & is_last & has_none)
    ending = jnp.where(may_end, ending / search.penalty(length), NEG_INF)
    ending_tokens = beam.live.at[:, :, beam.position].set(search.eos)
    scores, best = jax.lax.top_k(jnp.concatenate([beam.scores, ending], axis=1), beam_size)
    finished = _select(jnp.concatenate([beam.finished, ending_tokens], axis=1), best)

    # Except at the last position, every live hypothesis may also continue.
    log_probs, best = jax.lax.top_k(jnp.where(is_last, NEG_INF, candidates), beam_size)
    parent = best // tokens.shape[-1]
    newest = jnp.take_along_axis(tokens.reshape(sentences, -1), best, axis=1)

    # Once a sentence is done, its results no longer change.
    is_done = beam.is_done[:, None]
    scores = jnp.where(is_done, beam.scores, scores)
    finished = jnp.where(is_done[..., None], beam.finished, finished)
    max_penalty = search.penalty(search.limit.astype(jnp.float32))
    can_improve = log_probs[:, 0] / max_penalty > scores[:, search.num_best - 1]
    can_improve &= beam.position + 1 < search.limit
    return _Beam(
        position=beam.position + 1,
        newest=newest,
        live=_select(beam.live, parent).at[:, :, beam.position].set(newest),
        ancestors=_select(ancestors, parent),
        log_probs=log_probs,
        finished=finished,
        scores=scores,
        is_done=beam.is_done | ~can_improve,
        state=state,
    )


def greedy_search(
    step: Step, state: State, limit: Int[Array, " B"], *, max_length: int, bos: int, eos: int
) -> Translations:
    """Take the likeliest token at each step until it is `eos`; the score is the log-probability."""

    def extend(greedy: _Greedy) -> _Greedy:
        logits, state = step(greedy.newest[:, None], greedy.position, ancestors, greedy.state)
        logits = logits[:, 0].astype(jnp.float32)
        is_last = greedy.position + 1 >= limit
        newest = jnp.where(is_last, eos, jax.lax.top_k(logits, 1)[1][:, 0])
        log_prob = jnp.take_along_axis(logits, newest[:, None], axis=-1)[:, 0]
        log_prob -= jax.nn.logsumexp(logits, axis=-1)
        is_done = greedy.is_done
        return _Greedy(
            position=greedy.position + 1,
            newest=newest,
            tokens=greedy.tokens.at[:, greedy.position].set(jnp.where(is_done, 0, newest)),
            log_probs=jnp.where(is_done, greedy.log_probs, greedy.log_probs + log_prob),
            is_done=is_done | (newest == eos),
            state=state,
        )

    sentences = len(limit)
    ancestors = jnp.zeros((sentences, 1, max_length), jnp.int32)
    greedy = _Greedy(
        position=jnp.zeros((), jnp.int32),
        newest=jnp.full(sentences, bos, jnp.int32),
        tokens=jnp.zeros((sentences, max_length), jnp.int32),
        log_probs=jnp.where(limit > 0, 0.0, NEG_INF),
        is_done=limit <= 0,
        state=state,
    )
    last = jax.lax.while_loop(lambda g: ~jnp.all(g.is_done), extend, greedy)
    return Translations(last.tokens[:, None], last.log_probs[:, None])


def _select(x: Array, index: Int[Array, "B J"]) -> Array:
    """Select entries of axis 1, separately for each sentence."""
    return jnp.take_along_axis(x, index.reshape(*index.shape, *[1] * (x.ndim - 2)), axis=1)
