"""The encoder-decoder transformer."""

import jax
import jax.numpy as jnp
from flax import nnx

from common.data.special_ids import PAD
from common.model.block import Context
from common.model.decode_cache import CacheSpec
from common.model.dropout import Key, fold
from common.model.embed import Embed
from common.model.stack import Stack


class EncoderDecoder(nnx.Module):
    """The transformer of Vaswani et al. (2017), with tied input and output embeddings of the decoder.

    Args:
      dtype: dtype of activations. Trained parameters and logits are float32.
    """

    def __init__(
        self,
        source_embed: Embed,
        target_embed: Embed,
        encoder: Stack,
        decoder: Stack,
        *,
        dtype: jnp.dtype = jnp.float32,
    ):
        self.source_embed, self.target_embed = source_embed, target_embed
        self.encoder, self.decoder = encoder, decoder
        self.dtype = dtype

    def encode(self, source_BS: jax.Array, key: Key = None) -> Context:
        """Returns the decoder's context: the encoder's output and the number of tokens of each source."""
        lengths_B = jnp.sum(source_BS != PAD, axis=1, dtype=jnp.int32)
        # Rows of padding get length 1, because some attention kernels fail on a row without keys.
        lengths_B = jnp.maximum(lengths_B, 1)
        x_BSD = self.source_embed(source_BS, self.dtype, fold(key, 0))
        with jax.named_scope("encoder"):
            encoded_BSD = self.encoder(x_BSD, Context(lengths_B=lengths_B), fold(key, 1))
        return Context(encoded_BSD=encoded_BSD, encoded_lengths_B=lengths_B)

    def hidden(self, source_BS: jax.Array, lengths_B: jax.Array) -> list[jax.Array]:
        """Returns the embeddings and the output of every encoder block, before the final norm; each (B, S, D)."""
        x_BSD = self.source_embed(source_BS, self.dtype)
        return self.encoder.hidden(x_BSD, Context(lengths_B=jnp.maximum(lengths_B, 1)))

    def __call__(self, source_BS: jax.Array, target_BT: jax.Array, key: Key = None) -> jax.Array:
        """Returns logits (B, T, V) of the token that follows each token of `target_BT` (teacher forcing)."""
        context = self.encode(source_BS, fold(key, 0))
        x_BTD = self.target_embed(target_BT, self.dtype, fold(key, 1))
        with jax.named_scope("decoder"):
            x_BTD = self.decoder(x_BTD, context, fold(key, 2))
        return self.target_embed.logits(x_BTD)

    def cache(self, batch: int, length: int, context: Context) -> list:
        return self.decoder.cache(batch, CacheSpec(length, self.dtype), context)

    def step(
        self, tokens_B: jax.Array, cache: list, index: jax.Array, context: Context
    ) -> tuple[jax.Array, list]:
        """Reads the target tokens at position `index`. Returns logits (B, V) of the next tokens, and the new cache."""
        x_B1D = self.target_embed(tokens_B[:, None], self.dtype, start=index)
        x_B1D, cache = self.decoder.step(x_B1D, cache, index, context)
        return self.target_embed.logits(x_B1D)[:, 0], cache
