"""Position embeddings: sinusoidal and learned, added to token embeddings; rotary, applied to queries and keys."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from common.model import initializers


class Sinusoidal(nnx.Module):
    """Sinusoidal positions in fairseq's layout: sines in the first half of the width, cosines in the second."""

    def __init__(self, width: int):
        if width % 2:
            raise ValueError(f"sinusoidal positions need an even width, got {width}")
        self.width = width
        self.maximum = None

    def __call__(self, positions_L: jax.Array) -> jax.Array:
        """Returns (L, D) in float32."""
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
        self.maximum = maximum

    def __call__(self, positions_L: jax.Array) -> jax.Array:
        return self.table[...][positions_L]


@dataclass(frozen=True)
class Rotary:
    """Rotary position embedding of the first `rotated` features of every head (Su et al., 2021).

    Feature k of the first half is paired with feature k of the second half, as in Hugging Face's models.
    """

    rotated: int
    theta: float = 10_000.0

    def __call__(self, x_BLHK: jax.Array, positions_L: jax.Array) -> jax.Array:
        half = self.rotated // 2
        frequencies = self.theta ** (-jnp.arange(half) / half)
        angles = (positions_L[:, None].astype(jnp.float32) * frequencies)[:, None]
        cosine, sine = jnp.cos(angles), jnp.sin(angles)
        x = x_BLHK.astype(jnp.float32)
        a, b, rest = jnp.split(x, (half, self.rotated), axis=-1)
        rotated = (a * cosine - b * sine, b * cosine + a * sine, rest)
        return jnp.concatenate(rotated, axis=-1).astype(x_BLHK.dtype)
