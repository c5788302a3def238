"""Dropout with an explicit random key and eight random bits per element."""

import math

import jax
import jax.numpy as jnp

Key = jax.Array | None
"""A random key; None turns dropout off."""


def dropout(x: jax.Array, rate: float, key: Key) -> jax.Array:
    """Zeroes elements with probability `rate` and scales all other elements, so that the expectation is x.

    Random bits dominate the cost of dropout on a CPU, so one 32-bit word serves four elements. The rate is therefore
    rounded to a multiple of 1/256: 0.3 becomes 77/256 = 0.3008.
    """
    dropped = round(rate * 256)
    if key is None or dropped == 0:
        return x
    *leading, width = x.shape
    words = jax.random.bits(key, (*leading, math.ceil(width / 4)), jnp.uint32)
    octets = jax.lax.bitcast_convert_type(words, jnp.uint8).reshape(*leading, -1)[..., :width]
    # Multiply in float32: rounding the scale to bfloat16 would change it by up to 0.4 %.
    scaled = (x.astype(jnp.float32) * (256 / (256 - dropped))).astype(x.dtype)
    return jnp.where(octets >= dropped, scaled, jnp.zeros((), x.dtype))


def fold(key: Key, number: int) -> Key:
    """Returns `jax.random.fold_in(key, number)`, or None if `key` is None."""
    return None if key is None else jax.random.fold_in(key, number)
