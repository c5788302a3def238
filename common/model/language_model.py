"""An autoregressive language model: an embedding, a stack of causal blocks and an output layer."""

import jax
import jax.numpy as jnp
from flax import nnx

from common.model.block import Context
from common.model.dropout import Key, fold
from common.model.embed import Embed
from common.model.linear import Linear
from common.model.stack import Stack


class LanguageModel(nnx.Module):
    """Predicts the next token at every position.

    Args:
      output: the output layer; None to use the embedding table as output layer (tied weights).
      dtype: dtype of activations. Trainable parameters and logits are float32.
    """

    def __init__(
        self,
        embed: Embed,
        stack: Stack,
        output: Linear | None = None,
        *,
        dtype: jnp.dtype = jnp.float32,
    ):
        self.embed, self.stack, self.output = embed, stack, output
        self.dtype = dtype

    def _logits(self, x_BLD: jax.Array) -> jax.Array:
        if self.output is None:
            return self.embed.logits(x_BLD)
        with jax.named_scope("logits"):
            return self.output(x_BLD, jnp.float32)

    def __call__(self, tokens_BL: jax.Array, key: Key = None) -> jax.Array:
        """Returns logits (B, L, V)."""
        return self._logits(self.features(tokens_BL, key))

    def features(self, tokens_BL: jax.Array, key: Key = None) -> jax.Array:
        """Returns the input of the output layer, (B, L, D)."""
        x_BLD = self.embed(tokens_BL, self.dtype, fold(key, 0))
        return self.stack(x_BLD, Context(), fold(key, 1))

    def cache(self, batch: int, length: int, recent: int = 0) -> list:
        """Returns an empty decoding cache for `length` tokens; for `recent` see `CacheSpec`."""
        from common.model.decode_cache import CacheSpec

        return self.stack.cache(batch, CacheSpec(length, self.dtype, recent), Context())

    def step(self, tokens_B: jax.Array, cache: list, index: jax.Array) -> tuple[jax.Array, list]:
        """Reads the tokens at position `index`. Returns logits (B, V) of the next token, and the new cache."""
        x_B1D = self.embed(tokens_B[:, None], self.dtype, start=index)
        x_B1D, cache = self.stack.step(x_B1D, cache, index, Context())
        return self._logits(x_B1D)[:, 0], cache

    def prefill(self, tokens_BL: jax.Array, cache: list) -> tuple[jax.Array, list]:
        """Fills an empty cache with the first L tokens. Returns logits (B, V) of the next token, and the cache."""
        x_BLD = self.embed(tokens_BL, self.dtype)
        x_BLD, cache = self.stack.prefill(x_BLD, cache, Context())
        return self._logits(x_BLD[:, -1:])[:, 0], cache
