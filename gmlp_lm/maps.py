"""Causal maps over positions with shared weights: Toeplitz matrices, and one matrix for all windows."""

import jax
import jax.numpy as jnp
from flax import nnx

from common.model.spatial import Spatial, dense_product, per_head


def windows(x_BLD: jax.Array, size: int, before: int = 0) -> jax.Array:
    """Cuts the positions into windows; returns (B * windows, `size`, D).

    Zeros fill the last window. With `before`, all positions then move `before` positions to the right: zeros enter at
    the start, and positions beyond the last window are dropped.
    """
    length, channels = x_BLD.shape[1:]
    stop = -(-length // size) * size
    padded = jnp.pad(x_BLD, ((0, 0), (before, stop - length), (0, 0)))
    return padded[:, :stop].reshape(-1, size, channels)


def with_previous(x_BLD: jax.Array, size: int) -> jax.Array:
    """Concatenates each window with the previous window; returns (B * windows, 2 `size`, D).

    The previous window comes first. The first window has zeros instead of a previous window.
    """
    return jnp.concatenate([windows(x_BLD, size, size), windows(x_BLD, size)], axis=1)


def window_mask(size: int) -> jax.Array:
    """Returns the causal mask (W, 2W) of windows of W = `size` positions. Row i is True for columns 0 to W + i.

    Columns 0 to W - 1 are the previous window, the other columns the window of row i.
    """
    return jnp.arange(2 * size) <= jnp.arange(size)[:, None] + size


class Toeplitz(Spatial):
    """A causal Toeplitz matrix: W[m, n] depends on m - n only. A head has `length` weights."""

    def shape(self) -> tuple[int, ...]:
        return (self.heads, self.length)

    def matrices(self, length: int) -> jax.Array:
        distance_LL = jnp.arange(length)[:, None] - jnp.arange(length)
        return self.weight[...][:, distance_LL % self.length]

    def weights_at(self, index: jax.Array, positions_S: jax.Array) -> jax.Array:
        return self.weight[...][:, jnp.maximum(index - positions_S, 0)]


class BlockLocal(Spatial):
    """A causal map in windows of W positions. Each head has W x 2W weights, which all windows share.

    A position reads the whole previous window, and the positions of its own window up to itself.
    """

    def __init__(self, length: int, window: int, *, rngs: nnx.Rngs, **options):
        self.size = window
        super().__init__(length, rngs=rngs, **options)

    def shape(self) -> tuple[int, ...]:
        return (self.heads, self.size, 2 * self.size)

    def rows(self) -> int:
        return self.size

    def __call__(self, values_BLD: jax.Array) -> jax.Array:
        batch, length, channels = values_BLD.shape
        matrices = jnp.where(window_mask(self.size), self.weight[...], 0)
        y = per_head(dense_product, matrices, with_previous(values_BLD, self.size))
        y = y + self.channel_bias(self.bias[...], channels)
        return y.reshape(batch, -1, channels)[:, :length]

    def weights_at(self, index: jax.Array, positions_S: jax.Array) -> jax.Array:
        row_HW = jax.lax.dynamic_index_in_dim(
            self.weight[...], index % self.size, 1, keepdims=False
        )
        column_S = positions_S - self._begin(index)
        weights_HS = row_HW[:, jnp.clip(column_S, 0, 2 * self.size - 1)]
        return jnp.where(column_S >= 0, weights_HS, 0)

    def window(self, index: jax.Array) -> tuple[jax.Array, int]:
        return jnp.maximum(self._begin(index), 0), 2 * self.size

    def _begin(self, index: jax.Array) -> jax.Array:
        """Returns the first position that `index` may read: the start of the previous window. May be negative."""
        return index - index % self.size - self.size
