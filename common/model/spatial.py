"""Mixing over positions by fixed matrices: products that skip what causality hides, and the parameters behind them.

B batch, L length, N the longest length, C channels, H gate heads, W window.

gMLP (Liu et al., 2021) mixes positions by a trained matrix in place of attention. Every form here maps values
(B, L, C) to (B, L, C) for any L up to N, has one row for a decoding step, and is causal unless it is told otherwise.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from common.model import initializers
from common.model.causal import causal_product, dot
from common.model.decode_cache import DecodeCache
from common.model.row import matvec


def _per_head(product, matrices_H, values_BLC: jax.Array) -> jax.Array:
    """Each head's matrix over its share of the channels; positions first, so that every product is of two matrices."""
    batch, length, channels = values_BLC.shape
    heads = len(matrices_H)
    values_HLC = values_BLC.reshape(batch, length, heads, -1).transpose(2, 1, 0, 3)
    values_HLC = values_HLC.reshape(heads, length, -1)
    y_HMC = jnp.stack([product(m, v) for m, v in zip(matrices_H, values_HLC, strict=True)])
    y_BMHC = y_HMC.reshape(heads, -1, batch, channels // heads).transpose(2, 1, 0, 3)
    return y_BMHC.reshape(batch, -1, channels)


class Spatial(nnx.Module):
    """W v + b over positions, W near 0 and b = 1: at the start every gate is open and no position sees another.

    Args:
      length: N.
      heads: matrices, each for an equal share of the channels.
      epsilon: W starts in U(-epsilon / N, epsilon / N).
      causal: position m sees n <= m.
    """

    def __init__(
        self,
        length: int,
        *,
        rngs: nnx.Rngs,
        heads: int = 1,
        epsilon: float = 1e-3,
        causal: bool = True,
    ):
        self.length, self.heads, self.causal = length, heads, causal
        shape = self.shape()
        start = initializers.uniform(epsilon / shape[-1]) if epsilon else initializers.zeros
        self.weight = nnx.Param(
            start(rngs.params(), shape), axes=(None,) + ("position",) * (len(shape) - 1)
        )
        bias_shape = (heads, self.rows())
        self.bias = nnx.Param(initializers.ones(rngs.params(), bias_shape), axes=(None, "position"))

    def reservoir_draws(self) -> dict[str, tuple]:
        """A matrix near 0 that is never trained would mix nothing: rows of norm about 1, gates around their bias."""
        return {"weight": ("uniform", (3 / self.weight.shape[-1]) ** 0.5), "bias": ("ones",)}

    def shape(self) -> tuple[int, ...]:
        """Of the weight."""
        return (self.heads, self.length, self.length)

    def rows(self) -> int:
        """Biases per head."""
        return self.length

    def matrices(self, length: int) -> jax.Array:
        """(H, L, L); above the diagonal anything may stand where the map is causal."""
        return self.weight[...][:, :length, :length]

    def biases(self, length: int) -> jax.Array:
        """(H, L)."""
        return self.bias[...][:, :length]

    def __call__(self, values_BLC: jax.Array) -> jax.Array:
        """(B, L, C) in float32. Padding has to be zero where the map is not causal."""
        length = values_BLC.shape[1]
        product = causal_product if self.causal else _dense_product
        y_BLC = _per_head(product, self.matrices(length), values_BLC)
        return y_BLC + self._spread(self.biases(length), values_BLC.shape[-1])

    def _spread(self, bias_HL: jax.Array, channels: int) -> jax.Array:
        """(L, C): a head's bias for its channels."""
        return jnp.repeat(bias_HL.T, channels // self.heads, axis=1)

    def taken(self, index: jax.Array, positions_S: jax.Array) -> jax.Array:
        """What position `index` takes of each of these positions, (H, S); of those behind it nothing counts."""
        row_HN = jax.lax.dynamic_index_in_dim(self.weight[...], index, 1, keepdims=False)
        return row_HN[:, jnp.minimum(positions_S, self.length - 1)]

    def reach(self, index: jax.Array) -> tuple[jax.Array | None, int]:
        """The first position that `index` takes anything of, and of how many from there; None is all."""
        return None, self.length

    def step(self, values_BHNC: DecodeCache, index: jax.Array) -> jax.Array:
        """Position `index` of the map, (B, C) in float32, from the values of each head up to it."""
        y_BHC = 0
        for part_BHSC, positions_S in values_BHNC.parts(*self.reach(index)):
            row_HS = jnp.where(positions_S <= index, self.taken(index, positions_S), 0)
            y_BHC += matvec(row_HS.astype(part_BHSC.dtype), part_BHSC)
        bias_H1 = jax.lax.dynamic_index_in_dim(self.bias[...], index % self.rows(), 1)
        return (y_BHC + bias_H1).reshape(len(y_BHC), -1)


def _dense_product(matrix_LL: jax.Array, values_LC: jax.Array) -> jax.Array:
    return dot(matrix_LL.astype(values_LC.dtype), values_LC, 1, 0)


class Toeplitz(Spatial):
    """W[m, n] depends on m - n alone (appendix C of gMLP): N weights, or 2 N - 1 where both sides are seen."""

    def shape(self) -> tuple[int, ...]:
        return (self.heads, self.length if self.causal else 2 * self.length - 1)

    def matrices(self, length: int) -> jax.Array:
        distance_LL = jnp.arange(length)[:, None] - jnp.arange(length)
        # Weight k is that of distance k; the negative distances of a map that is not causal follow from the end.
        return self.weight[...][:, distance_LL % self.weight.shape[-1]]

    def taken(self, index: jax.Array, positions_S: jax.Array) -> jax.Array:
        return self.weight[...][:, jnp.maximum(index - positions_S, 0)]


class BlockLocal(Spatial):
    """Positions in windows of W: each sees its own window up to itself, and the one before; W x 2 W weights.

    The matrices of g-mlp-gpt, from which the paper's code comes.
    """

    def __init__(self, length: int, window: int, *, rngs: nnx.Rngs, **options):
        if not options.get("causal", True):
            raise ValueError("windows are causal")
        self.window = window
        super().__init__(length, rngs=rngs, **options)

    def shape(self) -> tuple[int, ...]:
        return (self.heads, self.window, 2 * self.window)

    def rows(self) -> int:
        return self.window

    def _seen(self) -> jax.Array:
        """(W, 2 W)."""
        return jnp.arange(2 * self.window) <= jnp.arange(self.window)[:, None] + self.window

    def __call__(self, values_BLC: jax.Array) -> jax.Array:
        batch, length, channels = values_BLC.shape
        windows = -(-length // self.window)
        padded = jnp.pad(values_BLC, ((0, 0), (0, windows * self.window - length), (0, 0)))
        own = padded.reshape(batch * windows, self.window, channels)
        before = jnp.pad(padded, ((0, 0), (self.window, 0), (0, 0)))[:, : padded.shape[1]]
        both = jnp.concatenate([before.reshape(own.shape), own], axis=1)
        matrices = jnp.where(self._seen(), self.weight[...], 0)
        y = _per_head(_dense_product, matrices, both) + self._spread(self.bias[...], channels)
        return y.reshape(batch, -1, channels)[:, :length]

    def taken(self, index: jax.Array, positions_S: jax.Array) -> jax.Array:
        row_HW = jax.lax.dynamic_index_in_dim(
            self.weight[...], index % self.window, 1, keepdims=False
        )
        column_S = positions_S - self._begin(index)
        taken_HS = row_HW[:, jnp.clip(column_S, 0, 2 * self.window - 1)]
        return jnp.where(column_S >= 0, taken_HS, 0)

    def reach(self, index: jax.Array) -> tuple[jax.Array, int]:
        return jnp.maximum(self._begin(index), 0), 2 * self.window

    def _begin(self, index: jax.Array) -> jax.Array:
        """Where the window before that of `index` begins."""
        return index - index % self.window - self.window
