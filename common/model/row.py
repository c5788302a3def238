"""Products of a single row, as every step of decoding makes them.

XLA's CPU backend gives a matrix and a vector to one core, and a batch of them to all. So a matrix becomes a batch of
parts here: parts of its inputs, whose products are added, or parts of its outputs.

X any leading axes, M inputs, N outputs, P parts.
"""

import jax
import jax.numpy as jnp

from common.model.backend import backend

PARTS = 4
"""With 8, matrices that no cache holds take longer again."""


def _parts(size: int) -> int:
    return PARTS if backend() == "cpu" and size % PARTS == 0 else 1


def matvec(x_XM: jax.Array, matrix_XMN: jax.Array) -> jax.Array:
    """x W, (X, N) in float32; leading axes are broadcast."""
    parts = _parts(matrix_XMN.shape[-2])
    x_XPM = x_XM.reshape(*x_XM.shape[:-1], parts, -1)
    *leading, _, outputs = matrix_XMN.shape
    matrix_XPMN = matrix_XMN.reshape(*leading, parts, -1, outputs)
    x_XPM = jnp.broadcast_to(x_XPM, matrix_XPMN.shape[:-1])
    product = jnp.einsum("...m,...mn->...n", x_XPM, matrix_XPMN, preferred_element_type=jnp.float32)
    return product.sum(-2)


def matvec_transposed(x_M: jax.Array, matrix_NM: jax.Array) -> jax.Array:
    """x W, (N,) in float32, of a matrix that is kept with its outputs first."""
    parts = _parts(len(matrix_NM))
    matrix_PNM = matrix_NM.reshape(parts, -1, matrix_NM.shape[1])
    x_PM = jnp.broadcast_to(x_M, (parts, len(x_M)))
    return jnp.einsum("pm,pnm->pn", x_PM, matrix_PNM, preferred_element_type=jnp.float32).reshape(
        -1
    )
