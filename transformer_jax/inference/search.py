"""Greedy and beam search over any step function (section 6.1).

Nothing here knows a model: a step reads the newest piece of each hypothesis and gives the
logits of the next. The hypotheses that are searched are all sequences of at most `limit`
pieces that end in `eos`: in the last place only `eos` is allowed.

Shapes: B sentences, J hypotheses (the beam), N vocabulary, L longest translation, M candidates of
a hypothesis.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Step = Callable[
    [Int[Array, "B J"], Int[Array, ""], Int[Array, "B J L"], Any], tuple[Float[Array, "B J N"], Any]
]
"""(newest pieces, their position, ancestors, state) -> (logits of the next pieces, state).

What a step keeps of a piece stays in the row that read it, though hypotheses take one another's
rows: ancestors[b, j, l] is the row that read piece l of what is hypothesis j now.
"""

Penalty = Callable[[Float[Array, "..."], float], Float[Array, "..."]]

# Finite, so that zero times it is no NaN; lower than any log-probability.
NEG_INF = -1.0e9


def gnmt(length: Float[Array, "..."], alpha: float) -> Float[Array, "..."]:
    """Return ((5 + length) / 6)^alpha, the length penalty of Wu et al. (2016), equation 14."""
    return ((5.0 + length) / 6.0) ** alpha


def power(length: Float[Array, "..."], alpha: float) -> Float[Array, "..."]:
    """Return length^alpha; with alpha 1 a score is the mean log-probability of a piece.

    Differs from the paper, which uses `gnmt`.
    """
    return length**alpha


PENALTIES: dict[str, Penalty] = {"gnmt": gnmt, "power": power}


class Translations(NamedTuple):
    """The best hypotheses of each sentence, best first."""

    tokens: Int[Array, "B J L"]
    """With their `eos`; 0 after it."""
    scores: Float[Array, "B J"]
    """Log-probability over length penalty; `NEVER` where there are not so many hypotheses."""


class _Beam(NamedTuple):
    """The loop's state: hypotheses that go on, and those that have ended."""

    position: Int[Array, ""]
    newest: Int[Array, "B J"]
    live: Int[Array, "B J L"]
    ancestors: Int[Array, "B J L"]
    log_probs: Float[Array, "B J"]
    finished: Int[Array, "B J L"]
    scores: Float[Array, "B J"]
    is_done: Bool[Array, " B"]
    state: Any


class _Greedy(NamedTuple):
    """The loop's state of greedy search."""

    position: Int[Array, ""]
    newest: Int[Array, " B"]
    tokens: Int[Array, "B L"]
    log_probs: Float[Array, " B"]
    is_done: Bool[Array, " B"]
    state: Any


def beam_search(
    step: Step,
    state: Any,
    limit: Int[Array, " B"],
    *,
    beam_size: int,
    max_length: int,
    bos: int,
    eos: int,
    alpha: float = 0.6,
    length_penalty: str = "gnmt",
    num_best: int = 1,
) -> Translations:
    """Keep the `beam_size` likeliest beginnings in each step, and the best ends met so far.

    A sentence is done when nothing that goes on can still enter its `num_best`: probabilities
    only fall, and the penalty that divides a (negative) log-probability is largest at `limit`,
    so log_prob / penalty(limit) is a bound on every score that a hypothesis may come to. Ends
    are kept apart from what goes on and never crowd it out.

    Args:
        step: see `Step`.
        state: the first step's.
        limit: pieces that each translation may have, its end included; at most `max_length`.
        beam_size: hypotheses kept, J.
        max_length: room for pieces, L, the same for all sentences.
        bos: the piece that the first step reads.
        eos: the piece that ends a translation.
        alpha: strength of the length penalty, at least 0.
        length_penalty: a name in `PENALTIES`.
        num_best: how many of the translations must be the best ones, up to `beam_size`.
    """
    penalty = PENALTIES[length_penalty]
    shape = (len(limit), beam_size)
    rows = jnp.arange(beam_size)
    bound = penalty(limit.astype(jnp.float32), alpha)

    def body(beam: _Beam) -> _Beam:
        ancestors = beam.ancestors.at[:, :, beam.position].set(rows)
        logits, state = step(beam.newest, beam.position, ancestors, beam.state)
        logits = logits.astype(jnp.float32)
        # Of a whole vocabulary only what is picked is ever made a log-probability.
        before = beam.log_probs - jax.nn.logsumexp(logits, axis=-1)
        length = (beam.position + 1).astype(jnp.float32)

        # Every hypothesis may end here.
        ending = (before + logits[..., eos]) / penalty(length, alpha)
        ending = jnp.where(beam.log_probs > NEG_INF / 2, ending, NEG_INF)
        ending_pieces = beam.live.at[:, :, beam.position].set(eos)
        scores, best = jax.lax.top_k(jnp.concatenate([beam.scores, ending], axis=1), beam_size)
        ended = _select(jnp.concatenate([beam.finished, ending_pieces], axis=1), best)

        # And, but for the last place, go on.
        is_last = (beam.position + 1 >= limit)[:, None]
        candidates, pieces = top_k_without_eos(logits, beam_size, but=eos)
        candidates = jnp.maximum(before[..., None] + candidates, NEG_INF).reshape(shape[0], -1)
        log_probs, best = jax.lax.top_k(jnp.where(is_last, NEG_INF, candidates), beam_size)
        parent = best // pieces.shape[-1]
        newest = jnp.take_along_axis(pieces.reshape(shape[0], -1), best, axis=1)
        going = _select(beam.live, parent).at[:, :, beam.position].set(newest)

        # A sentence that is done keeps what it has.
        kept = beam.is_done[:, None]
        scores = jnp.where(kept, beam.scores, scores)
        ended = jnp.where(kept[..., None], beam.finished, ended)
        can_improve = log_probs[:, 0] / bound > scores[:, num_best - 1]
        can_improve &= beam.position + 1 < limit
        return _Beam(
            position=beam.position + 1,
            newest=newest,
            live=going,
            ancestors=_select(ancestors, parent),
            log_probs=log_probs,
            finished=ended,
            scores=scores,
            is_done=beam.is_done | ~can_improve,
            state=state,
        )

    empty = jnp.zeros((*shape, max_length), jnp.int32)
    # At first all hypotheses are the same: only one of them goes on.
    first = jnp.where(rows == 0, 0.0, NEG_INF)
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
    last = jax.lax.while_loop(lambda b: ~jnp.all(b.is_done), body, beam)
    return Translations(last.finished, last.scores)


def greedy_search(
    step: Step, state: Any, limit: Int[Array, " B"], *, max_length: int, bos: int, eos: int
) -> Translations:
    """Take the likeliest piece in each step, until it is `eos`; the score is its log-probability.

    Arguments and result are as for `beam_search`, with J = 1.
    """

    def body(greedy: _Greedy) -> _Greedy:
        logits, state = step(greedy.newest[:, None], greedy.position, ancestors, greedy.state)
        logits = logits[:, 0].astype(jnp.float32)
        is_last = greedy.position + 1 >= limit
        newest = jnp.where(is_last, eos, jax.lax.top_k(logits, 1)[1][:, 0])
        gained = jnp.take_along_axis(logits, newest[:, None], axis=-1)[:, 0]
        gained -= jax.nn.logsumexp(logits, axis=-1)
        kept = greedy.is_done
        return _Greedy(
            position=greedy.position + 1,
            newest=newest,
            tokens=greedy.tokens.at[:, greedy.position].set(jnp.where(kept, 0, newest)),
            log_probs=jnp.where(kept, greedy.log_probs, greedy.log_probs + gained),
            is_done=kept | (newest == eos),
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
    last = jax.lax.while_loop(lambda g: ~jnp.all(g.is_done), body, greedy)
    return Translations(last.tokens[:, None], last.log_probs[:, None])


def _select(x: Array, index: Int[Array, "B J"]) -> Array:
    """Pick rows of axis 1, for each sentence its own."""
    return jnp.take_along_axis(x, index.reshape(*index.shape, *[1] * (x.ndim - 2)), axis=1)


def top_k_without_eos(
    logits: Float[Array, "B J N"], count: int, *, but: int
) -> tuple[Float[Array, "B J M"], Int[Array, "B J M"]]:
    """Return the highest logits of each hypothesis and their pieces, one piece left out.

    Among the `count` best of all hypotheses no one has more than its own `count` best.
    """
    allowed = jnp.where(jnp.arange(logits.shape[-1]) == but, NEG_INF, logits)
    values, pieces = jax.lax.top_k(allowed, min(count, logits.shape[-1]))
    return values, pieces
