"""Beam search over a cache, compiled as one program. Greedy search is a beam of one.

B sentences, K hypotheses of each, N = B K, T longest translation, V vocabulary, C candidates,
G blocks of the vocabulary, E tokens in the chosen ones.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

# Finite, so that no arithmetic on it gives NaN.
NEVER = -1e9

# (tokens_N, cache, index) -> (logits_NV, cache): the logits of the token after `tokens_N`, which stands at `index`.
StepFunction = Callable[[jax.Array, Any, jax.Array], tuple[jax.Array, Any]]


@dataclass(frozen=True)
class Search:
    """What fairseq calls beam, lenpen, max_len_a and max_len_b.

    A hypothesis of n tokens (end of sentence included) scores log p / n^length_penalty; a translation has at most
    `ratio` times the source's tokens plus `extra`.
    """

    beams: int = 5
    length_penalty: float = 1.0
    ratio: float = 1.2
    extra: int = 10

    def longest(self, source_length: int) -> int:
        """T for sources of at most this length."""
        return int(self.ratio * source_length) + self.extra


def largest(
    logits_NV: jax.Array, count: int, never: tuple[int, ...], block: int = 128
) -> tuple[jax.Array, jax.Array]:
    """The `count` largest logits of each row and their tokens, (N, C), largest first; `never` tokens count as NEVER.

    They lie in the `count` blocks of the vocabulary with the largest maxima, so one pass for the maxima is all that
    looks at every token: several times faster than a selection from whole rows.
    """
    rows, vocabulary = logits_NV.shape
    blocks = -(-vocabulary // block)

    def masked(values: jax.Array, tokens: jax.Array) -> jax.Array:
        forbidden = tokens >= vocabulary
        for token in never:
            forbidden |= tokens == token
        return jnp.where(forbidden, NEVER, values)

    padded_NV = jnp.pad(logits_NV, ((0, 0), (0, blocks * block - vocabulary)))
    maxima_NG = masked(padded_NV, jnp.arange(blocks * block)).reshape(rows, blocks, block).max(-1)
    chosen_NC = jax.lax.top_k(maxima_NG, min(count, blocks))[1]
    tokens_NE = (chosen_NC[:, :, None] * block + jnp.arange(block)).reshape(rows, -1)
    values_NE = jnp.take_along_axis(logits_NV, jnp.minimum(tokens_NE, vocabulary - 1), axis=1)
    values_NC, places_NC = jax.lax.top_k(masked(values_NE, tokens_NE), count)
    return values_NC, jnp.take_along_axis(tokens_NE, places_NC, axis=1)


def beam_search(
    step: StepFunction,
    cache: Any,
    limits_B: jax.Array,
    *,
    longest: int,
    search: Search,
    bos: int,
    eos: int,
    never: tuple[int, ...] = (),
) -> tuple[jax.Array, jax.Array]:
    """The K best translations found, best first: tokens (B, K, T) and scores (B, K).

    As in fairseq, the 2K best continuations are looked at; those of the first K that end are finished, the
    best K others live on; a sentence is done when K hypotheses are finished. Tokens behind the end are `eos`.

    Args:
      cache: for N = B K rows; leaves with N rows are reordered with the hypotheses, all others are shared.
      limits_B: the longest translation of each sentence in tokens, at most `longest`.
      never: tokens that are not generated (padding, begin of sentence).
    """
    batch, beams = limits_B.shape[0], search.beams
    rows_B1 = jnp.arange(batch)[:, None]

    def reorder(leaf: jax.Array, parents_BK: jax.Array) -> jax.Array:
        if leaf.shape[0] != batch * beams:
            return leaf
        return leaf[(rows_B1 * beams + parents_BK).reshape(-1)]

    def best_continuations(
        logits_NV: jax.Array, at_limit_N: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """log p and ids of the C = 2K likeliest next tokens of each hypothesis, (N, C), without an (N, V) copy."""
        normalizer_N1 = jax.nn.logsumexp(logits_NV, axis=-1, keepdims=True)
        # At the limit the sentence ends, whatever the model says.
        end_N1 = jnp.where(eos in never, NEVER, logits_NV[:, eos, None])
        values_NC, tokens_NC = largest(logits_NV, min(2 * beams, logits_NV.shape[-1]), never)
        first_C = jnp.arange(values_NC.shape[1]) == 0
        at_limit_N1 = at_limit_N[:, None]
        values_NC = jnp.where(at_limit_N1, jnp.where(first_C, end_N1, NEVER), values_NC)
        tokens_NC = jnp.where(at_limit_N1 & first_C, eos, tokens_NC)
        return values_NC - normalizer_N1, tokens_NC

    def advance(state: tuple) -> tuple:
        index, tokens, live, done_tokens, done_scores, cache = state
        last_N = jnp.where(index == 0, bos, tokens[:, :, jnp.maximum(index - 1, 0)]).reshape(-1)
        logits_NV, cache = step(last_N, cache, index)
        scores_NC, tokens_NC = best_continuations(
            logits_NV, jnp.repeat(index + 1 >= limits_B, beams)
        )

        # The best of all hypotheses of a sentence are among the best of each.
        totals_BC = (live[:, :, None] + scores_NC.reshape(batch, beams, -1)).reshape(batch, -1)
        scores, choices = jax.lax.top_k(totals_BC, 2 * beams)
        parents = choices // tokens_NC.shape[1]
        next_tokens = tokens_NC.reshape(batch, -1)[rows_B1, choices]
        ends = next_tokens == eos

        # The finished ones. A sentence that is done takes no more.
        open_B1 = jnp.any(done_scores <= NEVER, axis=1, keepdims=True)
        finishing = ends & (jnp.arange(2 * beams) < beams) & (scores > NEVER / 2) & open_B1
        normalised = scores / (index + 1.0) ** search.length_penalty
        finished = tokens[rows_B1, parents].at[:, :, index].set(eos)
        merged = jnp.concatenate([done_scores, jnp.where(finishing, normalised, NEVER)], axis=1)
        done_scores, best = jax.lax.top_k(merged, beams)
        done_tokens = jnp.concatenate([done_tokens, finished], axis=1)[rows_B1, best]

        # The living ones.
        live, best = jax.lax.top_k(jnp.where(ends, NEVER, scores), beams)
        parents, next_tokens = parents[rows_B1, best], next_tokens[rows_B1, best]
        tokens = tokens[rows_B1, parents].at[:, :, index].set(next_tokens)
        if beams > 1:
            cache = jax.tree.map(lambda leaf: reorder(leaf, parents), cache)
        return index + 1, tokens, live, done_tokens, done_scores, cache

    def unfinished(state: tuple) -> jax.Array:
        index, done_scores = state[0], state[4]
        return (index < jnp.max(limits_B)) & jnp.any(done_scores <= NEVER)

    empty = jnp.full((batch, beams, longest), eos, jnp.int32)
    # All hypotheses of a sentence start equal: only the first one counts.
    live = jnp.tile(jnp.where(jnp.arange(beams) == 0, 0.0, NEVER), (batch, 1))
    nothing = jnp.full((batch, beams), NEVER)
    state = jax.lax.while_loop(
        unfinished, advance, (jnp.int32(0), empty, live, empty, nothing, cache)
    )
    return state[3], state[4]
