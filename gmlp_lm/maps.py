"""Maps over positions with fewer weights than `common.model.spatial.Spatial`: Toeplitz matrices and local windows."""

import jax
import jax.numpy as jnp
from flax import nnx

from common.model.spatial import Spatial, dense_product, per_head


class Toeplitz(Spatial):
    """A Toeplitz matrix: W[m, n] depends on m - n only. A head has `length` weights, 2 * `length` - 1 if not causal."""

    def shape(self) -> tuple[int, ...]:
        return (self.heads, self.length if self.causal else 2 * self.length - 1)

    def matrices(self, length: int) -> jax.Array:
        distance_LL = jnp.arange(length)[:, None] - jnp.arange(length)
        # The weight of distance m - n has index m - n. Negative indices count from the end.
        return self.weight[...][:, distance_LL % self.weight.shape[-1]]

    def weights_at(self, index: jax.Array, positions_S: jax.Array) -> jax.Array:
        return self.weight[...][:, jnp.maximum(index - positions_S, 0)]


class BlockLocal(Spatial):
    """A causal map in windows of W positions. Each head has W x 2W weights, which all windows share.

    A position reads the whole previous window, and the positions of its own window up to itself.
    """

    def __init__(self, length: int, window: int, *, rngs: nnx.Rngs, **options):
        if not options.get("causal", True):
            raise ValueError("BlockLocal supports only causal=True")
        self.size = window
        super().__init__(length, rngs=rngs, **options)

    def shape(self) -> tuple[int, ...]:
        return (self.heads, self.size, 2 * self.size)

    def rows(self) -> int:
        return self.size

    def _mask(self) -> jax.Array:
        """Returns the causal mask (W, 2W) of windows of W positions.

        Row i is True for the whole previous window (columns 0 to W - 1) and for positions 0 to i of its own window
        (columns W to W + i).
        """
        return jnp.arange(2 * self.size) <= jnp.arange(self.size)[:, None] + self.size

    def __call__(self, values_BLD: jax.Array) -> jax.Array:
        batch, length, channels = values_BLD.shape
        windows = -(-length // self.size)
        padded = jnp.pad(values_BLD, ((0, 0), (0, windows * self.size - length), (0, 0)))
        own = padded.reshape(batch * windows, self.size, channels)
        before = jnp.pad(padded, ((0, 0), (self.size, 0), (0, 0)))[:, : padded.shape[1]]
        both = jnp.concatenate([before.reshape(own.shape), own], axis=1)
        matrices = jnp.where(self._mask(), self.weight[...], 0)
        y = per_head(dense_product, matrices, both)
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
