"""Linear layers y = x W + b, and their matrix product."""

import math
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from common.model import initializers
from common.model.dropout import Key
from common.model.stored import PRODUCT, stored


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def matmul(x_BLM: jax.Array, kernel: jax.Array, transposed: bool = False) -> jax.Array:
    """Returns x W (B, L, N) in float32. Multiplies in the dtype of x and accumulates in float32.

    `kernel` is W, (M, N). If `transposed`, `kernel` is the transpose of W, (N, M).

    The custom gradient is for speed on a CPU: the forward product and the input gradient are fastest with
    two-dimensional operands, and bfloat16 operands are fast only if the result is float32. See `_backward` for the
    weight gradient.
    """
    return _forward(x_BLM, kernel, transposed)[0]


def _rows(x_BLM: jax.Array) -> jax.Array:
    return x_BLM.reshape(-1, x_BLM.shape[-1])


def dot(a: jax.Array, b: jax.Array, a_axes: tuple[int, ...], b_axes: tuple[int, ...]) -> jax.Array:
    """Returns the product of `a` and `b` in float32, contracted over `a_axes` of a and `b_axes` of b."""
    dimensions = ((a_axes, b_axes), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)


def _forward(x_BLM, kernel, transposed):
    y_XN = dot(_rows(x_BLM), kernel.astype(x_BLM.dtype), (1,), (int(transposed),))
    return y_XN.reshape(*x_BLM.shape[:-1], -1), (x_BLM, kernel)


def _backward(transposed, residuals, g_BLN):
    x_BLM, kernel = residuals
    dtype = x_BLM.dtype
    g_BLN = g_BLN.astype(dtype)
    dx_XM = dot(_rows(g_BLN), kernel.astype(dtype), (1,), (int(not transposed),))
    if dtype == jnp.float32:
        dkernel_MN = dot(_rows(x_BLM), _rows(g_BLN), (0,), (0,))
    else:
        # Contract over the two axes batch and length instead of one flattened axis: on a CPU, XLA then transposes x and
        # uses its fast bfloat16 product, with up to four times the FLOP/s. The barrier stops XLA from fusing later
        # operations into the product.
        axes = tuple(range(x_BLM.ndim - 1))
        dkernel_MN = jax.lax.optimization_barrier(dot(x_BLM, g_BLN, axes, axes))
    dkernel = dkernel_MN.T if transposed else dkernel_MN
    return dx_XM.reshape(x_BLM.shape).astype(dtype), dkernel.astype(kernel.dtype)


matmul.defvjp(_forward, _backward)


class Linear(nnx.Module):
    """Computes x W + b over the last axis of x.

    Args:
      inputs, outputs: sizes M and N of the kernel W.
      axes: logical axes (see `common.sharding`) of the kernel's inputs and outputs.
      kernel_init: function (key, shape) -> array; None for Xavier uniform.
      bias_init: function (key, shape) -> array; None for a layer without a bias.
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
        """Returns {parameter: initializer} for a frozen layer. An initializer is a spec of `common.freezing.draw`.

        `common.freezing.draws` replaces the placeholder ("matrix",) by its argument `matrix`.
        """
        bound = 1 / math.sqrt(self.kernel.shape[0])
        return {"kernel": ("matrix",), "bias": ("uniform", bound)}

    def __call__(
        self, x_BLM: jax.Array, dtype: jnp.dtype | None = None, key: Key = None
    ) -> jax.Array:
        """Returns (B, L, N) in `dtype`, by default the dtype of x. Subclasses use `key` for dropout of adapters."""
        del key
        # A quantized kernel is a module that computes the product itself.
        plain = isinstance(self.kernel, nnx.Variable)
        y_BLN = matmul(x_BLM, self.kernel[...]) if plain else self.kernel(x_BLM)
        if self.bias is not None:
            y_BLN = y_BLN + self.bias[...]
        return stored(y_BLN.astype(dtype or x_BLM.dtype), PRODUCT)
