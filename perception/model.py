"""A backbone and a classification head on its pooled states (section 2.3)."""

import jax
import jax.numpy as jnp
from flax import nnx

from common.model import initializers
from common.model.block import Block, Context, Residual, Sublayer
from common.model.dropout import dropout, fold
from common.model.embed import Embed
from common.model.encoder import Encoder
from common.model.encoder_decoder import Stack
from common.model.feed_forward import FeedForward, GatedFeedForward
from common.model.linear import Linear
from common.model.norm import NORMS
from common.model.position import Rotary
from perception.backbones import Backbone
from perception.grouped_attention import GroupedAttention

POOLS = ("masked", "authors")


class Parallel(Sublayer):
    """Sums sublayers that read the same input, each with its own dropout (phi). Does not support decoding."""

    def __init__(self, functions: list[Sublayer], dropout_rate: float):
        self.functions = nnx.List(functions)
        self.dropout_rate = dropout_rate

    def __call__(
        self, x_BLD: jax.Array, context: Context, key: jax.Array | None = None
    ) -> jax.Array:
        return sum(
            dropout(f(x_BLD, context, fold(key, 2 * i)), self.dropout_rate, fold(key, 2 * i + 1))
            for i, f in enumerate(self.functions)
        )


def _norm(shape: Backbone, rngs: nnx.Rngs) -> nnx.Module:
    return NORMS[shape.norm](shape.width, rngs=rngs, epsilon=shape.epsilon)


def block(shape: Backbone, layer: int, *, rngs: nnx.Rngs) -> Block:
    """Builds one layer of a backbone."""
    residual_rate, _, attention_rate = shape.dropout
    *attention_biases, bias = shape.biases
    attention = GroupedAttention(
        shape.width,
        shape.heads[layer],
        shape.kv_heads[layer],
        shape.size,
        rngs=rngs,
        causal=shape.causal,
        fused=shape.fused,
        biases=tuple(attention_biases),
        rotary=Rotary(shape.rotated, shape.theta) if shape.rotated else None,
        head_norm=shape.epsilon if shape.head_norm else None,
        window=shape.window,
        dropout_rate=attention_rate,
    )
    options = {"rngs": rngs, "activation": shape.activation}
    hidden = shape.hidden[layer]
    if shape.gated:
        feed_forward = GatedFeedForward(shape.width, hidden, bias=bias, **options)
    else:
        feed_forward = FeedForward(shape.width, hidden, **options)
    functions = [attention, feed_forward]
    if shape.parallel:
        functions, residual_rate = [Parallel(functions, residual_rate)], 0.0
    return Block(
        [
            Residual(
                function,
                shape.width,
                rngs=rngs,
                norm_position=shape.norm_position,
                dropout_rate=residual_rate,
                norm=_norm(shape, rngs),
            )
            for function in functions
        ]
    )


def backbone(
    shape: Backbone, *, rngs: nnx.Rngs, dtype: jnp.dtype = jnp.float32, remat: bool = False
) -> Encoder:
    """Builds a backbone that maps tokens to the states after the last norm, initialised like the published model."""
    embed = Embed(
        shape.vocabulary,
        shape.width,
        rngs=rngs,
        positions="learned" if shape.learned else "none",
        maximum=shape.learned,
        scale=False,
        pad=None,
        types=shape.types,
    )
    blocks = [block(shape, layer, rngs=rngs) for layer in range(shape.layers)]
    pre = shape.norm_position == "pre"
    stack = Stack(
        blocks,
        shape.width,
        rngs=rngs,
        final_norm=_norm(shape, rngs) if pre else False,
        remat=remat,
    )
    encoder = Encoder(
        embed,
        None if pre else _norm(shape, rngs),
        stack,
        dropout_rate=shape.dropout[1],
        dtype=dtype,
    )
    initialize(encoder, shape, rngs)
    return encoder


def initialize(encoder: Encoder, shape: Backbone, rngs: nnx.Rngs) -> None:
    """Initialises kernels and tables like the published model. Biases keep 0 and norm scales 1."""

    def draw(variable: nnx.Param, deviation: float) -> None:
        variable.set_value(initializers.normal(deviation)(rngs.params(), variable.shape))

    for path, part in nnx.iter_modules(encoder):
        if isinstance(part, Linear):
            deviation = part.kernel.shape[0] ** -0.5 if shape.scaled_init else 0.02
            if shape.scaled_init and path[-1] in ("out", "down"):
                deviation = (2 * shape.layers * shape.width) ** -0.5
            draw(part.kernel, deviation)
    draw(encoder.embed.table, shape.width**-0.5 if shape.scaled_init else 0.02)
    for table in (getattr(encoder.embed.positions, "table", None), encoder.embed.types):
        if table is not None:
            draw(table, 0.02)
    if shape.family == "bert":  # id 0 is padding
        encoder.embed.table[...] = encoder.embed.table[...].at[0].set(0)


class PooledClassifier(nnx.Module):
    """Computes class logits from the mean of the encoder's states and the last state.

    Args:
      pool: "masked" ignores padding. "authors" pools over all positions including padding, like the authors' code.
    """

    def __init__(self, encoder: Encoder, width: int, classes: int, pool: str, *, rngs: nnx.Rngs):
        bound = (2 * width) ** -0.5  # PyTorch's default
        draw = initializers.uniform(bound)
        self.encoder = encoder
        self.head = Linear(
            2 * width, classes, ("embed", None), rngs=rngs, kernel_init=draw, bias_init=draw
        )
        self.pool = pool

    def __call__(
        self, tokens_BL: jax.Array, lengths_B: jax.Array, key: jax.Array | None = None
    ) -> jax.Array:
        """Returns logits (B, C) in float32."""
        return self.head(self.pooled(tokens_BL, lengths_B, key), jnp.float32)

    def pooled(
        self, tokens_BL: jax.Array, lengths_B: jax.Array, key: jax.Array | None = None
    ) -> jax.Array:
        """Returns the mean state and the last state, concatenated: (B, 2 D)."""
        x_BLD = self.encoder(tokens_BL, lengths_B, key).astype(jnp.float32)
        if self.pool == "authors":
            return jnp.concatenate([x_BLD.mean(1), x_BLD[:, -1]], axis=-1)
        lengths_B1 = jnp.maximum(lengths_B, 1)[:, None]
        inside_BL = jnp.arange(x_BLD.shape[1]) < lengths_B1
        mean_BD = jnp.einsum("bld,bl->bd", x_BLD, inside_BL / lengths_B1)
        last_BD = jnp.take_along_axis(x_BLD, lengths_B1[..., None] - 1, axis=1)[:, 0]
        return jnp.concatenate([mean_BD, last_BD], axis=-1)
