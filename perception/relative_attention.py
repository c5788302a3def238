"""Attention with relative positions whose parameters all layers share: MPNet's biases, and DeBERTa's embeddings.

Shape letter of this module: R groups of distances.
"""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from common.model import initializers
from common.model.block import Context
from common.model.dropout import Key, dropout, fold
from common.model.encoder import Encoder
from common.model.norm import LayerNorm
from perception.backbones import Backbone, Relative
from perception.grouped_attention import GroupedAttention


def offsets(length: int) -> np.ndarray:
    """Returns the position of the query minus the position of the key, (T, S)."""
    return np.arange(length)[:, None] - np.arange(length)


def bias_groups(offset_TS: np.ndarray, relative: Relative) -> np.ndarray:
    """Returns the group of each offset, from 0 to R - 1 (Raffel et al., 2020; MPNet).

    Half of the groups are for keys up to the query, half for keys after the query. In each half, small distances have
    their own groups. The logarithms of the limits of the other groups are evenly spaced up to `relative.farthest`.
    """
    side = relative.buckets // 2
    single = side // 2
    distance_TS = np.abs(offset_TS)
    # Compute in float32 like the published implementation, because rounding moves the limits of the groups.
    grown_TS = np.log(np.maximum(distance_TS, 1).astype(np.float32) / np.float32(single))
    grown_TS = grown_TS / np.float32(math.log(relative.farthest / single)) * (side - single)
    far_TS = np.minimum(single + grown_TS.astype(np.int64), side - 1)
    return np.where(offset_TS < 0, side, 0) + np.where(distance_TS < single, distance_TS, far_TS)


def embedding_groups(offset_TS: np.ndarray, relative: Relative) -> np.ndarray:
    """Returns the row of each offset in DeBERTa's table of 2 * `buckets` rows (He et al., 2021).

    Each offset from -buckets / 2 to buckets / 2 has its own row. All other rows are for ranges of offsets. The limits
    of the ranges are evenly spaced in log |offset|, except that the first and the last range have no outer limit.
    """
    middle = relative.buckets // 2
    distance_TS = np.maximum(np.abs(offset_TS), middle).astype(np.float32)
    whole = np.log(np.float32((relative.farthest - 1) / middle))
    grown_TS = np.ceil(np.log(distance_TS / np.float32(middle)) / whole * np.float32(middle - 1))
    far_TS = (grown_TS.astype(np.int64) + middle) * np.sign(offset_TS)
    row_TS = np.where(np.abs(offset_TS) <= middle, offset_TS, far_TS) + relative.buckets
    return np.clip(row_TS, 0, 2 * relative.buckets - 1)


class BiasedAttention(GroupedAttention):
    """Attention with a bias for each head and group of distances. `context.relative` has the biases, (R, H)."""

    def __init__(self, *arguments: int, relative: Relative, **options: object):
        super().__init__(*arguments, **options)
        self.relative = relative

    def _bias(
        self, query_BLHK: jax.Array, key_BLHK: jax.Array, context: Context, key: Key
    ) -> jax.Array:
        group_TS = bias_groups(offsets(query_BLHK.shape[1]), self.relative)
        return context.relative.astype(jnp.float32)[group_TS].transpose(2, 0, 1)[None]


class DisentangledAttention(GroupedAttention):
    """Attention with three products per logit: content-content, content-position, position-content (He et al., 2021).

    `context.relative` has the embeddings of the groups of distances, (R, D). The same matrices project contents and
    distances to queries and keys. The sum of the three products is divided by sqrt(3 K).
    """

    def __init__(self, *arguments: int, relative: Relative, dropout_rate: float, **options: object):
        super().__init__(*arguments, dropout_rate=dropout_rate, **options)
        self.relative = relative

    def _all(
        self, x_BLD: jax.Array, positions_L: jax.Array, key: Key = None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        query, keys, values = super()._all(x_BLD, positions_L, key)
        # `attend` divides the logits by sqrt(K): together, the divisor is sqrt(3 K).
        return query * 3**-0.5, keys, values

    def _bias(
        self, query_BLHK: jax.Array, key_BLHK: jax.Array, context: Context, key: Key
    ) -> jax.Array:
        distances_RD = dropout(context.relative, self.dropout_rate, fold(key, 3), batched=False)
        distances_1RD = distances_RD[None]
        (query_RHK,), (key_RHK,), _ = super()._all(
            distances_1RD, jnp.arange(distances_1RD.shape[1])
        )
        options = {"preferred_element_type": jnp.float32}
        content_BHTR = jnp.einsum("bthk,rhk->bhtr", query_BLHK, key_RHK, **options)
        content_BHSR = jnp.einsum("bshk,rhk->bhsr", key_BLHK, query_RHK * 3**-0.5, **options)
        row_TS = embedding_groups(offsets(query_BLHK.shape[1]), self.relative)
        by_position_BHTS = jnp.take_along_axis(content_BHTR, row_TS[None, None], axis=-1)
        by_content_BHST = jnp.take_along_axis(content_BHSR, row_TS.T[None, None], axis=-1)
        return (by_position_BHTS + by_content_BHST.swapaxes(2, 3)) * self.size**-0.5


KINDS = {"bias": BiasedAttention, "disentangled": DisentangledAttention}


class RelativeTable(nnx.Module):
    """The parameters that all attention layers share: biases (R, H), or embeddings (R, D) with a LayerNorm."""

    def __init__(self, shape: Backbone, *, rngs: nnx.Rngs):
        biases = shape.relative.kind == "bias"
        rows = shape.relative.buckets * (1 if biases else 2)
        columns = shape.heads[0] if biases else shape.width
        table = initializers.zeros(rngs.params(), (rows, columns))
        self.table = nnx.Param(table, axes=(None, None if biases else "embed"))
        self.norm = None if biases else LayerNorm(columns, rngs=rngs, epsilon=shape.epsilon)

    def __call__(self) -> jax.Array:
        """Returns the biases or embeddings for `Context.relative`."""
        return self.table[...] if self.norm is None else self.norm(self.table[...])


class RelativeEncoder(Encoder):
    """An encoder whose attention layers share the parameters of relative positions."""

    def __init__(self, *arguments: nnx.Module, relative: RelativeTable, **options: object):
        super().__init__(*arguments, **options)
        self.relative = relative

    def _context(self, lengths_B: jax.Array) -> Context:
        return replace(super()._context(lengths_B), relative=self.relative().astype(self.dtype))
