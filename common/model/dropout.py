"""Dropout with an explicit key and one byte of randomness per element."""

import math

import jax
import jax.numpy as jnp


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Zeroes elements with probability `rate` and scales the others up; the identity if `key` is None.

    Random bits dominate the cost of dropout on a CPU, so one 32-bit word serves four elements. The rate is rounded to
    a multiple of 1/256 (0.3 becomes 77/256 = 0.3008); the scale uses the rounded rate, so the expectation is x.
    """
    dropped = round(rate * 256)
    if key is None or dropped == 0:
        return x
    *leading, width = x.shape
    words = jax.random.bits(key, (*leading, math.ceil(width / 4)), jnp.uint32)
    octets = jax.lax.bitcast_convert_type(words, jnp.uint8).reshape(*leading, -1)[..., :width]
    # In float32: the scale rounded to bfloat16 would be wrong by up to 0.4 %.
    scaled = (x.astype(jnp.float32) * (256 / (256 - dropped))).astype(x.dtype)
    return jnp.where(octets >= dropped, scaled, jnp.zeros((), x.dtype))


def fold(key: jax.Array | None, number: int) -> jax.Array | None:
    """Returns `jax.random.fold_in(key, number)`, or None if `key` is None."""
    return None if key is None else jax.random.fold_in(key, number)
