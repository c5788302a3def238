"""Stacks of blocks, and the encoder-decoder made of two of them.

B batch, S source length, T target length, D width, V vocabulary.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from common.model.block import Block, Context
from common.model.chance import drawn
from common.model.decode_cache import CacheSpec
from common.model.dropout import fold
from common.model.embed import Embed
from common.model.norm import LayerNorm

DROP = 2**16
"""Where a block's key is folded for the draw of LayerDrop: beyond any of its residuals."""


class Stack(nnx.Module):
    """Blocks one after the other, and a final norm for pre-norm blocks.

    Args:
      final_norm: True for LayerNorm, or another norm.
      remat: the blocks' own activations are computed again in the backward pass, where memory is short.
      drop: the probability with which training leaves out each block (LayerDrop, Fan et al., 2020).
    """

    def __init__(
        self,
        blocks: list[Block],
        width: int,
        *,
        rngs: nnx.Rngs,
        final_norm: bool | nnx.Module = True,
        remat: bool = False,
        drop: float = 0.0,
    ):
        self.blocks = nnx.List(blocks)
        if final_norm is True:
            final_norm = LayerNorm(width, rngs=rngs)
        self.norm = final_norm or None
        self.remat, self.drop = remat, drop

    def __call__(
        self, x_BLD: jax.Array, context: Context, key: jax.Array | None = None
    ) -> jax.Array:
        for number, block in enumerate(self.blocks):
            call = jax.checkpoint(block.__call__) if self.remat else block
            own = fold(key, number)
            if own is None or not self.drop:
                x_BLD = call(x_BLD, context, own)
                continue
            # A branch that is not taken is not computed, forward or backward.
            kept = drawn(fold(own, DROP), 1 - self.drop)
            x_BLD = jax.lax.cond(
                kept, lambda x, call=call, own=own: call(x, context, own), lambda x: x, x_BLD
            )
        return x_BLD if self.norm is None else self.norm(x_BLD)

    def hidden(self, x_BLD: jax.Array, context: Context) -> list[jax.Array]:
        """x and what each block makes of it, as the next one reads it: before the final norm, which is no block's."""
        states = [x_BLD]
        for block in self.blocks:
            states.append(block(states[-1], context))
        return states

    def cache(self, batch: int, room: CacheSpec, context: Context) -> list:
        return [block.cache(batch, room, context) for block in self.blocks]

    def step(
        self, x_B1D: jax.Array, cache: list, index: jax.Array, context: Context
    ) -> tuple[jax.Array, list]:
        new = []
        for block, part in zip(self.blocks, cache, strict=True):
            x_B1D, part = block.step(x_B1D, part, index, context)
            new.append(part)
        return x_B1D if self.norm is None else self.norm(x_B1D), new

    def prefill(self, x_BLD: jax.Array, cache: list, context: Context) -> tuple[jax.Array, list]:
        """`step` for all the first tokens at once."""
        new = []
        for block, part in zip(self.blocks, cache, strict=True):
            x_BLD, part = block.prefill(x_BLD, part, context)
            new.append(part)
        return x_BLD if self.norm is None else self.norm(x_BLD), new


class EncoderDecoder(nnx.Module):
    """Vaswani et al. (2017), the decoder's input and output embeddings tied.

    Args:
      pad: id of the padding token; a source ends where its padding starts.
      dtype: the type of activations; parameters, softmax and logits are float32.
    """

    def __init__(
        self,
        source_embed: Embed,
        target_embed: Embed,
        encoder: Stack,
        decoder: Stack,
        *,
        dtype: jnp.dtype = jnp.float32,
        pad: int = 0,
    ):
        self.source_embed = source_embed
        self.target_embed = target_embed
        self.encoder = encoder
        self.decoder = decoder
        self.dtype = dtype
        self.pad = pad

    def encode(self, source_BS: jax.Array, key: jax.Array | None = None) -> Context:
        """Returns the context that the decoder reads."""
        lengths_B = jnp.sum(source_BS != self.pad, axis=1, dtype=jnp.int32)
        # A row of padding only (it fills up a batch) attends to one token, not to none: no 0/0.
        lengths_B = jnp.maximum(lengths_B, 1)
        x_BSD = self.source_embed(source_BS, self.dtype, fold(key, 0))
        memory_BSD = self.encoder(x_BSD, Context(lengths_B=lengths_B), fold(key, 1))
        return Context(memory_BSD=memory_BSD, memory_lengths_B=lengths_B)

    def hidden(self, source_BS: jax.Array, lengths_B: jax.Array) -> list[jax.Array]:
        """The states (B, S, D) behind the source's embeddings and behind every layer of the encoder."""
        x_BSD = self.source_embed(source_BS, self.dtype)
        return self.encoder.hidden(x_BSD, Context(lengths_B=jnp.maximum(lengths_B, 1)))

    def __call__(
        self, source_BS: jax.Array, target_BT: jax.Array, key: jax.Array | None = None
    ) -> jax.Array:
        """Teacher forcing: the logits (B, T, V) of the token after each of `target_BT`."""
        context = self.encode(source_BS, fold(key, 0))
        x_BTD = self.target_embed(target_BT, self.dtype, fold(key, 1))
        return self.target_embed.logits(self.decoder(x_BTD, context, fold(key, 2)))

    def cache(self, batch: int, length: int, context: Context) -> list:
        return self.decoder.cache(batch, CacheSpec(length, self.dtype), context)

    def step(
        self, tokens_B: jax.Array, cache: list, index: jax.Array, context: Context
    ) -> tuple[jax.Array, list]:
        """One decoding step: the logits (B, V) of the token after `tokens_B`, which stands at position `index`."""
        x_B1D = self.target_embed(tokens_B[:, None], self.dtype, start=index)
        x_B1D, cache = self.decoder.step(x_B1D, cache, index, context)
        return self.target_embed.logits(x_B1D)[:, 0], cache
