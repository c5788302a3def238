"""Absolute position embeddings: sinusoidal or learned."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from common.model import initializers


class Sinusoidal(nnx.Module):
    """Sinusoidal position embeddings in fairseq's layout: sines in the first half of the channels, then cosines."""

    def __init__(self, width: int):
        if width % 2:
            raise ValueError(
                f"sinusoidal positions need an even width, got {width}: choose an even width"
            )
        self.width = width

    def __call__(self, positions_L: jax.Array) -> jax.Array:
        """Returns embeddings (L, D) in float32."""
        half = self.width // 2
        frequencies = jnp.exp(jnp.arange(half) * (-math.log(10000) / max(half - 1, 1)))
        angles = positions_L[:, None].astype(jnp.float32) * frequencies
        return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


class Learned(nnx.Module):
    """A trained embedding per position, initialised from N(0, 1 / width)."""

    def __init__(self, maximum: int, width: int, *, rngs: nnx.Rngs):
        initialize = initializers.normal(width**-0.5)
        self.table = nnx.Param(
            initialize(rngs.params(), (maximum, width)), axes=("position", "embed")
        )

    def __call__(self, positions_L: jax.Array) -> jax.Array:
        return self.table[...][positions_L]
