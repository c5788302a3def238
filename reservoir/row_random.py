"""Random keys and normal numbers for this device's rows of a global batch; see `common.model.dropout.row_bits`."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from common import sharding
from common.model.dropout import row_bits


def row_keys(key: jax.Array, rows: int) -> jax.Array:
    """Returns this device's `rows` keys of `jax.random.split(key, number of rows of the global batch)`."""
    shard = sharding.batch_shard()
    numbers_B = jnp.arange(rows) + (0 if shard is None else shard * rows)
    return jax.vmap(lambda number: jax.random.fold_in(key, number))(numbers_B)


def row_normal(key: jax.Array, shape: Sequence[int], dtype: jnp.dtype) -> jax.Array:
    """Returns this device's rows of `jax.random.normal(key, shape of the global array, dtype)`.

    For float64, returns float32 numbers that are converted to float64.

    Args:
      shape: shape of the result. The first axis has this device's rows of the batch.
    """
    if dtype == jnp.float64:
        return row_normal(key, shape, jnp.float32).astype(dtype)
    info, least = jnp.finfo(dtype), np.nextafter(np.array(-1, dtype), np.array(0, dtype))
    kind = {16: jnp.uint16, 32: jnp.uint32}[info.bits]
    # Like JAX, fill the mantissa of a number in [1, 2) with random bits. Eight random bits suffice for bfloat16.
    drawn = jnp.uint8 if info.nmant < 8 else kind
    bits = row_bits(key, shape).astype(drawn).astype(kind)
    bits >>= jnp.iinfo(drawn).bits - info.nmant
    unit = jax.lax.bitcast_convert_type(bits | np.array(1, dtype).view(kind), dtype) - 1
    uniform = jnp.maximum(least, unit * (np.array(1, dtype) - least) + least)
    return np.array(np.sqrt(2), dtype) * jax.scipy.special.erfinv(uniform)
