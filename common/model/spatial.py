"""Spatial gating: trained matrices that mix positions, causal by default (Liu et al., 2021).

Every map takes values (B, L, D) to (B, L, D) for any L up to its maximum length, and computes a single row for a
decoding step. The heads of a gate are groups of channels with a matrix each: (H, L, L).
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from common.model import initializers
from common.model.decode_cache import DecodeCache
from common.sharding import backend

BLOCK = 256
"""Rows of a block of `causal_product`: smaller products gain nothing from skipping."""

_SPLIT = 4


def _dot(a: jax.Array, b: jax.Array, a_axis: int, b_axis: int) -> jax.Array:
    """Returns the product of two matrices over one axis of each, in float32."""
    dimensions = (((a_axis,), (b_axis,)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def causal_product(matrix_LL: jax.Array, values_LD: jax.Array, block: int = BLOCK) -> jax.Array:
    """Returns tril(M) v, (L, D) in float32, without most products of the upper triangle.

    A block of rows is multiplied with the columns up to its last row. With n blocks that costs (n + 1) / 2n of the
    dense product, as do both gradients.
    """
    return _lower(matrix_LL, values_LD, block)


def _blocks(length: int, block: int) -> list[tuple[int, int]]:
    return [(start, min(start + block, length)) for start in range(0, length, block)]


def _causal_mask(rows: tuple[int, int], columns: tuple[int, int]) -> jax.Array:
    return jnp.arange(*columns) <= jnp.arange(*rows)[:, None]


def _lower(matrix_LL, values_LD, block):
    parts = []
    for start, end in _blocks(len(values_LD), block):
        rows = matrix_LL[start:end, :end].astype(values_LD.dtype)
        rows = jnp.where(_causal_mask((start, end), (0, end)), rows, 0)
        parts.append(_dot(rows, values_LD[:end], 1, 0))
    return jnp.concatenate(parts)


def _forward(matrix_LL, values_LD, block):
    return _lower(matrix_LL, values_LD, block), (matrix_LL, values_LD)


def _backward(block, residuals, g_LD):
    matrix_LL, values_LD = residuals
    length = len(values_LD)
    g_LD = g_LD.astype(values_LD.dtype)
    matrices, values = [], []
    for start, end in _blocks(length, block):
        own = _dot(g_LD[start:end], values_LD[:end], 1, 1)
        own = jnp.where(_causal_mask((start, end), (0, end)), own, 0)
        matrices.append(jnp.pad(own, ((0, 0), (0, length - end))))
        below = matrix_LL[start:, start:end].astype(values_LD.dtype)
        below = jnp.where(_causal_mask((start, length), (start, end)), below, 0)
        values.append(_dot(below, g_LD[start:], 0, 0))
    return (
        jnp.concatenate(matrices).astype(matrix_LL.dtype),
        jnp.concatenate(values).astype(values_LD.dtype),
    )


causal_product.defvjp(_forward, _backward)


def _dense_product(matrix_LL: jax.Array, values_LD: jax.Array) -> jax.Array:
    return _dot(matrix_LL.astype(values_LD.dtype), values_LD, 1, 0)


def _row_product(row_HS: jax.Array, values_BHSD: jax.Array) -> jax.Array:
    """Returns each head's row times its values, (B, H, D) in float32.

    XLA's CPU backend runs one matrix-vector product on one core, but a batch of them on all cores. Splitting the
    positions into a batch halves the time of sampling from a gated MLP on two cores (`benchmarks.gmlp`, 256 bytes).
    """
    *_, positions, channels = values_BHSD.shape
    parts = _SPLIT if backend() == "cpu" and positions % _SPLIT == 0 else 1
    row = row_HS.reshape(len(row_HS), parts, -1)
    values = values_BHSD.reshape(*values_BHSD.shape[:2], parts, -1, channels)
    row = jnp.broadcast_to(row, values.shape[:-1])
    y = jnp.einsum("bhps,bhpsd->bhpd", row, values, preferred_element_type=jnp.float32)
    return y.sum(2)


def _per_head(product, matrices_H, values_BLD: jax.Array) -> jax.Array:
    """Multiplies each head's matrix with its share of the channels."""
    batch, length, channels = values_BLD.shape
    heads = len(matrices_H)
    # Positions first: then every product is of two matrices.
    values_HLD = values_BLD.reshape(batch, length, heads, -1).transpose(2, 1, 0, 3)
    values_HLD = values_HLD.reshape(heads, length, -1)
    y_HLD = jnp.stack([product(m, v) for m, v in zip(matrices_H, values_HLD, strict=True)])
    y_BLHD = y_HLD.reshape(heads, -1, batch, channels // heads).transpose(2, 1, 0, 3)
    return y_BLHD.reshape(batch, -1, channels)


class Spatial(nnx.Module):
    """W v + b over positions. Initially W is near 0 and b = 1, so every gate is open and no positions are mixed.

    Args:
      length: the longest sequence.
      heads: number of matrices; each mixes an equal share of the channels.
      epsilon: W is initialised from U(-epsilon / length, epsilon / length).
      causal: position m sees positions n <= m.
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

    def frozen_init(self) -> dict[str, tuple]:
        """Returns the draw of each parameter in a frozen layer: rows of norm 1, as a matrix near 0 mixes nothing."""
        return {"weight": ("uniform", (3 / self.weight.shape[-1]) ** 0.5), "bias": ("ones",)}

    def shape(self) -> tuple[int, ...]:
        """Returns the shape of the weight."""
        return (self.heads, self.length, self.length)

    def rows(self) -> int:
        """Returns the number of biases per head."""
        return self.length

    def matrices(self, length: int) -> jax.Array:
        """Returns (H, L, L). In a causal map the entries above the diagonal are arbitrary."""
        return self.weight[...][:, :length, :length]

    def biases(self, length: int) -> jax.Array:
        """Returns (H, L)."""
        return self.bias[...][:, :length]

    def __call__(self, values_BLD: jax.Array) -> jax.Array:
        """Returns (B, L, D) in float32. A map that is not causal needs zeros at padding."""
        length = values_BLD.shape[1]
        product = causal_product if self.causal else _dense_product
        y_BLD = _per_head(product, self.matrices(length), values_BLD)
        return y_BLD + self._channel_bias(self.biases(length), values_BLD.shape[-1])

    def _channel_bias(self, bias_HL: jax.Array, channels: int) -> jax.Array:
        """Returns (L, D): each head's bias repeated for its channels."""
        return jnp.repeat(bias_HL.T, channels // self.heads, axis=1)

    def weights_at(self, index: jax.Array, positions_S: jax.Array) -> jax.Array:
        """Returns the weights (H, S) that position `index` gives to `positions_S`; for later positions arbitrary."""
        row_HL = jax.lax.dynamic_index_in_dim(self.weight[...], index, 1, keepdims=False)
        return row_HL[:, jnp.minimum(positions_S, self.length - 1)]

    def window(self, index: jax.Array) -> tuple[jax.Array | None, int]:
        """Returns the first position that position `index` sees (None for all), and how many from there."""
        return None, self.length

    def step(self, cache: DecodeCache, index: jax.Array) -> jax.Array:
        """Returns position `index` of the map, (B, D) in float32, from the cached values (B, H, L, D) up to it."""
        y_BHD = 0
        for part_BHSD, positions_S in cache.parts(*self.window(index)):
            row_HS = jnp.where(positions_S <= index, self.weights_at(index, positions_S), 0)
            y_BHD += _row_product(row_HS.astype(part_BHSD.dtype), part_BHSD)
        bias_H1 = jax.lax.dynamic_index_in_dim(self.bias[...], index % self.rows(), 1)
        return (y_BHD + bias_H1).reshape(len(y_BHD), -1)


class Toeplitz(Spatial):
    """W[m, n] depends on m - n alone: `length` weights per head, or 2 `length` - 1 if the map is not causal."""

    def shape(self) -> tuple[int, ...]:
        return (self.heads, self.length if self.causal else 2 * self.length - 1)

    def matrices(self, length: int) -> jax.Array:
        distance_LL = jnp.arange(length)[:, None] - jnp.arange(length)
        # Weight k belongs to distance k; negative distances are stored from the end.
        return self.weight[...][:, distance_LL % self.weight.shape[-1]]

    def weights_at(self, index: jax.Array, positions_S: jax.Array) -> jax.Array:
        return self.weight[...][:, jnp.maximum(index - positions_S, 0)]


class BlockLocal(Spatial):
    """Windows of W positions: a position sees its window up to itself, and the window before; W x 2 W weights."""

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
        """Returns (W, 2 W)."""
        return jnp.arange(2 * self.size) <= jnp.arange(self.size)[:, None] + self.size

    def __call__(self, values_BLD: jax.Array) -> jax.Array:
        batch, length, channels = values_BLD.shape
        windows = -(-length // self.size)
        padded = jnp.pad(values_BLD, ((0, 0), (0, windows * self.size - length), (0, 0)))
        own = padded.reshape(batch * windows, self.size, channels)
        before = jnp.pad(padded, ((0, 0), (self.size, 0), (0, 0)))[:, : padded.shape[1]]
        both = jnp.concatenate([before.reshape(own.shape), own], axis=1)
        matrices = jnp.where(self._mask(), self.weight[...], 0)
        y = _per_head(_dense_product, matrices, both)
        y = y + self._channel_bias(self.bias[...], channels)
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
        """Returns where the window before the window of `index` begins; negative in the first window."""
        return index - index % self.size - self.size
