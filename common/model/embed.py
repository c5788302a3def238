"""Token embeddings with positions, and the output layer that shares their table."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from common.model import initializers, position
from common.model.dropout import dropout
from common.model.linear import matmul


class Embed(nnx.Module):
    """Looks tokens up, scales them by sqrt(width) and adds positions.

    Args:
      positions: "sinusoidal", "learned" or "none".
      maximum: the longest sequence, for learned positions.
      pad: the row of this id starts at zero (fairseq).
      types: kinds of text (BERT's segments), of which every token here has the first; 0 for none.
    """

    def __init__(
        self,
        vocabulary: int,
        width: int,
        *,
        rngs: nnx.Rngs,
        positions: str = "sinusoidal",
        maximum: int = 1024,
        scale: bool = True,
        rate: float = 0.0,
        pad: int | None = 0,
        types: int = 0,
    ):
        draw = initializers.normal(width**-0.5)
        table = draw(rngs.params(), (vocabulary, width))
        if pad is not None:
            table = table.at[pad].set(0)
        self.table = nnx.Param(table, axes=("vocab", "embed"))
        self.scale = math.sqrt(width) if scale else 1.0
        self.rate = rate
        self.positions = {
            "sinusoidal": lambda: position.Sinusoidal(width),
            "learned": lambda: position.Learned(maximum, width, rngs=rngs),
            "none": lambda: None,
        }[positions]()
        self.types = (
            nnx.Param(draw(rngs.params(), (types, width)), axes=(None, "embed")) if types else None
        )

    def __call__(
        self,
        tokens_BL: jax.Array,
        dtype: jnp.dtype,
        key: jax.Array | None = None,
        start: jax.Array | int = 0,
    ) -> jax.Array:
        """Returns (B, L, D); `start` is the position of the first token."""
        # A frozen table may be kept in the type of the computation; the sum is rounded once, whatever it is kept in.
        x_BLD = self.table[...][tokens_BL].astype(jnp.float32) * self.scale
        if self.positions is not None:
            x_BLD = x_BLD + self.positions(start + jnp.arange(tokens_BL.shape[1]))
        if self.types is not None:
            x_BLD = x_BLD + self.types[0]
        return dropout(x_BLD.astype(dtype), self.rate, key)

    def logits(self, x_BLD: jax.Array) -> jax.Array:
        """The tied output layer: (B, L, V) in float32."""
        return matmul(x_BLD, self.table[...], True)
