"""Greedy search with any step function that `beam_search` accepts.

Shapes: B sentences, L maximum translation length.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from transformer_jax.inference.search import NEG_INF, State, Step, Translations, forbid


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
) -> Translations:
    """Choose the most likely token at each step, and stop at the first `eos`.

    A translation's score is its log-probability. As in `beam_search`, no translation contains any
    of the `suppress_tokens`. Unlike this search, a beam search with one slot does not stop at the
    first `eos`.
    """
    num_sentences = len(limit)
    # The single hypothesis is always in slot 0.
    ancestors = jnp.zeros((num_sentences, 1, max_length), jnp.int32)

    def extend(greedy: _Greedy) -> _Greedy:
        logits, state = step(greedy.last_tokens[:, None], greedy.position, ancestors, greedy.state)
        logits = logits[:, 0].astype(jnp.float32)
        is_last = greedy.position + 1 >= limit
        # On a CPU, `argmax` over the vocabulary is slower than `top_k` with k = 1.
        likeliest = jax.lax.top_k(forbid(logits, suppress_tokens), 1)[1][:, 0]
        last_tokens = jnp.where(is_last, eos, likeliest)
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
