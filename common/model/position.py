"""Positions: sinusoidal and learned."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from common.model import initializers


class Sinusoidal(nnx.Module):
    """Fixed positions in fairseq's layout: sines in the first half of the width, cosines in the second."""

    def __init__(self, width: int):
        if width % 2:
            raise ValueError(f"sinusoidal positions need an even width, got {width}")
        self.width = width
        self.maximum = None

    def __call__(self, positions_L: jax.Array) -> jax.Array:
        """Returns (L, D) in float32 for integer positions."""
        half = self.width // 2
        rates = jnp.exp(jnp.arange(half) * (-math.log(10000) / max(half - 1, 1)))
        angles = positions_L[:, None].astype(jnp.float32) * rates
        return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


class Learned(nnx.Module):
    """A trained row per position, N(0, width^-0.5) at the start."""

    def __init__(self, maximum: int, width: int, *, rngs: nnx.Rngs):
        initialize = initializers.normal(width**-0.5)
        self.table = nnx.Param(
            initialize(rngs.params(), (maximum, width)), axes=("position", "embed")
        )
        self.maximum = maximum

    def __call__(self, positions_L: jax.Array) -> jax.Array:
        return self.table[...][positions_L]
