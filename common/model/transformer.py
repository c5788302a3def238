"""Builds transformer blocks and stacks from a configuration."""

import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from common.model.block import Block, Residual, Sublayer
from common.model.feed_forward import FeedForward
from common.model.norm import LayerNorm
from common.model.stack import Stack
from common.sharding import backend


def compute_dtype(name: str) -> jnp.dtype:
    """Returns the dtype of activations. "auto" is bfloat16 on an accelerator and float32 on a CPU."""
    if name == "auto":
        name = "float32" if backend() == "cpu" else "bfloat16"
    return jnp.dtype(name)


def make_block(model: ConfigDict, sublayers: list[Sublayer], *, rngs: nnx.Rngs) -> Block:
    """Returns a block of `sublayers` with the norm position and the dropout of the configuration `model`."""
    options = {"norm_position": model.norm, "dropout_rate": model.dropout}
    residuals = [
        Residual(sublayer, LayerNorm(model.width, rngs=rngs), **options) for sublayer in sublayers
    ]
    return Block(residuals)


def feed_forward(model: ConfigDict, *, rngs: nnx.Rngs) -> FeedForward:
    return FeedForward(model.width, model.hidden, rngs=rngs, activation=model.activation)


def stack(
    model: ConfigDict, blocks: list[Block], *, rngs: nnx.Rngs, skip_rate: float = 0.0
) -> Stack:
    norm = LayerNorm(model.width, rngs=rngs) if model.norm == "pre" else None
    return Stack(blocks, norm, remat=model.remat, skip_rate=skip_rate)
