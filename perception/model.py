"""A backbone with a classification head on the pooled hidden states (section 2.3)."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from common.model import initializers
from common.model.block import Block, Residual
from common.model.dropout import Key
from common.model.embed import Embed
from common.model.encoder import Encoder
from common.model.feed_forward import FeedForward
from common.model.linear import Linear
from common.model.norm import LayerNorm
from common.model.stack import Stack
from perception.backbones import Backbone
from perception.grouped_attention import GroupedAttention

POOLS = ("masked", "authors")


def _norm(shape: Backbone, rngs: nnx.Rngs) -> nnx.Module:
    kind = LayerNorm
    if shape.norm != "layer":
        from perception.layers import NORMS

        kind = NORMS[shape.norm]
    return kind(shape.width, rngs=rngs, epsilon=shape.epsilon)


def block(shape: Backbone, layer: int, *, rngs: nnx.Rngs) -> Block:
    """Builds one layer of a backbone."""
    residual_rate, _, attention_rate = shape.dropout
    *attention_biases, bias = shape.biases
    rotary = None
    if shape.rotated:
        from perception.layers import Rotary

        rotary = Rotary(shape.rotated, shape.theta_of(layer), shape.stretch)
    attention_kind = GroupedAttention
    if shape.relative:
        from perception.relative_attention import KINDS

        attention_kind = partial(KINDS[shape.relative.kind], relative=shape.relative)
    attention = attention_kind(
        shape.width,
        shape.heads[layer],
        shape.kv_heads[layer],
        shape.size,
        rngs=rngs,
        causal=shape.causal,
        fused=shape.fused,
        biases=tuple(attention_biases),
        rotary=rotary,
        head_norm=shape.epsilon if shape.head_norm else None,
        window=shape.window_of(layer),
        dropout_rate=attention_rate,
    )
    options = {"rngs": rngs, "activation": shape.activation}
    hidden = shape.hidden[layer]
    if shape.gated:
        from perception.layers import GatedFeedForward

        feed_forward = GatedFeedForward(shape.width, hidden, bias=bias, **options)
    else:
        feed_forward = FeedForward(shape.width, hidden, **options)
    functions = [attention, feed_forward]
    if shape.parallel:
        from perception.layers import Parallel

        functions, residual_rate = [Parallel(functions, residual_rate)], 0.0
    return Block(
        [
            Residual(
                function,
                _norm(shape, rngs) if shape.first_norm or layer or number else jax.nn.identity,
                norm_position=shape.norm_position,
                dropout_rate=residual_rate,
            )
            for number, function in enumerate(functions)
        ]
    )


def backbone(
    shape: Backbone, *, rngs: nnx.Rngs, dtype: jnp.dtype = jnp.float32, remat: str = "none"
) -> Encoder:
    """Builds a backbone with random weights. The backbone maps tokens to the hidden states after the last norm."""
    embed = Embed(
        shape.vocabulary,
        shape.width,
        rngs=rngs,
        positions="learned" if shape.learned else "none",
        maximum=shape.learned,
        scale=shape.scaled_embeddings,
        pad=None,
        types=shape.types,
    )
    if shape.first_position:
        from perception.layers import LaterPositions

        embed.positions = LaterPositions(
            shape.learned, shape.width, rngs=rngs, first=shape.first_position
        )
    blocks = [block(shape, layer, rngs=rngs) for layer in range(shape.layers)]
    final_norm = _norm(shape, rngs) if shape.norm_position == "pre" else None
    stack = Stack(blocks, final_norm, remat=remat)
    norm = _norm(shape, rngs) if shape.embedding_norm else None
    options = {"dropout_rate": shape.dropout[1], "dtype": dtype}
    if shape.relative is None:
        encoder = Encoder(embed, norm, stack, **options)
    else:
        from perception.relative_attention import RelativeEncoder, RelativeTable

        table = RelativeTable(shape, rngs=rngs)
        encoder = RelativeEncoder(embed, norm, stack, relative=table, **options)
    initialize(encoder, shape, rngs)
    return encoder


def initialize(encoder: Encoder, shape: Backbone, rngs: nnx.Rngs) -> None:
    """Draws all parameters except norms and the biases of linear layers (see `Backbone.scaled_init`)."""

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
    if shape.relative is not None:
        draw(encoder.relative.table, 0.02)
    if shape.family == "bert":  # the embedding of BERT's padding token, id 0, starts at 0
        encoder.embed.table[...] = encoder.embed.table[...].at[0].set(0)


class PooledClassifier(nnx.Module):
    """Computes class logits from the mean of the encoder's hidden states and the last hidden state.

    Args:
      pool: "masked" ignores padding. "authors" pools over all positions including padding, like the authors' code.
    """

    def __init__(self, encoder: Encoder, width: int, classes: int, pool: str, *, rngs: nnx.Rngs):
        bound = (2 * width) ** -0.5  # default of torch.nn.Linear
        draw = initializers.uniform(bound)
        self.encoder = encoder
        self.head = Linear(
            2 * width, classes, ("embed", None), rngs=rngs, kernel_init=draw, bias_init=draw
        )
        self.pool = pool

    def __call__(
        self,
        tokens_BL: jax.Array,
        lengths_B: jax.Array,
        key: Key = None,
        firsts_B: jax.Array | None = None,
    ) -> jax.Array:
        """Returns logits (B, C) in float32. `pooled` documents `firsts_B`."""
        return self.head(self.pooled(tokens_BL, lengths_B, key, firsts_B), jnp.float32)

    def pooled(
        self,
        tokens_BL: jax.Array,
        lengths_B: jax.Array,
        key: Key = None,
        firsts_B: jax.Array | None = None,
    ) -> jax.Array:
        """Returns the mean of the hidden states over positions and the hidden state of the last position: (B, 2 D).

        Args:
          firsts_B: number of tokens in the first segment of a pair of texts. Later tokens of the pair have the token
            type 1. None for single texts, and for models without token types.
        """
        types_BL = None
        if firsts_B is not None:
            at_L = jnp.arange(tokens_BL.shape[1])
            types_BL = ((firsts_B[:, None] <= at_L) & (at_L < lengths_B[:, None])).astype(jnp.int32)
        x_BLD = self.encoder(tokens_BL, lengths_B, key, types_BL).astype(jnp.float32)
        if self.pool == "authors":
            return jnp.concatenate([x_BLD.mean(1), x_BLD[:, -1]], axis=-1)
        lengths_B1 = jnp.maximum(lengths_B, 1)[:, None]
        inside_BL = jnp.arange(x_BLD.shape[1]) < lengths_B1
        mean_BD = jnp.einsum("bld,bl->bd", x_BLD, inside_BL / lengths_B1)
        last_BD = jnp.take_along_axis(x_BLD, lengths_B1[..., None] - 1, axis=1)[:, 0]
        return jnp.concatenate([mean_BD, last_BD], axis=-1)
