"""Token embeddings with positions, and the tied output layer."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from common.model import initializers, position
from common.model.dropout import dropout
from common.model.linear import matmul


class Embed(nnx.Module):
    """Looks up token embeddings, scales them by sqrt(width) and adds positions.

    Args:
      positions: "sinusoidal", "learned" or "none".
      maximum: length of the longest sequence, for learned positions.
      pad: the embedding of this id is initialised with zeros (fairseq).
      types: number of token types (BERT's segments); every token gets type 0. 0 for no types.
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
        dropout_rate: float = 0.0,
        pad: int | None = 0,
        types: int = 0,
    ):
        draw = initializers.normal(width**-0.5)
        table = draw(rngs.params(), (vocabulary, width))
        if pad is not None:
            table = table.at[pad].set(0)
        self.table = nnx.Param(table, axes=("vocab", "embed"))
        self.scale = math.sqrt(width) if scale else 1.0
        self.dropout_rate = dropout_rate
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
        # The sum is rounded once, also if a frozen table is stored in `dtype`.
        x_BLD = self.table[...][tokens_BL].astype(jnp.float32) * self.scale
        if self.positions is not None:
            x_BLD = x_BLD + self.positions(start + jnp.arange(tokens_BL.shape[1]))
        if self.types is not None:
            x_BLD = x_BLD + self.types[0]
        return dropout(x_BLD.astype(dtype), self.dropout_rate, key)

    def logits(self, x_BLD: jax.Array) -> jax.Array:
        """Returns logits (B, L, V) of the tied output layer, in float32."""
        return matmul(x_BLD, self.table[...], True)
