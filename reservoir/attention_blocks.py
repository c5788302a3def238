"""Transformer layers of encoders, decoders and language models: attention and a feed-forward layer."""

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from common.model import transformer
from common.model.attend import attend, attend_cached, cache_layout
from common.model.attention import Attention
from common.model.block import Block, Context
from common.model.dropout import Key

if TYPE_CHECKING:
    from common.model.decode_cache import CacheSpec


class CrossAttention(Attention):
    """Attention over the encoder's output `context.encoded_BSD`. `cache` computes keys and values once for decoding."""

    def __call__(self, x_BTD: jax.Array, context: Context, key: Key = None) -> jax.Array:
        heads = self._split(self.query(x_BTD)), *self._project(context.encoded_BSD)
        options = {"dropout_rate": self.dropout_rate, "key": key}
        return self._merge(attend(*heads, key_lengths_B=context.encoded_lengths_B, **options))

    def cache(self, batch: int, spec: "CacheSpec", context: Context) -> Any:
        return cache_layout(*self._project(context.encoded_BSD))

    def step(
        self, x_X1D: jax.Array, cache: Any, index: jax.Array, context: Context
    ) -> tuple[jax.Array, Any]:
        # All hypotheses of a sentence attend to the same keys, so the cache has one row per sentence.
        x_BTD = x_X1D.reshape(cache[0].shape[0], -1, x_X1D.shape[-1])
        mask_BS = jnp.arange(cache[0].shape[-1]) < context.encoded_lengths_B[:, None]
        query_BTHK = self._split(self.query(x_BTD))
        y_BTHK = attend_cached(query_BTHK, [cache[0]], [cache[1]], [mask_BS[:, None, None]])
        return self._merge(y_BTHK).reshape(x_X1D.shape), cache

    def prefill(self, x_BLD: jax.Array, cache: Any, context: Context) -> Any:
        return cache  # The cache is complete from the start, because it depends on the encoder's output only.


def attention_block(
    model: ConfigDict, *, rngs: nnx.Rngs, causal: bool = False, cross: bool = False
) -> Block:
    """Returns a block of self-attention, cross-attention if `cross`, and a feed-forward layer."""
    sizes = model.width, model.heads
    options = {"rngs": rngs, "dropout_rate": model.get("attention_dropout", 0.0)}
    sublayers = [Attention(*sizes, causal=causal, **options)]
    if cross:
        sublayers.append(CrossAttention(*sizes, **options))
    return transformer.make_block(
        model, [*sublayers, transformer.feed_forward(model, rngs=rngs)], rngs=rngs
    )


encoder_block = attention_block
decoder_block = partial(attention_block, causal=True, cross=True)
causal_block = partial(attention_block, causal=True)
