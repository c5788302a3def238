"""Frozen kernels in 8 or 4 bits, blockwise, below adapters that are trained (QLoRA; Dettmers et al., 2023).

D inputs, F outputs, N blocks along the inputs, K values of a block, S bytes of it.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from common.model.linear import Linear, matmul
from common.variables import Frozen

BLOCK = 64
"""K: as many inputs of one output share a scale."""

KINDS = ("int8", "4bit")

NF4 = (
    *(-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0),
    *(0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0),
)
"""NormalFloat of 4 bits: quantiles of the normal distribution, seven below 0 and eight above, over the largest."""


def quantize(kernel_DF: jax.Array, kind: str) -> tuple[jax.Array, jax.Array]:
    """Codes and the largest absolute value of every block; the last block is filled up with zeros.

    Returns:
      codes (N, S, F) and scales (N, F), float32. "int8": whole numbers from -127 to 127, S = K. "4bit": a byte holds
      the numbers in NF4 of two values, S = K / 2: that of k in its lower half, that of k + S in the upper one.
    """
    inputs, outputs = kernel_DF.shape
    padded = jnp.pad(kernel_DF.astype(jnp.float32), ((0, -inputs % BLOCK), (0, 0)))
    values_NKF = padded.reshape(-1, BLOCK, outputs)
    scales_NF = jnp.abs(values_NKF).max(1)
    values_NKF = values_NKF / jnp.where(scales_NF == 0, 1, scales_NF)[:, None]
    if kind == "int8":
        return jnp.round(127 * values_NKF).astype(jnp.int8), scales_NF
    levels = jnp.asarray(NF4)
    nearest_NKF = jnp.searchsorted((levels[1:] + levels[:-1]) / 2, values_NKF).astype(jnp.uint8)
    lower_NSF, upper_NSF = jnp.split(nearest_NKF, 2, axis=1)
    return lower_NSF | upper_NSF << 4, scales_NF


def dequantize(codes_NSF: jax.Array, scales_NF: jax.Array, inputs: int) -> jax.Array:
    """The kernel (D, F) of `inputs` D in float32; the type of the codes tells their kind."""
    if codes_NSF.dtype == jnp.int8:
        values_NKF = codes_NSF.astype(jnp.float32) / 127
    else:
        numbers_NKF = jnp.concatenate([codes_NSF & 15, codes_NSF >> 4], axis=1)
        values_NKF = jnp.asarray(NF4)[numbers_NKF]
    return (values_NKF * scales_NF[:, None]).reshape(-1, scales_NF.shape[1])[:inputs]


class QuantizedKernel(nnx.Module):
    """What a Linear has in place of its kernel (D, F).

    Blocks are split over devices as the inputs would be, whole ones only, and outputs as outputs. Where the devices do
    not divide the number of blocks, all of them hold the inputs whole.
    """

    def __init__(self, kernel: nnx.Variable, kind: str):
        codes_NSF, scales_NF = quantize(kernel[...], kind)
        from_, to = kernel.get_metadata("axes")
        self.codes = Frozen(codes_NSF, axes=(from_, None, to), draw=None, holds=kernel.shape)
        self.scales = Frozen(scales_NF, axes=(from_, to), draw=None, holds=(0,))
        self.inputs = kernel.shape[0]

    def __getitem__(self, key: object) -> jax.Array:
        """The kernel in float32, or a part of it."""
        return dequantize(self.codes[...], self.scales[...], self.inputs)[key]

    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        """x W as `matmul` has it. The kernel in float32 is made twice a step, forward and backward, and never kept."""

        @jax.checkpoint
        def product(x_BLD: jax.Array, codes_NSF: jax.Array, scales_NF: jax.Array) -> jax.Array:
            return matmul(x_BLD, dequantize(codes_NSF, scales_NF, self.inputs))

        return product(x_BLD, self.codes[...], self.scales[...])


def quantize_frozen(model: nnx.Module, kind: str) -> int:
    """Quantizes the frozen kernels of all linear layers, also of those that have adapters; returns how many."""
    found = 0
    for _, part in list(nnx.iter_modules(model)):
        if isinstance(part, Linear) and isinstance(part.kernel, Frozen):
            part.kernel = QuantizedKernel(part.kernel, kind)
            found += 1
    return found
