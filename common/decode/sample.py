"""Sampling over a cache: temperature, the k likeliest tokens, the nucleus.

B sequences, L tokens, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from common.config import check
from common.decode.beam import StepFunction
from common.model.decode_cache import changed, changing, settle

LEAST = 1e-6
"""Below this a temperature or a probability is lost in float32."""


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn.

    Attributes:
      temperature: divides the logits; 0 (and what is next to it) takes the likeliest token.
      top_k: only the k likeliest tokens; 0 is all.
      top_p: only the likeliest tokens that together have this probability (at least one).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def validate(self) -> None:
        check(self.temperature >= 0, f"--temperature must be at least 0, got {self.temperature:g}")
        check(self.top_k >= 0, f"--top_k must be at least 0 (0 is all), got {self.top_k}")
        check(0 < self.top_p <= 1, f"--top_p must be above 0 and at most 1, got {self.top_p:g}")


def restrict(logits_BV: jax.Array, sampling: Sampling) -> jax.Array:
    """The logits at this temperature, minus infinity where a token may not be drawn."""
    logits_BV = logits_BV / sampling.temperature
    ordered_BV = jnp.sort(logits_BV, axis=-1)[:, ::-1]
    lowest_B1 = jnp.full((len(logits_BV), 1), -jnp.inf)
    if 0 < sampling.top_k < logits_BV.shape[-1]:
        lowest_B1 = ordered_BV[:, sampling.top_k - 1 : sampling.top_k]
    if sampling.top_p < 1:
        kept_BV = jnp.where(ordered_BV >= lowest_B1, ordered_BV, -jnp.inf)
        shares_BV = jax.nn.softmax(kept_BV, axis=-1)
        # A token is in as long as those before it do not reach top_p yet.
        before_BV = jnp.cumsum(shares_BV, axis=-1) - shares_BV
        within_BV = jnp.where(before_BV < max(sampling.top_p, LEAST), kept_BV, jnp.inf)
        lowest_B1 = jnp.maximum(lowest_B1, within_BV.min(-1, keepdims=True))
    return jnp.where(logits_BV >= lowest_B1, logits_BV, -jnp.inf)


def draw(logits_BV: jax.Array, sampling: Sampling, key: jax.Array) -> jax.Array:
    """One token each, (B,)."""
    if sampling.temperature < LEAST:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    return jax.random.categorical(key, restrict(logits_BV, sampling)).astype(jnp.int32)


def write(
    step: StepFunction,
    logits_BV: jax.Array,
    cache: Any,
    start: jax.Array,
    count: int,
    sampling: Sampling,
    key: jax.Array,
) -> tuple[jax.Array, jax.Array, Any]:
    """Draws `count` tokens for positions `start` and after: tokens (B, count), the next logits, the cache.

    `count` is at most what the cache may write before it is settled, which it is afterwards.
    The token of a position depends on the key and the position, not on how the whole is cut into calls.
    """

    def one(carry, index):
        logits_BV, part = carry
        tokens_B = draw(logits_BV, sampling, jax.random.fold_in(key, index))
        logits_BV, after = step(tokens_B, changed(cache, part), index)
        return (logits_BV, changing(after)), tokens_B

    carry = (logits_BV, changing(cache))
    (logits_BV, part), tokens_LB = jax.lax.scan(one, carry, start + jnp.arange(count))
    return tokens_LB.T, logits_BV, settle(changed(cache, part), count)
