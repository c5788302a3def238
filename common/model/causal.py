"""The product of a lower triangular matrix, without the work that its upper half would be.

L positions, C channels.
"""

from functools import partial

import jax
import jax.numpy as jnp

BLOCK = 256
"""Rows of a block of the triangular product: below this a product is too small to gain from skipping."""


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def causal_product(matrix_LL: jax.Array, values_LC: jax.Array, block: int = BLOCK) -> jax.Array:
    """tril(M) v, (L, C) in float32, without most of the upper half.

    Rows go in blocks: each multiplies what lies to its left and its own triangle. With n blocks that is (n + 1) / 2n
    of the dense product, and the same of both gradients.
    """
    return _lower(matrix_LL, values_LC, block)


def dot(a: jax.Array, b: jax.Array, a_axis: int, b_axis: int) -> jax.Array:
    """A product of two matrices over one axis of each, in float32."""
    dimensions = (((a_axis,), (b_axis,)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)


def _blocks(length: int, block: int) -> list[tuple[int, int]]:
    return [(start, min(start + block, length)) for start in range(0, length, block)]


def _seen(rows: tuple[int, int], columns: tuple[int, int]) -> jax.Array:
    """Which of a block's columns lie at or before its rows."""
    return jnp.arange(*columns) <= jnp.arange(*rows)[:, None]


def _lower(matrix_LL, values_LC, block):
    parts = []
    for start, end in _blocks(len(values_LC), block):
        rows = matrix_LL[start:end, :end].astype(values_LC.dtype)
        rows = jnp.where(_seen((start, end), (0, end)), rows, 0)
        parts.append(dot(rows, values_LC[:end], 1, 0))
    return jnp.concatenate(parts)


def _forward(matrix_LL, values_LC, block):
    return _lower(matrix_LL, values_LC, block), (matrix_LL, values_LC)


def _backward(block, residuals, g_LC):
    matrix_LL, values_LC = residuals
    length = len(values_LC)
    g_LC = g_LC.astype(values_LC.dtype)
    matrices, values = [], []
    for start, end in _blocks(length, block):
        own = jnp.where(
            _seen((start, end), (0, end)), dot(g_LC[start:end], values_LC[:end], 1, 1), 0
        )
        matrices.append(jnp.pad(own, ((0, 0), (0, length - end))))
        below = matrix_LL[start:, start:end].astype(values_LC.dtype)
        below = jnp.where(_seen((start, length), (start, end)), below, 0)
        values.append(dot(below, g_LC[start:], 0, 0))
    return (
        jnp.concatenate(matrices).astype(matrix_LL.dtype),
        jnp.concatenate(values).astype(values_LC.dtype),
    )


causal_product.defvjp(_forward, _backward)
