"""Dropout with an explicit random key and eight random bits per element.

The random bits of a row depend on the key and on the row's index in the global batch, but not on the mesh. A device
draws only the bits of its own rows. Both properties require `jax_threefry_partitionable`, JAX's default.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.extend.random import threefry2x32_p

from common import sharding
from common.model.stored import stored

Key = jax.Array | None
"""A random key; None turns dropout off."""


def dropout(x: jax.Array, rate: float, key: Key, *, batched: bool = True) -> jax.Array:
    """Zeroes elements with probability `rate`, and scales the remaining elements so that the expectation is x.

    Random bits dominate the cost of dropout on a CPU, so one 32-bit word serves four elements. The rate is therefore
    rounded to a multiple of 1/256: 0.3 becomes 77/256 = 0.3008.

    Args:
      batched: whether the first axis of x is the rows of a batch. If not, all devices drop the same elements.
    """
    dropped = round(rate * 256)
    if key is None or dropped == 0:
        return x
    *leading, width = x.shape
    draw = row_bits if batched else jax.random.bits
    words = stored(draw(key, (*leading, math.ceil(width / 4))))
    # The lowest octet (8 bits) of all words decides which elements of the first quarter of the last axis are kept, the
    # next octet decides about the second quarter, and so on. A bitcast to octets, or a concatenation of octets before
    # the comparison, would write more to the memory of a TPU.
    octets = (words >> shift & 255 for shift in (0, 8, 16, 24))
    kept = jnp.concatenate([octet >= dropped for octet in octets], -1)[..., :width]
    # Multiply in float32: rounding the scale to bfloat16 would change it by up to 0.4 %.
    scaled = (x.astype(jnp.float32) * (256 / (256 - dropped))).astype(x.dtype)
    return jnp.where(kept, scaled, jnp.zeros((), x.dtype))


def fold(key: Key, number: int) -> Key:
    """Returns `jax.random.fold_in(key, number)`, or None if `key` is None."""
    return None if key is None else jax.random.fold_in(key, number)


def row_bits(key: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Returns random 32-bit words of the shape (B, ...), for an array whose first axis is the rows of a batch.

    In a `jax.shard_map` over the batch, `shape` is the shape of this device's rows, and the words are this device's
    rows of `jax.random.bits(key, shape of the global array)`. Elsewhere, `shape` is the shape of the global array.
    """
    shard = sharding.batch_shard()
    if shard is None:
        return jax.random.bits(key, shape)
    # JAX derives the bits of an element by encrypting its 64-bit index in the global array with the key.
    size, mesh = math.prod(shape), jax.sharding.get_abstract_mesh()
    starts = [divmod(n * size, 2**32) for n in range(sharding.num_batch_shards(mesh))]
    high, start = jnp.asarray(starts, jnp.uint32)[shard]
    low = jax.lax.iota(jnp.uint32, size).reshape(shape) + start
    first, second = jax.random.key_data(key)
    words = threefry2x32_p.bind(first, second, high + (low < start), low)
    return words[0] ^ words[1]
