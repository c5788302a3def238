"""The one matrix product of the core, y = x W + b.

B batch, L length, R = B L rows, D inputs, F outputs.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from common.model import initializers
from common.model.row import matvec, matvec_transposed


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def matmul(x_BLD: jax.Array, kernel: jax.Array, transposed: bool = False) -> jax.Array:
    """x W in the precision of x, accumulated and returned in float32.

    The kernel, (D, F) or if `transposed` (F, D), is kept in float32 and rounded to x's type here, so its gradient
    never passes through that type; one that is not trained may be kept in x's type. The three products (forward, input
    gradient, weight gradient) are written out because their form decides their speed on a CPU: forward and input
    gradient want two-dimensional operands, and bfloat16 operands are fast only where the result is float32. See
    `_backward` for the third.
    """
    return _forward(x_BLD, kernel, transposed)[0]


def _rows(x_BLD: jax.Array) -> jax.Array:
    return x_BLD.reshape(-1, x_BLD.shape[-1])


def _dot(a: jax.Array, b: jax.Array, a_axes: tuple[int, ...], b_axes: tuple[int, ...]) -> jax.Array:
    dimensions = ((a_axes, b_axes), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)


def _forward(x_BLD, kernel, transposed):
    x_RD, weight = _rows(x_BLD), kernel.astype(x_BLD.dtype)
    if len(x_RD) == 1:
        y_RF = (matvec_transposed if transposed else matvec)(x_RD[0], weight)
    else:
        y_RF = _dot(x_RD, weight, (1,), (int(transposed),))
    return y_RF.reshape(*x_BLD.shape[:-1], -1), (x_BLD, kernel)


def _backward(transposed, residuals, g_BLF):
    x_BLD, kernel = residuals
    dtype = x_BLD.dtype
    g_BLF = g_BLF.astype(dtype)
    dx_RD = _dot(_rows(g_BLF), kernel.astype(dtype), (1,), (int(not transposed),))
    if dtype == jnp.float32:
        dkernel_DF = _dot(_rows(x_BLD), _rows(g_BLF), (0,), (0,))
    else:
        # A contraction over two axes makes XLA transpose x and then use the fast bfloat16 product, at up to four
        # times the rate of a contraction over the rows. The barrier keeps what follows out of that product.
        axes = tuple(range(x_BLD.ndim - 1))
        dkernel_DF = jax.lax.optimization_barrier(_dot(x_BLD, g_BLF, axes, axes))
    dkernel = dkernel_DF.T if transposed else dkernel_DF
    return dx_RD.reshape(x_BLD.shape).astype(dtype), dkernel.astype(kernel.dtype)


matmul.defvjp(_forward, _backward)


class Linear(nnx.Module):
    """An affine map of the last axis.

    Args:
      axes: logical axes of the kernel, inputs first.
      kernel_init, bias_init: functions (key, shape) -> array; bias_init None leaves the bias out.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        axes: tuple[str | None, str | None],
        *,
        rngs: nnx.Rngs,
        kernel_init=None,
        bias_init=initializers.zeros,
    ):
        kernel_init = kernel_init or initializers.xavier_uniform()
        self.kernel = nnx.Param(kernel_init(rngs.params(), (inputs, outputs)), axes=axes)
        self.bias = (
            nnx.Param(bias_init(rngs.params(), (outputs,)), axes=axes[1:]) if bias_init else None
        )

    def reservoir_draws(self) -> dict[str, tuple]:
        bound = 1 / math.sqrt(self.kernel.shape[0])
        return {"kernel": ("matrix",), "bias": ("uniform", bound)}

    def product(self, x_BLD: jax.Array) -> jax.Array:
        """x W (B, L, F) in float32; a kernel that is no plain variable has a product of its own."""
        if isinstance(self.kernel, nnx.Variable):
            return matmul(x_BLD, self.kernel[...])
        return self.kernel(x_BLD)

    def __call__(
        self, x_BLD: jax.Array, dtype: jnp.dtype | None = None, key: jax.Array | None = None
    ) -> jax.Array:
        """Returns (B, L, F) in `dtype`, by default in the type of x. `key` is for adapters, which have dropout."""
        del key
        y_BLF = self.product(x_BLD)
        if self.bias is not None:
            y_BLF = y_BLF + self.bias[...]
        return y_BLF.astype(dtype or x_BLD.dtype)
