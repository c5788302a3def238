"""Dropout with an explicit key and one byte of randomness per element."""

import math

import jax
import jax.numpy as jnp


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Sets elements to zero with probability `rate` and scales the others up; the identity without a key.

    Random bits are the price of dropout on a CPU, so a 32-bit word serves four elements. The rate is
    therefore a multiple of 1/256 (0.3 is 77/256 = 0.3008); the scale uses that exact value, so the expectation is x.
    """
    dropped = round(rate * 256)
    if key is None or dropped == 0:
        return x
    *leading, width = x.shape
    words = jax.random.bits(key, (*leading, math.ceil(width / 4)), jnp.uint32)
    octets = jax.lax.bitcast_convert_type(words, jnp.uint8).reshape(*leading, -1)[..., :width]
    # In float32: rounded to bfloat16, the scale itself would be up to 0.4 % off.
    scaled = (x.astype(jnp.float32) * (256 / (256 - dropped))).astype(x.dtype)
    return jnp.where(octets >= dropped, scaled, jnp.zeros((), x.dtype))


def fold(key: jax.Array | None, number: int) -> jax.Array | None:
    """A key of its own for the `number`-th place of use; None (no randomness) stays None."""
    return None if key is None else jax.random.fold_in(key, number)
