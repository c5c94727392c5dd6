"""Beam search (section 6.1) and greedy search with any step function.

A prefix contains the tokens with which a sentence's translations must begin, followed by zeros.

A step function reads the latest token of each hypothesis and returns the logits for the next token.
The search space consists of all sequences of at most `limit` tokens that end in `eos`. At the last
position, only `eos` is allowed.

Shapes: B sentences, J hypotheses (the beam), N tokens in the vocabulary, L maximum translation
length, C candidates (J times min(2 J, N)).
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Int, PyTree

State = PyTree
"""Data that a step function carries from one position to the next, such as keys and values."""

Step = Callable[
    [Int[Array, "B J"], Int[Array, ""], Int[Array, "B J L"], State],
    tuple[Float[Array, "B J N"], State],
]
"""A function from (latest tokens, position, ancestors, state) to (next tokens' logits, state).

When hypotheses change slots, the search does not reorder the state. Instead, `ancestors` records
where the step function stored its results for each token. The hypothesis that is now in beam slot j
was in slot ancestors[b, j, l] when the step function read its token l.
"""

# The log-probability and the score of an empty slot, which are lower than those of any hypothesis.
# This value is finite, so that sums and differences are not NaN. Adding a number changes the value
# slightly, so compare with NEG_INF / 2 to find out whether a slot is empty.
NEG_INF = -1.0e9
# Limits on the number of elements in a block of `first_argmax`.
MIN_BLOCK, MAX_BLOCK = 8, 256


def gnmt(length: Float[Array, "..."], alpha: ArrayLike) -> Float[Array, "..."]:
    """Return ((5 + length) / 6)^alpha, the length penalty of Wu et al. (2016), equation 14."""
    return ((5.0 + length) / 6.0) ** alpha


def power(length: Float[Array, "..."], alpha: ArrayLike) -> Float[Array, "..."]:
    """Return length^alpha. Differs from the paper, which uses `gnmt`."""
    return length**alpha


PENALTIES = {"gnmt": gnmt, "power": power}


class Translations(NamedTuple):
    """The finished hypotheses of each sentence, best first.

    The search ends when the first `num_best` hypotheses cannot improve. Later hypotheses could
    still improve.
    """

    tokens: Int[Array, "B J L"]
    """Tokens up to and including `eos`, followed by zeros."""
    scores: Float[Array, "B J"]
    """The log-probability in nats, divided by the length penalty; `NEG_INF` for an empty slot."""


class _Beam(NamedTuple):
    """The hypotheses after `position` tokens: J live and J finished ones, best first."""

    position: Int[Array, ""]
    last_tokens: Int[Array, "B J"]
    live_tokens: Int[Array, "B J L"]
    ancestors: Int[Array, "B J L"]
    live_log_probs: Float[Array, "B J"]
    finished_tokens: Int[Array, "B J L"]
    finished_scores: Float[Array, "B J"]
    is_done: Bool[Array, " B"]
    state: State


EndRule = Callable[
    [_Beam, Float[Array, "B J"], Float[Array, "B C"], Bool[Array, "B 1"]], Bool[Array, "B J"]
]
"""A function that decides which live hypotheses can finish at a step.

The arguments are the beam, the log-probability of each hypothesis followed by `eos`, the
log-probabilities of the likeliest other continuations, and whether each sentence has reached its
limit.
"""


def end_if_likely(
    beam: _Beam,
    ending: Float[Array, "B J"],
    candidates: Float[Array, "B C"],
    is_last: Bool[Array, "B 1"],
) -> Bool[Array, "B J"]:
    """Let a hypothesis finish if its `eos` is among the sentence's 2 J likeliest continuations.

    If a sentence would otherwise have no finished hypothesis at the limit, all of its live
    hypotheses can finish there.
    """
    is_live = beam.live_log_probs > NEG_INF / 2
    continuations = jnp.concatenate([ending, candidates], axis=1)
    kept, _ = jax.lax.top_k(continuations, 2 * ending.shape[1])
    is_likely = is_live & (ending >= kept[:, -1:])
    has_none = beam.finished_scores[:, :1] <= NEG_INF / 2
    has_none &= ~jnp.any(is_likely, axis=1, keepdims=True)
    return is_likely | (is_live & is_last & has_none)


def end_any(beam: _Beam, *_: object) -> Bool[Array, "B J"]:
    """Let every live hypothesis finish. Differs from the authors' code."""
    return beam.live_log_probs > NEG_INF / 2


# The paper does not say which hypotheses can finish (section 6.1). The authors' code uses the rule
# `tensor2tensor`, except that it returns unfinished hypotheses if no hypothesis of a sentence has
# finished.
END_RULES: dict[str, EndRule] = {"tensor2tensor": end_if_likely, "any": end_any}


class _Search(NamedTuple):
    """The arguments to `beam_search` that stay the same at every step."""

    step: Step
    limit: Int[Array, " B"]
    eos: int
    suppress_tokens: tuple[int, ...]
    penalty: Callable[[Float[Array, "..."]], Float[Array, "..."]]
    num_best: int
    end_rule: EndRule
    prefix: Int[Array, "B L"] | None


def beam_search(
    step: Step,
    state: State,
    limit: Int[Array, " B"],
    *,
    beam_size: int,
    max_length: int,
    start: int,
    eos: int,
    suppress_tokens: tuple[int, ...] = (),
    alpha: ArrayLike = 0.6,
    length_penalty: str = "gnmt",
    beam_end: str = "tensor2tensor",
    num_best: int = 1,
    prefix: Int[Array, "B L"] | None = None,
) -> Translations:
    """Keep the `beam_size` likeliest live hypotheses at each step, and the best finished ones.

    The first step reads the token `start`. `limit` is the maximum length of each translation,
    including `eos`, and must not exceed `max_length`. A sentence with a limit of 0 gets no
    hypothesis. `alpha` must be at least 0, and `length_penalty` must be a name in `PENALTIES`. Only
    the prefix of a translation can contain any of the `suppress_tokens`. The probabilities of other
    tokens are not renormalized. A prefix must be shorter than its sentence's limit. A score
    includes the log-probability of the prefix.

    `beam_end` is the name of the rule in `END_RULES` that decides which live hypotheses can finish
    at each step.

    A sentence is done when no live hypothesis can still become one of its `num_best` results.
    `num_best` must be at most `beam_size`. Log-probabilities never increase, and the penalty that
    divides them is largest at `limit`, so log_prob / penalty(limit) is an upper bound on every
    score that a live hypothesis can reach. Finished hypotheses have separate slots and never
    displace live ones.
    """
    penalty = functools.partial(PENALTIES[length_penalty], alpha=alpha)
    end_rule = END_RULES[beam_end]
    search = _Search(step, limit, eos, suppress_tokens, penalty, num_best, end_rule, prefix)
    shape = (len(limit), beam_size)
    empty = jnp.zeros((*shape, max_length), jnp.int32)
    # Initially, all hypotheses are identical, so only the first one is live.
    first = jnp.where(jnp.arange(beam_size) == 0, 0.0, NEG_INF)
    beam = _Beam(
        position=jnp.zeros((), jnp.int32),
        last_tokens=jnp.full(shape, start, jnp.int32),
        live_tokens=empty,
        ancestors=empty,
        live_log_probs=jnp.broadcast_to(first, shape),
        finished_tokens=empty,
        finished_scores=jnp.full(shape, NEG_INF),
        is_done=limit <= 0,
        state=state,
    )
    last = jax.lax.while_loop(lambda b: ~jnp.all(b.is_done), lambda b: _extend(search, b), beam)
    return Translations(last.finished_tokens, last.finished_scores)


def _extend(search: _Search, beam: _Beam) -> _Beam:
    """Finish the hypotheses that can finish, and extend the likeliest hypotheses by one token."""
    num_sentences, beam_size = beam.last_tokens.shape
    # The length of every hypothesis after this step, including the `eos` of those that finish.
    length = beam.position + 1
    is_last = (length >= search.limit)[:, None]
    # Each hypothesis reads its latest token in its current slot.
    ancestors = beam.ancestors.at[:, :, beam.position].set(jnp.arange(beam_size))
    logits, state = search.step(beam.last_tokens, beam.position, ancestors, beam.state)
    logits = logits.astype(jnp.float32)
    # Adding `offset` to a token's logit gives the log-probability of the extended hypothesis, so
    # normalizing all N logits is unnecessary.
    offset = beam.live_log_probs - jax.nn.logsumexp(logits, axis=-1)

    # Select the likeliest continuations of each hypothesis, and then the likeliest of those for
    # each sentence. For a single top-k over J x N continuations, XLA sorts the whole array, which
    # is far slower. `eos` is not a continuation, because a hypothesis that ends does not continue.
    allowed = forbid(logits, (search.eos, *search.suppress_tokens))
    if search.prefix is not None:
        forced = search.prefix[:, beam.position, None]
        is_next = jax.nn.one_hot(forced, logits.shape[-1], dtype=bool)
        only_next = jnp.where(is_next, logits, NEG_INF)
        allowed = jnp.where(forced[..., None] == 0, allowed, only_next)
    top_logits, tokens = jax.lax.top_k(allowed, min(2 * beam_size, logits.shape[-1]))
    # The log-probability of an empty slot stays at NEG_INF instead of decreasing at each step.
    candidates = jnp.maximum(offset[..., None] + top_logits, NEG_INF).reshape(num_sentences, -1)

    ending = offset + logits[..., search.eos]
    can_end = search.end_rule(beam, ending, candidates, is_last)
    if search.prefix is not None:
        can_end &= search.prefix[:, beam.position, None] == 0
    ending_scores = jnp.where(can_end, ending / search.penalty(length.astype(jnp.float32)), NEG_INF)
    ending_tokens = beam.live_tokens.at[:, :, beam.position].set(search.eos)
    all_scores = jnp.concatenate([beam.finished_scores, ending_scores], axis=1)
    finished_scores, best = jax.lax.top_k(all_scores, beam_size)
    finished_tokens = _select(jnp.concatenate([beam.finished_tokens, ending_tokens], axis=1), best)
    # Once a sentence is done, its results no longer change.
    is_done = beam.is_done[:, None]
    finished_scores = jnp.where(is_done, beam.finished_scores, finished_scores)
    finished_tokens = jnp.where(is_done[..., None], beam.finished_tokens, finished_tokens)

    # Except at the last position, every live hypothesis may also continue.
    log_probs, chosen = jax.lax.top_k(jnp.where(is_last, NEG_INF, candidates), beam_size)
    # The candidates of hypothesis 0 come first, then those of hypothesis 1, and so on.
    parent = chosen // tokens.shape[-1]
    last_tokens = jnp.take_along_axis(tokens.reshape(num_sentences, -1), chosen, axis=1)

    max_penalty = search.penalty(search.limit.astype(jnp.float32))
    can_improve = log_probs[:, 0] / max_penalty > finished_scores[:, search.num_best - 1]
    can_improve &= length < search.limit
    return _Beam(
        position=length,
        last_tokens=last_tokens,
        live_tokens=_select(beam.live_tokens, parent).at[:, :, beam.position].set(last_tokens),
        ancestors=_select(ancestors, parent),
        live_log_probs=log_probs,
        finished_tokens=finished_tokens,
        finished_scores=finished_scores,
        is_done=beam.is_done | ~can_improve,
        state=state,  # The search does not reorder the state; `ancestors` records the moves.
    )


def forbid(logits: Float[Array, "*B N"], tokens: tuple[int, ...]) -> Float[Array, "*B N"]:
    """Set the logits of the given tokens to `NEG_INF`."""
    for token in tokens:
        logits = jnp.where(jnp.arange(logits.shape[-1]) == token, NEG_INF, logits)
    return logits


def _select(x: Array, index: Int[Array, "B J"]) -> Array:
    """Select entries along axis 1, separately for each sentence."""
    return jnp.take_along_axis(x, index.reshape(*index.shape, *[1] * (x.ndim - 2)), axis=1)


def first_argmax(x: Float[Array, "B N"]) -> Int[Array, " B"]:
    """Return the index of each row's maximum, and the smallest index if there are several.

    On a CPU, XLA uses vector instructions for `max` but not for `argmax`. Therefore, first find the
    block that contains the maximum, and then find the index within the block.
    """
    size = max(k for k in range(1, MAX_BLOCK + 1) if x.shape[1] % k == 0)
    if size < MIN_BLOCK:
        return jax.lax.top_k(x, 1)[1][:, 0]
    blocks = x.reshape(len(x), -1, size)
    block = jnp.argmax(blocks.max(axis=-1), axis=-1, keepdims=True)
    within = jnp.take_along_axis(blocks, block[..., None], axis=1)[:, 0]
    return (block[:, 0] * size + jnp.argmax(within, axis=-1)).astype(jnp.int32)


class _Greedy(NamedTuple):
    position: Int[Array, ""]
    last_tokens: Int[Array, " B"]
    tokens: Int[Array, "B L"]
    log_probs: Float[Array, " B"]
    is_done: Bool[Array, " B"]
    state: State


def greedy_search(
    step: Step,
    state: State,
    limit: Int[Array, " B"],
    *,
    max_length: int,
    start: int,
    eos: int,
    suppress_tokens: tuple[int, ...] = (),
    prefix: Int[Array, "B L"] | None = None,
    choose: Callable[[Float[Array, "B N"], Int[Array, ""]], Int[Array, " B"]] | None = None,
) -> Translations:
    """Choose the most likely token at each step, and stop at the first `eos`.

    A translation's score is its log-probability. `choose`, a function from (logits, position) to
    tokens, replaces the choice. For other arguments, see `beam_search`.
    """
    num_sentences = len(limit)
    # The single hypothesis is always in slot 0.
    ancestors = jnp.zeros((num_sentences, 1, max_length), jnp.int32)

    def extend(greedy: _Greedy) -> _Greedy:
        logits, state = step(greedy.last_tokens[:, None], greedy.position, ancestors, greedy.state)
        logits = logits[:, 0].astype(jnp.float32)
        is_last = greedy.position + 1 >= limit
        allowed = forbid(logits, suppress_tokens)
        chosen = first_argmax(allowed) if choose is None else choose(allowed, greedy.position)
        last_tokens = jnp.where(is_last, eos, chosen)
        if prefix is not None:
            forced = prefix[:, greedy.position]
            last_tokens = jnp.where(forced == 0, last_tokens, forced)
        log_prob = jnp.take_along_axis(logits, last_tokens[:, None], axis=-1)[:, 0]
        log_prob -= jax.nn.logsumexp(logits, axis=-1)
        is_done = greedy.is_done
        return _Greedy(
            position=greedy.position + 1,
            last_tokens=last_tokens,
            tokens=greedy.tokens.at[:, greedy.position].set(jnp.where(is_done, 0, last_tokens)),
            log_probs=jnp.where(is_done, greedy.log_probs, greedy.log_probs + log_prob),
            is_done=is_done | (last_tokens == eos),
            state=state,
        )

    greedy = _Greedy(
        position=jnp.zeros((), jnp.int32),
        last_tokens=jnp.full(num_sentences, start, jnp.int32),
        tokens=jnp.zeros((num_sentences, max_length), jnp.int32),
        log_probs=jnp.where(limit > 0, 0.0, NEG_INF),
        is_done=limit <= 0,
        state=state,
    )
    last = jax.lax.while_loop(lambda g: ~jnp.all(g.is_done), extend, greedy)
    return Translations(last.tokens[:, None], last.log_probs[:, None])
