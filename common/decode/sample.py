"""Sampling with a decoding cache: temperature, top-k and nucleus (top-p) sampling."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from common.config import check_int, check_number
from common.errors import check
from common.model.decode_cache import settle, with_writable, writable

LEAST = 1e-6
"""Lower bound of top_p, and of the temperature of random sampling. Decoding at a lower temperature is greedy, because
dividing the logits by the temperature could overflow."""


@dataclass(frozen=True)
class Sampling:
    """Options of random sampling.

    Attributes:
      temperature: divisor of the logits. Decoding is greedy below 1e-6.
      top_k: number of most likely tokens to sample from; 0 for all tokens.
      top_p: sample from the smallest set of most likely tokens whose total probability is at least `top_p`. Here, the
        probabilities of the `top_k` tokens add up to 1.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def validate(self, dashes: str = "") -> None:
        """Raises a UserError if a value is invalid. `dashes` is "--" if the values come from command-line options."""
        check_number(f"{dashes}temperature", self.temperature)
        check_int(f"{dashes}top_k", self.top_k, 0)
        check_number(f"{dashes}top_p", self.top_p)
        check(0 < self.top_p <= 1, f"{dashes}top_p must be above 0 and at most 1, got {self.top_p}")


def restrict(logits_BV: jax.Array, sampling: Sampling) -> jax.Array:
    """Divides the logits by the temperature, and sets the logits of tokens outside of top-k and top-p to -inf."""
    logits_BV = logits_BV / sampling.temperature
    ordered_BV = jnp.sort(logits_BV, axis=-1)[:, ::-1]
    lowest_B1 = jnp.full((len(logits_BV), 1), -jnp.inf)
    if 0 < sampling.top_k < logits_BV.shape[-1]:
        lowest_B1 = ordered_BV[:, sampling.top_k - 1 : sampling.top_k]
    if sampling.top_p < 1:
        kept_BV = jnp.where(ordered_BV >= lowest_B1, ordered_BV, -jnp.inf)
        probabilities_BV = jax.nn.softmax(kept_BV, axis=-1)
        # Keep a token if the total probability of all more likely tokens is less than top_p.
        before_BV = jnp.cumsum(probabilities_BV, axis=-1) - probabilities_BV
        within_BV = jnp.where(before_BV < max(sampling.top_p, LEAST), kept_BV, jnp.inf)
        lowest_B1 = jnp.maximum(lowest_B1, within_BV.min(-1, keepdims=True))
    return jnp.where(logits_BV >= lowest_B1, logits_BV, -jnp.inf)


class Rows(NamedTuple):
    """Some rows of a batch, such as the rows of one device.

    Attributes:
      numbers_B: the index of each row in the whole batch.
      count: number of rows of the whole batch.
    """

    numbers_B: jax.Array
    count: int


def draw(logits_BV: jax.Array, sampling: Sampling, key: jax.Array, rows: Rows) -> jax.Array:
    """Draws a token for each row of logits; returns (B,). The key and the index of a row determine the row's noise."""
    if sampling.temperature < LEAST:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    # Draw the Gumbel noise of the whole batch on each device, so that a row gets the same noise on every mesh.
    noise_BV = jax.random.gumbel(key, (rows.count, logits_BV.shape[-1]))[rows.numbers_B]
    return jnp.argmax(restrict(logits_BV, sampling) + noise_BV, axis=-1).astype(jnp.int32)


def sample(
    step: Callable,
    logits_BV: jax.Array,
    cache: Any,
    start: jax.Array,
    given_BL: jax.Array,
    sampling: Sampling,
    key: jax.Array,
    rows: Rows,
) -> tuple[jax.Array, jax.Array, Any]:
    """Decodes L tokens of every row, at positions `start` to `start` + L - 1. Draws the tokens that are not known.

    The noise of a drawn token depends on the key, its position and the index of its row, but not on L.

    Args:
      step: function (tokens_B, cache, index) -> (logits_BV, cache); the logits are for position `index` + 1.
      logits_BV: logits for position `start`.
      given_BL: known tokens, such as the end of a prompt; a negative number for each token to draw. L must be at most
        `CacheSpec.recent`, unless `recent` is 0.

    Returns:
      The tokens (B, L), the logits (B, V) for position `start` + L, and the cache after `settle`.
    """

    def one(carry, xs):
        logits_BV, part = carry
        given_B, index = xs
        drawn_B = draw(logits_BV, sampling, jax.random.fold_in(key, index), rows)
        tokens_B = jnp.where(given_B < 0, drawn_B, given_B)
        logits_BV, after = step(tokens_B, with_writable(cache, part), index)
        return (logits_BV, writable(after)), tokens_B

    count = given_BL.shape[1]
    carry = (logits_BV, writable(cache))
    (logits_BV, part), tokens_LB = jax.lax.scan(one, carry, (given_BL.T, start + jnp.arange(count)))
    return tokens_LB.T, logits_BV, settle(with_writable(cache, part), count)
