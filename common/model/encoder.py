"""An encoder alone, and what predicts masked tokens from it (RoBERTa; Liu et al., 2019).

B batch, L length, M masked positions, D width, V vocabulary.
"""

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
    """Tokens in, a state for each of them out.

    Args:
      embed: without dropout, which comes behind the norm here.
      norm: of the embeddings; None leaves them as they are.
      rate: of dropout of the embeddings.
      dtype: the type of activations; parameters are float32.
    """

    def __init__(
        self,
        embed: Embed,
        norm: LayerNorm | None,
        stack: Stack,
        *,
        rate: float = 0.0,
        dtype: jnp.dtype = jnp.float32,
    ):
        self.embed, self.norm, self.stack = embed, norm, stack
        self.rate = rate
        self.dtype = dtype

    def _enter(self, tokens_BL: jax.Array, key: jax.Array | None) -> jax.Array:
        x_BLD = self.embed(tokens_BL, self.dtype)
        if self.norm is not None:
            x_BLD = self.norm(x_BLD)
        return dropout(x_BLD, self.rate, key)

    @staticmethod
    def _context(lengths_B: jax.Array) -> Context:
        # A row of padding only (it fills up a batch) attends to one token, not to none: no 0/0.
        return Context(lengths_B=jnp.maximum(lengths_B, 1))

    def __call__(
        self, tokens_BL: jax.Array, lengths_B: jax.Array, key: jax.Array | None = None
    ) -> jax.Array:
        """The last states (B, L, D); the tokens behind the first `lengths_B` of a row are not seen."""
        x_BLD = self._enter(tokens_BL, fold(key, 0))
        return self.stack(x_BLD, self._context(lengths_B), fold(key, 1))

    def hidden(self, tokens_BL: jax.Array, lengths_B: jax.Array) -> list[jax.Array]:
        """The states (B, L, D) behind the embeddings and behind every layer, before the final norm."""
        return self.stack.hidden(self._enter(tokens_BL, None), self._context(lengths_B))


class MaskedHead(nnx.Module):
    """The output layer: one more layer of the width, then the table of the embeddings and a bias."""

    def __init__(self, vocabulary: int, width: int, *, rngs: nnx.Rngs):
        self.dense = Linear(width, width, ("embed", None), rngs=rngs)
        self.norm = LayerNorm(width, rngs=rngs)
        self.bias = nnx.Param(initializers.zeros(rngs.params(), (vocabulary,)), axes=("vocab",))

    def __call__(self, x_BMD: jax.Array, embed: Embed) -> jax.Array:
        """Logits (B, M, V) in float32."""
        return embed.logits(self.norm(ACTIVATIONS["gelu"](self.dense(x_BMD)))) + self.bias[...]


class MaskedLanguageModel(nnx.Module):
    """Which tokens stood at some positions, from all the others."""

    def __init__(self, encoder: Encoder, head: MaskedHead):
        self.encoder, self.head = encoder, head

    def __call__(
        self,
        tokens_BL: jax.Array,
        lengths_B: jax.Array,
        places_BM: jax.Array,
        key: jax.Array | None = None,
    ) -> jax.Array:
        """Logits (B, M, V) of the tokens at `places_BM`: the output layer works there and nowhere else."""
        x_BLD = self.encoder(tokens_BL, lengths_B, key)
        x_BMD = jnp.take_along_axis(x_BLD, places_BM[..., None], axis=1)
        return self.head(x_BMD, self.encoder.embed)
