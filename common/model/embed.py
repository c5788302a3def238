"""Token embeddings with positions, and the tied output layer."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from common.model import initializers
from common.model.dropout import Key, dropout
from common.model.linear import matmul


def _positions(kind: str, maximum: int, width: int, rngs: nnx.Rngs) -> nnx.Module | None:
    if kind == "none":
        return None
    from common.model import position

    return {
        "sinusoidal": lambda: position.Sinusoidal(width),
        "learned": lambda: position.Learned(maximum, width, rngs=rngs),
    }[kind]()


class Embed(nnx.Module):
    """Adds embeddings of tokens, positions and token types. Scales token embeddings by sqrt(width) if `scale`.

    Args:
      positions: "sinusoidal", "learned" or "none".
      maximum: maximum sequence length, for learned positions.
      dropout_rate: dropout of the sum of the embeddings.
      pad: token id whose embedding is initialised with zeros, as in fairseq; None to draw all embeddings.
      types: number of BERT's token types (segments); 0 for no token types.
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
        self.positions = _positions(positions, maximum, width, rngs)
        self.types = (
            nnx.Param(draw(rngs.params(), (types, width)), axes=(None, "embed")) if types else None
        )

    @jax.named_scope("embed")
    def __call__(
        self,
        tokens_BL: jax.Array,
        dtype: jnp.dtype,
        key: Key = None,
        start: jax.Array | int = 0,
        types_BL: jax.Array | None = None,
    ) -> jax.Array:
        """Returns embeddings (B, L, D) in `dtype`.

        Args:
          start: position of the first token.
          types_BL: token types; None gives every token the type 0. Not used by a model without token types.
        """
        # Add in float32, so that only the sum is rounded to `dtype`. The cast to float32 is for frozen tables, which
        # may be stored in `dtype`.
        x_BLD = self.table[...][tokens_BL].astype(jnp.float32) * self.scale
        if self.positions is not None:
            x_BLD = x_BLD + self.positions(start + jnp.arange(tokens_BL.shape[1]))
        if self.types is not None:
            x_BLD = x_BLD + self.types[...][0 if types_BL is None else types_BL]
        return dropout(x_BLD.astype(dtype), self.dropout_rate, key)

    @jax.named_scope("logits")
    def logits(self, x_BLD: jax.Array) -> jax.Array:
        """Returns logits (B, L, V) in float32, with the embedding table as output layer."""
        return matmul(x_BLD, self.table[...], True)
