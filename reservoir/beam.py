"""Beam search with a decoding cache, in one `lax.while_loop`. With one hypothesis, beam search is greedy search.

Shape letters of this module: B sentences, A hypotheses per sentence, X = B * A rows, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

# Logit of forbidden tokens, and score of missing hypotheses. Finite, because inf - inf would be NaN.
IMPOSSIBLE = -1e9

# Decoding step (tokens_X, cache, index) -> (logits_XV, cache). `tokens_X` are the inputs at position `index`. The
# logits predict the tokens at position `index` + 1.
StepFunction = Callable[[jax.Array, Any, jax.Array], tuple[jax.Array, Any]]


@dataclass(frozen=True)
class Search:
    """Options of beam search. fairseq calls them beam, lenpen, max_len_a and max_len_b.

    A hypothesis of n tokens has the score log p / n^length_penalty. A translation has at most
    `ratio` * (number of source tokens) + `extra` tokens. Numbers of tokens include the end-of-sentence token.
    """

    beams: int = 5
    length_penalty: float = 1.0
    ratio: float = 1.2
    extra: int = 10

    def longest(self, source_length: int) -> int:
        """Returns the maximum number of tokens of a translation, for sources of at most `source_length` tokens."""
        return int(self.ratio * source_length) + self.extra


def largest(
    logits_XV: jax.Array, count: int, never: tuple[int, ...], block: int = 128
) -> tuple[jax.Array, jax.Array]:
    """Returns the `count` largest logits of each row and their tokens, (X, count), largest first.

    Tokens in `never` get the logit IMPOSSIBLE. The vocabulary is split into blocks. The `count` largest logits lie in
    the `count` blocks with the largest maxima. So top-k runs over the block maxima, then over these blocks, instead of
    over the vocabulary.
    """
    rows, vocabulary = logits_XV.shape
    blocks = -(-vocabulary // block)

    def masked(values: jax.Array, tokens: jax.Array) -> jax.Array:
        forbidden = tokens >= vocabulary
        for token in never:
            forbidden |= tokens == token
        return jnp.where(forbidden, IMPOSSIBLE, values)

    padded_XV = jnp.pad(logits_XV, ((0, 0), (0, blocks * block - vocabulary)))
    maxima = masked(padded_XV, jnp.arange(blocks * block)).reshape(rows, blocks, block).max(-1)
    chosen = jax.lax.top_k(maxima, min(count, blocks))[1]
    tokens = (chosen[:, :, None] * block + jnp.arange(block)).reshape(rows, -1)
    values = jnp.take_along_axis(logits_XV, jnp.minimum(tokens, vocabulary - 1), axis=1)
    best, places = jax.lax.top_k(masked(values, tokens), count)
    return best, jnp.take_along_axis(tokens, places, axis=1)


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
    """Returns the best translations, best first: tokens (B, A, longest) and scores (B, A).

    As in fairseq, each step takes the 2A best continuations of a sentence. An ended continuation among the best A
    becomes a finished hypothesis. The best A continuations without an end stay in the beam. The search for a sentence
    stops at A finished hypotheses. If the last step finishes more than needed, the best A are kept (fairseq keeps the
    hypotheses found first). If fewer hypotheses finish within the limit, the remaining scores are IMPOSSIBLE. Positions
    after the end of a translation hold `eos`.

    Args:
      cache: decoding cache for X = B * A rows. Arrays with X rows are reordered with the hypotheses. All other arrays,
        such as the keys and values of attention, stay as they are.
      limits_B: maximum length of each translation in tokens, at most `longest`.
      longest: number of positions of the returned translations.
      never: tokens that are never generated (padding, begin of sentence).
    """
    batch, beams = limits_B.shape[0], search.beams
    rows_B1 = jnp.arange(batch)[:, None]

    def reorder(leaf: jax.Array, parents_BA: jax.Array) -> jax.Array:
        if leaf.shape[0] != batch * beams:
            return leaf
        return leaf[(rows_B1 * beams + parents_BA).reshape(-1)]

    def best_continuations(
        logits_XV: jax.Array, at_limit_X: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns log p and ids of the likeliest next tokens of each hypothesis, (X, min(2A, V)) each."""
        # Normalize only the logits of the returned tokens, which saves an array (X, V).
        normalizer_X1 = jax.nn.logsumexp(logits_XV, axis=-1, keepdims=True)
        # A hypothesis at the length limit of its sentence can only continue with `eos`.
        end_X1 = jnp.where(eos in never, IMPOSSIBLE, logits_XV[:, eos, None])
        values, tokens = largest(logits_XV, min(2 * beams, logits_XV.shape[-1]), never)
        first = jnp.arange(values.shape[1]) == 0
        at_limit_X1 = at_limit_X[:, None]
        values = jnp.where(at_limit_X1, jnp.where(first, end_X1, IMPOSSIBLE), values)
        tokens = jnp.where(at_limit_X1 & first, eos, tokens)
        return values - normalizer_X1, tokens

    def advance(state: tuple) -> tuple:
        index, tokens, live, done_tokens, done_scores, cache = state
        last_X = jnp.where(index == 0, bos, tokens[:, :, jnp.maximum(index - 1, 0)]).reshape(-1)
        logits_XV, cache = step(last_X, cache, index)
        log_p, candidates = best_continuations(logits_XV, jnp.repeat(index + 1 >= limits_B, beams))

        # Each of the 2A best continuations of a sentence is among the 2A best continuations of its own hypothesis.
        totals = (live[:, :, None] + log_p.reshape(batch, beams, -1)).reshape(batch, -1)
        scores, choices = jax.lax.top_k(totals, 2 * beams)
        parents = choices // candidates.shape[1]
        next_tokens = candidates.reshape(batch, -1)[rows_B1, choices]
        ends = next_tokens == eos

        # Collect finished hypotheses, but not of sentences that already have A finished hypotheses.
        open_B1 = jnp.any(done_scores <= IMPOSSIBLE, axis=1, keepdims=True)
        finishing = ends & (jnp.arange(2 * beams) < beams) & (scores > IMPOSSIBLE / 2) & open_B1
        normalised = scores / (index + 1.0) ** search.length_penalty
        finished = tokens[rows_B1, parents].at[:, :, index].set(eos)
        merged = jnp.concatenate(
            [done_scores, jnp.where(finishing, normalised, IMPOSSIBLE)], axis=1
        )
        done_scores, best = jax.lax.top_k(merged, beams)
        done_tokens = jnp.concatenate([done_tokens, finished], axis=1)[rows_B1, best]

        # Select the hypotheses that stay in the beam.
        live, best = jax.lax.top_k(jnp.where(ends, IMPOSSIBLE, scores), beams)
        parents, next_tokens = parents[rows_B1, best], next_tokens[rows_B1, best]
        tokens = tokens[rows_B1, parents].at[:, :, index].set(next_tokens)
        if beams > 1:
            cache = jax.tree.map(lambda leaf: reorder(leaf, parents), cache)
        return index + 1, tokens, live, done_tokens, done_scores, cache

    def unfinished(state: tuple) -> jax.Array:
        index, done_scores = state[0], state[4]
        return (index < jnp.max(limits_B)) & jnp.any(done_scores <= IMPOSSIBLE)

    empty = jnp.full((batch, beams, longest), eos, jnp.int32)
    # At the start all hypotheses of a sentence are equal, so all except the first get the score IMPOSSIBLE.
    live = jnp.tile(jnp.where(jnp.arange(beams) == 0, 0.0, IMPOSSIBLE), (batch, 1))
    no_scores = jnp.full((batch, beams), IMPOSSIBLE)
    state = jax.lax.while_loop(
        unfinished, advance, (jnp.int32(0), empty, live, empty, no_scores, cache)
    )
    return state[3], state[4]
