"""A transformer encoder."""

import jax
import jax.numpy as jnp
from flax import nnx

from common.model.block import Context
from common.model.dropout import Key, dropout, fold
from common.model.embed import Embed
from common.model.norm import LayerNorm
from common.model.stack import Stack


class Encoder(nnx.Module):
    """Embeddings and a stack of blocks.

    Args:
      embed: the embeddings. `dropout_rate` replaces their own dropout rate.
      norm: norm of the embeddings; None for no norm.
      dropout_rate: dropout of the embeddings, after the norm.
      dtype: dtype of activations; trainable parameters are float32.
    """

    def __init__(
        self,
        embed: Embed,
        norm: LayerNorm | None,
        stack: Stack,
        *,
        dropout_rate: float = 0.0,
        dtype: jnp.dtype = jnp.float32,
    ):
        self.embed, self.norm, self.stack = embed, norm, stack
        self.dropout_rate, self.dtype = dropout_rate, dtype

    def _enter(
        self, tokens_BL: jax.Array, key: Key, types_BL: jax.Array | None = None
    ) -> jax.Array:
        x_BLD = self.embed(tokens_BL, self.dtype, types_BL=types_BL)
        if self.norm is not None:
            x_BLD = self.norm(x_BLD)
        return dropout(x_BLD, self.dropout_rate, key)

    @staticmethod
    def _context(lengths_B: jax.Array) -> Context:
        # Rows that pad the batch get length 1, because some attention kernels fail on a row without keys.
        return Context(lengths_B=jnp.maximum(lengths_B, 1))

    def __call__(
        self,
        tokens_BL: jax.Array,
        lengths_B: jax.Array,
        key: Key = None,
        types_BL: jax.Array | None = None,
    ) -> jax.Array:
        """Returns the output (B, L, D). Positions from `lengths_B` on are padding. For `types_BL` see `Embed`."""
        x_BLD = self._enter(tokens_BL, fold(key, 0), types_BL)
        return self.stack(x_BLD, self._context(lengths_B), fold(key, 1))

    def hidden(self, tokens_BL: jax.Array, lengths_B: jax.Array) -> list[jax.Array]:
        """Returns the input of the stack, then the output of every block, each (B, L, D), without the final norm."""
        return self.stack.hidden(self._enter(tokens_BL, None), self._context(lengths_B))
