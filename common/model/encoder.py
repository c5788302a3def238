"""A transformer encoder, and masked language modelling (RoBERTa; Liu et al., 2019)."""

import jax
import jax.numpy as jnp
from flax import nnx

from common.model import initializers
from common.model.block import Context
from common.model.dropout import dropout, fold
from common.model.embed import Embed
from common.model.encoder_decoder import Stack
from common.model.feed_forward import ACTIVATIONS
from common.model.linear import Linear
from common.model.norm import LayerNorm


class Encoder(nnx.Module):
    """Embeddings and a stack of blocks.

    Args:
      embed: without dropout, which follows the norm here.
      norm: of the embeddings; None for no norm.
      dropout_rate: dropout of the embeddings.
      dtype: of activations; parameters are float32.
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
        self.dropout_rate = dropout_rate
        self.dtype = dtype

    def _enter(self, tokens_BL: jax.Array, key: jax.Array | None) -> jax.Array:
        x_BLD = self.embed(tokens_BL, self.dtype)
        if self.norm is not None:
            x_BLD = self.norm(x_BLD)
        return dropout(x_BLD, self.dropout_rate, key)

    @staticmethod
    def _context(lengths_B: jax.Array) -> Context:
        # Rows that only fill up a batch have length 1: a softmax over no keys would be 0/0.
        return Context(lengths_B=jnp.maximum(lengths_B, 1))

    def __call__(
        self, tokens_BL: jax.Array, lengths_B: jax.Array, key: jax.Array | None = None
    ) -> jax.Array:
        """Returns the output (B, L, D); positions from `lengths_B` on are padding."""
        x_BLD = self._enter(tokens_BL, fold(key, 0))
        return self.stack(x_BLD, self._context(lengths_B), fold(key, 1))

    def hidden(self, tokens_BL: jax.Array, lengths_B: jax.Array) -> list[jax.Array]:
        """Returns the hidden states (B, L, D): the embeddings and the output of every layer, before the final norm."""
        return self.stack.hidden(self._enter(tokens_BL, None), self._context(lengths_B))


class MaskedHead(nnx.Module):
    """A dense layer with GELU and a norm, then the tied output layer with a bias."""

    def __init__(self, vocabulary: int, width: int, *, rngs: nnx.Rngs):
        self.dense = Linear(width, width, ("embed", None), rngs=rngs)
        self.norm = LayerNorm(width, rngs=rngs)
        self.bias = nnx.Param(initializers.zeros(rngs.params(), (vocabulary,)), axes=("vocab",))

    def __call__(self, x_BLD: jax.Array, embed: Embed) -> jax.Array:
        """Returns logits (B, L, V) in float32."""
        return embed.logits(self.norm(ACTIVATIONS["gelu"](self.dense(x_BLD)))) + self.bias[...]


class MaskedLanguageModel(nnx.Module):
    """An encoder with a head that predicts the masked tokens."""

    def __init__(self, encoder: Encoder, head: MaskedHead):
        self.encoder, self.head = encoder, head

    def __call__(
        self,
        tokens_BL: jax.Array,
        lengths_B: jax.Array,
        masked_positions: jax.Array,
        key: jax.Array | None = None,
    ) -> jax.Array:
        """Returns logits (B, masked, V) at `masked_positions` (B, masked) only."""
        x_BLD = self.encoder(tokens_BL, lengths_B, key)
        x_masked = jnp.take_along_axis(x_BLD, masked_positions[..., None], axis=1)
        return self.head(x_masked, self.encoder.embed)
