"""Transformer blocks from a configuration: the one place where their parts are put together."""

import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from common.model.attention import Attention, CrossAttention
from common.model.backend import backend
from common.model.block import Block, Residual, Sublayer
from common.model.embed import Embed
from common.model.encoder_decoder import Stack
from common.model.feed_forward import FeedForward


def compute_dtype(name: str) -> jnp.dtype:
    """The type of activations; "auto" is bfloat16 on an accelerator and float32 on a CPU."""
    if name == "auto":
        name = "float32" if backend() == "cpu" else "bfloat16"
    return jnp.dtype(name)


def make_block(model: ConfigDict, functions: list[Sublayer], *, rngs: nnx.Rngs) -> Block:
    """Residuals around `functions`, with the placement of norms and the dropout that the model has."""
    options = {"rngs": rngs, "placement": model.norm, "rate": model.dropout}
    return Block([Residual(f, model.width, **options) for f in functions])


def feed_forward(model: ConfigDict, *, rngs: nnx.Rngs) -> FeedForward:
    return FeedForward(model.width, model.hidden, rngs=rngs, activation=model.activation)


def attention(
    model: ConfigDict, kind: type[Attention] = Attention, *, rngs: nnx.Rngs, causal: bool = False
) -> Attention:
    """Without dropout of its weights where the configuration has no such field."""
    rate = model.get("attention_dropout", 0.0)
    return kind(model.width, model.heads, rngs=rngs, causal=causal, rate=rate)


def encoder_block(model: ConfigDict, *, rngs: nnx.Rngs) -> Block:
    mixer = attention(model, rngs=rngs)
    return make_block(model, [mixer, feed_forward(model, rngs=rngs)], rngs=rngs)


def decoder_block(model: ConfigDict, *, rngs: nnx.Rngs) -> Block:
    mixer = attention(model, rngs=rngs, causal=True)
    cross = attention(model, CrossAttention, rngs=rngs)
    return make_block(model, [mixer, cross, feed_forward(model, rngs=rngs)], rngs=rngs)


def causal_block(model: ConfigDict, *, rngs: nnx.Rngs) -> Block:
    """A layer of a language model."""
    mixer = attention(model, rngs=rngs, causal=True)
    return make_block(model, [mixer, feed_forward(model, rngs=rngs)], rngs=rngs)


def stack(model: ConfigDict, blocks: list[Block], *, rngs: nnx.Rngs, drop: float = 0.0) -> Stack:
    options = {"final_norm": model.norm == "pre", "remat": model.remat, "drop": drop}
    return Stack(blocks, model.width, rngs=rngs, **options)


def embed(model: ConfigDict, vocabulary: int, *, rngs: nnx.Rngs) -> Embed:
    return Embed(
        vocabulary,
        model.width,
        rngs=rngs,
        positions=model.positions,
        maximum=model.max_length,
        rate=model.dropout,
    )
