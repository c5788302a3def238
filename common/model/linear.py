"""The matrix product of every linear layer, y = x W + b."""

import math
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from common.model import initializers


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def matmul(x_BLM: jax.Array, kernel: jax.Array, transposed: bool = False) -> jax.Array:
    """Returns x W (B, L, N), multiplied in the dtype of x, accumulated and returned in float32.

    The kernel is (M, N), or (N, M) if `transposed`. It is cast to the dtype of x here, so its gradient stays in the
    kernel's dtype. Forward and gradients are written out because their form decides their speed on a CPU: the forward
    product and the input gradient are fastest with two-dimensional operands, and bfloat16 operands are fast only if
    the result is float32. See `_backward` for the weight gradient.
    """
    return _forward(x_BLM, kernel, transposed)[0]


def _rows(x_BLM: jax.Array) -> jax.Array:
    return x_BLM.reshape(-1, x_BLM.shape[-1])


def _dot(a: jax.Array, b: jax.Array, a_axes: tuple[int, ...], b_axes: tuple[int, ...]) -> jax.Array:
    dimensions = ((a_axes, b_axes), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)


def _forward(x_BLM, kernel, transposed):
    y_XN = _dot(_rows(x_BLM), kernel.astype(x_BLM.dtype), (1,), (int(transposed),))
    return y_XN.reshape(*x_BLM.shape[:-1], -1), (x_BLM, kernel)


def _backward(transposed, residuals, g_BLN):
    x_BLM, kernel = residuals
    dtype = x_BLM.dtype
    g_BLN = g_BLN.astype(dtype)
    dx_XM = _dot(_rows(g_BLN), kernel.astype(dtype), (1,), (int(not transposed),))
    if dtype == jnp.float32:
        dkernel_MN = _dot(_rows(x_BLM), _rows(g_BLN), (0,), (0,))
    else:
        # Contracting over batch and length makes XLA transpose x and use the fast bfloat16 product: up to four times
        # the FLOP/s of a contraction over rows. The barrier keeps XLA from fusing later operations into the product.
        axes = tuple(range(x_BLM.ndim - 1))
        dkernel_MN = jax.lax.optimization_barrier(_dot(x_BLM, g_BLN, axes, axes))
    dkernel = dkernel_MN.T if transposed else dkernel_MN
    return dx_XM.reshape(x_BLM.shape).astype(dtype), dkernel.astype(kernel.dtype)


matmul.defvjp(_forward, _backward)


class Linear(nnx.Module):
    """An affine map of the last axis.

    Args:
      axes: logical axes of the kernel, inputs first.
      kernel_init, bias_init: functions (key, shape) -> array; bias_init=None leaves the bias out.
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

    def frozen_init(self) -> dict[str, tuple]:
        """Returns the draw (see `common.variables.draw`) of each parameter in a frozen layer."""
        bound = 1 / math.sqrt(self.kernel.shape[0])
        return {"kernel": ("matrix",), "bias": ("uniform", bound)}

    def product(self, x_BLM: jax.Array) -> jax.Array:
        """Returns x W (B, L, N) in float32. A quantized kernel implements its own product."""
        if isinstance(self.kernel, nnx.Variable):
            return matmul(x_BLM, self.kernel[...])
        return self.kernel(x_BLM)

    def __call__(
        self, x_BLM: jax.Array, dtype: jnp.dtype | None = None, key: jax.Array | None = None
    ) -> jax.Array:
        """Returns (B, L, N) in `dtype`, by default the dtype of x. Adapters use `key` for their dropout."""
        del key
        y_BLN = self.product(x_BLM)
        if self.bias is not None:
            y_BLN = y_BLN + self.bias[...]
        return y_BLN.astype(dtype or x_BLM.dtype)
