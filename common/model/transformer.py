"""Builds transformer blocks, stacks and embeddings from a configuration."""

from functools import partial

import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from common.model.block import Block, Residual, Sublayer
from common.model.embed import Embed
from common.model.feed_forward import FeedForward
from common.model.stack import Stack
from common.sharding import backend


def compute_dtype(name: str) -> jnp.dtype:
    """Returns the dtype of activations. "auto" is bfloat16 on an accelerator and float32 on a CPU."""
    if name == "auto":
        name = "float32" if backend() == "cpu" else "bfloat16"
    return jnp.dtype(name)


def make_block(model: ConfigDict, sublayers: list[Sublayer], *, rngs: nnx.Rngs) -> Block:
    """Returns a block of `sublayers` with the norm position and the dropout of the configuration `model`."""
    options = {"rngs": rngs, "norm_position": model.norm, "dropout_rate": model.dropout}
    return Block([Residual(sublayer, model.width, **options) for sublayer in sublayers])


def feed_forward(model: ConfigDict, *, rngs: nnx.Rngs) -> FeedForward:
    return FeedForward(model.width, model.hidden, rngs=rngs, activation=model.activation)


def attention_block(
    model: ConfigDict, *, rngs: nnx.Rngs, causal: bool = False, cross: bool = False
) -> Block:
    """Returns a block of self-attention, cross-attention if `cross`, and a feed-forward layer.

    The field `attention_dropout` of `model` is optional (default 0).
    """
    from common.model.attention import Attention, CrossAttention

    sizes = model.width, model.heads
    options = {"rngs": rngs, "dropout_rate": model.get("attention_dropout", 0.0)}
    sublayers = [Attention(*sizes, causal=causal, **options)]
    if cross:
        sublayers.append(CrossAttention(*sizes, **options))
    return make_block(model, [*sublayers, feed_forward(model, rngs=rngs)], rngs=rngs)


encoder_block = attention_block
decoder_block = partial(attention_block, causal=True, cross=True)
causal_block = partial(attention_block, causal=True)


def stack(
    model: ConfigDict, blocks: list[Block], *, rngs: nnx.Rngs, skip_rate: float = 0.0
) -> Stack:
    options = {"final_norm": model.norm == "pre", "remat": model.remat, "skip_rate": skip_rate}
    return Stack(blocks, model.width, rngs=rngs, **options)


def embed(model: ConfigDict, vocabulary: int, *, rngs: nnx.Rngs) -> Embed:
    return Embed(
        vocabulary,
        model.width,
        rngs=rngs,
        positions=model.positions,
        maximum=model.max_length,
        dropout_rate=model.dropout,
    )
