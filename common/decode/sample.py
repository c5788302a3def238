"""Sampling with a decoding cache: temperature, top-k and nucleus (top-p) sampling."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from common.config import check
from common.model.decode_cache import settle, with_writable, writable

if TYPE_CHECKING:
    from common.decode.beam import StepFunction

LEAST = 1e-6
"""Smaller temperatures and values of top_p count as this: float32 cannot resolve them."""


@dataclass(frozen=True)
class Sampling:
    """Sampling options.

    Attributes:
      temperature: divides the logits; below 1e-6 decoding is greedy.
      top_k: sample from the k likeliest tokens; 0 for all.
      top_p: sample from the likeliest tokens whose probabilities sum to top_p, at least one token.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def validate(self) -> None:
        check(self.temperature >= 0, f"--temperature must be at least 0, got {self.temperature:g}")
        check(self.top_k >= 0, f"--top_k must be at least 0 (0 is all), got {self.top_k}")
        check(0 < self.top_p <= 1, f"--top_p must be above 0 and at most 1, got {self.top_p:g}")


def restrict(logits_BV: jax.Array, sampling: Sampling) -> jax.Array:
    """Returns the logits divided by the temperature, -inf for tokens outside of top-k and top-p."""
    logits_BV = logits_BV / sampling.temperature
    ordered_BV = jnp.sort(logits_BV, axis=-1)[:, ::-1]
    lowest_B1 = jnp.full((len(logits_BV), 1), -jnp.inf)
    if 0 < sampling.top_k < logits_BV.shape[-1]:
        lowest_B1 = ordered_BV[:, sampling.top_k - 1 : sampling.top_k]
    if sampling.top_p < 1:
        kept_BV = jnp.where(ordered_BV >= lowest_B1, ordered_BV, -jnp.inf)
        probabilities_BV = jax.nn.softmax(kept_BV, axis=-1)
        # A token is kept if the likelier tokens sum to less than top_p.
        before_BV = jnp.cumsum(probabilities_BV, axis=-1) - probabilities_BV
        within_BV = jnp.where(before_BV < max(sampling.top_p, LEAST), kept_BV, jnp.inf)
        lowest_B1 = jnp.maximum(lowest_B1, within_BV.min(-1, keepdims=True))
    return jnp.where(logits_BV >= lowest_B1, logits_BV, -jnp.inf)


def draw(logits_BV: jax.Array, sampling: Sampling, key: jax.Array) -> jax.Array:
    """Draws a token for each row, (B,)."""
    if sampling.temperature < LEAST:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    return jax.random.categorical(key, restrict(logits_BV, sampling)).astype(jnp.int32)


def sample(
    step: "StepFunction",
    logits_BV: jax.Array,
    cache: Any,
    start: jax.Array,
    count: int,
    sampling: Sampling,
    key: jax.Array,
) -> tuple[jax.Array, jax.Array, Any]:
    """Draws `count` tokens for the positions from `start` on.

    `count` is at most `CacheSpec.recent`. The token of a position depends on the key and the position, not on the
    number of calls.

    Returns:
      Tokens (B, count), the logits of the next token and the settled cache.
    """

    def one(carry, index):
        logits_BV, part = carry
        tokens_B = draw(logits_BV, sampling, jax.random.fold_in(key, index))
        logits_BV, after = step(tokens_B, with_writable(cache, part), index)
        return (logits_BV, writable(after)), tokens_B

    carry = (logits_BV, writable(cache))
    (logits_BV, part), tokens_LB = jax.lax.scan(one, carry, start + jnp.arange(count))
    return tokens_LB.T, logits_BV, settle(with_writable(cache, part), count)
