"""Stacks of blocks, and the encoder-decoder transformer."""

from contextlib import AbstractContextManager

import jax
import jax.numpy as jnp
from flax import nnx

from common.model.block import Block, Context
from common.model.decode_cache import CacheSpec
from common.model.dropout import fold
from common.model.embed import Embed
from common.model.norm import LayerNorm

_SKIP = 2**16
"""What a block's key is folded with to draw whether the block is skipped: more than its number of residuals."""


def branch_probability(probability: float) -> AbstractContextManager:
    """Names the scope of a random `jax.lax.cond` after the probability of its true branch.

    `common.train.flops` reads the name and counts the branches with their expectation.
    """
    return jax.named_scope(f"branch_probability={probability!r}")


class Stack(nnx.Module):
    """A sequence of blocks, and a final norm for pre-norm blocks.

    Args:
      final_norm: True for LayerNorm, or another norm.
      remat: recompute the activations within each block in the backward pass, to save memory.
      skip_rate: probability with which training skips each block (Fan et al., 2020).
    """

    def __init__(
        self,
        blocks: list[Block],
        width: int,
        *,
        rngs: nnx.Rngs,
        final_norm: bool | nnx.Module = True,
        remat: bool = False,
        skip_rate: float = 0.0,
    ):
        self.blocks = nnx.List(blocks)
        if final_norm is True:
            final_norm = LayerNorm(width, rngs=rngs)
        self.norm = final_norm or None
        self.remat, self.skip_rate = remat, skip_rate

    def __call__(
        self, x_BLD: jax.Array, context: Context, key: jax.Array | None = None
    ) -> jax.Array:
        for number, block in enumerate(self.blocks):
            call = jax.checkpoint(block.__call__) if self.remat else block
            own = fold(key, number)
            if own is None or not self.skip_rate:
                x_BLD = call(x_BLD, context, own)
                continue
            # A skipped block costs nothing, forward or backward.
            kept = jax.random.bernoulli(fold(own, _SKIP), 1 - self.skip_rate)
            with branch_probability(1 - self.skip_rate):
                x_BLD = jax.lax.cond(
                    kept, lambda x, call=call, own=own: call(x, context, own), lambda x: x, x_BLD
                )
        return x_BLD if self.norm is None else self.norm(x_BLD)

    def hidden(self, x_BLD: jax.Array, context: Context) -> list[jax.Array]:
        """Returns x and the output (B, L, D) of every block, before the final norm."""
        states = [x_BLD]
        for block in self.blocks:
            states.append(block(states[-1], context))
        return states

    def cache(self, batch: int, spec: CacheSpec, context: Context) -> list:
        return [block.cache(batch, spec, context) for block in self.blocks]

    def step(
        self, x_B1D: jax.Array, cache: list, index: jax.Array, context: Context
    ) -> tuple[jax.Array, list]:
        new = []
        for block, part in zip(self.blocks, cache, strict=True):
            x_B1D, part = block.step(x_B1D, part, index, context)
            new.append(part)
        return x_B1D if self.norm is None else self.norm(x_B1D), new

    def prefill(self, x_BLD: jax.Array, cache: list, context: Context) -> tuple[jax.Array, list]:
        """Returns the output (B, L, D) of the first L tokens and the filled cache."""
        new = []
        for block, part in zip(self.blocks, cache, strict=True):
            x_BLD, part = block.prefill(x_BLD, part, context)
            new.append(part)
        return x_BLD if self.norm is None else self.norm(x_BLD), new


class EncoderDecoder(nnx.Module):
    """The transformer of Vaswani et al. (2017), with tied input and output embeddings of the decoder.

    Args:
      pad: id of the padding token.
      dtype: of activations; parameters, softmax and logits are float32.
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
        """Returns the decoder's context: the encoder's output and its lengths."""
        lengths_B = jnp.sum(source_BS != self.pad, axis=1, dtype=jnp.int32)
        # Rows that only fill up a batch have length 1: a softmax over no keys would be 0/0.
        lengths_B = jnp.maximum(lengths_B, 1)
        x_BSD = self.source_embed(source_BS, self.dtype, fold(key, 0))
        encoded_BSD = self.encoder(x_BSD, Context(lengths_B=lengths_B), fold(key, 1))
        return Context(encoded_BSD=encoded_BSD, encoded_lengths_B=lengths_B)

    def hidden(self, source_BS: jax.Array, lengths_B: jax.Array) -> list[jax.Array]:
        """Returns the hidden states (B, S, D) of the encoder: the embeddings and the output of every layer."""
        x_BSD = self.source_embed(source_BS, self.dtype)
        return self.encoder.hidden(x_BSD, Context(lengths_B=jnp.maximum(lengths_B, 1)))

    def __call__(
        self, source_BS: jax.Array, target_BT: jax.Array, key: jax.Array | None = None
    ) -> jax.Array:
        """Teacher forcing: returns logits (B, T, V) of the token that follows each token of `target_BT`."""
        context = self.encode(source_BS, fold(key, 0))
        x_BTD = self.target_embed(target_BT, self.dtype, fold(key, 1))
        return self.target_embed.logits(self.decoder(x_BTD, context, fold(key, 2)))

    def cache(self, batch: int, length: int, context: Context) -> list:
        return self.decoder.cache(batch, CacheSpec(length, self.dtype), context)

    def step(
        self, tokens_B: jax.Array, cache: list, index: jax.Array, context: Context
    ) -> tuple[jax.Array, list]:
        """Returns logits (B, V) of the token after `tokens_B`, which has position `index`, and the new cache."""
        x_B1D = self.target_embed(tokens_B[:, None], self.dtype, start=index)
        x_B1D, cache = self.decoder.step(x_B1D, cache, index, context)
        return self.target_embed.logits(x_B1D)[:, 0], cache
