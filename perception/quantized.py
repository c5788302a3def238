"""Block-wise quantization of frozen kernels to 8 or 4 bits (QLoRA; Dettmers et al., 2023).

Shape letters of this module: M inputs and N outputs of a kernel. A block is BLOCK consecutive inputs.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from common import sharding
from common.model.linear import Linear, matmul
from common.variables import Frozen, Params

BLOCK = 64
"""Number of consecutive rows (inputs) of a kernel that share a scale. Each column (output) has its own scales."""

KINDS = ("int8", "4bit", "4bit_minimum")
"""Formats: 8-bit integers; NF4; 16 evenly spaced levels from the smallest to the largest value of an output's block."""

NF4 = (
    *(-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0),
    *(0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0),
)
"""Levels of 4-bit NormalFloat: quantiles of the normal distribution, scaled to [-1, 1]."""


@partial(jax.jit, static_argnames="kind")
def quantize(kernel_MN: jax.Array, kind: str) -> tuple[jax.Array, jax.Array]:
    """Quantizes a kernel in blocks of rows. Pads an incomplete last block with copies of the last row.

    Returns:
      (codes, scales):

      - "int8": codes are int8 (blocks, BLOCK, N) from -127 to 127. Scales are float32 (blocks, N), the largest absolute
        value of each block.
      - "4bit": codes are uint8 (blocks, BLOCK / 2, N). Byte i holds the NF4 indices of value i (low bits) and of value
        i + BLOCK / 2 (high bits). Scales are the same as for "int8".
      - "4bit_minimum": codes are packed as for "4bit". An index counts steps above the smallest value of the block.
        Scales are float32 (blocks, 2, N), the step and the smallest value of each block.
    """
    inputs, outputs = kernel_MN.shape
    padded = jnp.pad(kernel_MN.astype(jnp.float32), ((0, -inputs % BLOCK), (0, 0)), mode="edge")
    values = padded.reshape(-1, BLOCK, outputs)
    if kind == "4bit_minimum":
        minimum = values.min(1)
        step = (values.max(1) - minimum) / 15
        steps = (values - minimum[:, None]) / jnp.where(step == 0, 1, step)[:, None]
        return _packed(jnp.round(steps)), jnp.stack([step, minimum], axis=1)
    scales = jnp.abs(values).max(1)
    values = values / jnp.where(scales == 0, 1, scales)[:, None]
    if kind == "int8":
        return jnp.round(127 * values).astype(jnp.int8), scales
    levels = jnp.asarray(NF4)
    return _packed(jnp.searchsorted((levels[1:] + levels[:-1]) / 2, values)), scales


def _packed(indices: jax.Array) -> jax.Array:
    """Packs indices from 0 to 15, (blocks, BLOCK, N), into uint8 (blocks, BLOCK / 2, N)."""
    lower, upper = jnp.split(indices.astype(jnp.uint8), 2, axis=1)
    return lower | upper << 4


def kind_of(codes: Any, scales: Any) -> str:
    """Returns the format that the dtype of `codes` and the number of dimensions of `scales` imply."""
    if codes.dtype == jnp.int8:
        return "int8"
    return "4bit" if scales.ndim == 2 else "4bit_minimum"


def dequantize(codes: jax.Array, scales: jax.Array, inputs: int) -> jax.Array:
    """Returns the kernel (inputs, N) in float32."""
    kind = kind_of(codes, scales)
    if kind == "int8":
        values = codes.astype(jnp.float32) / 127 * scales[:, None]
    else:
        indices = jnp.concatenate([codes & 15, codes >> 4], axis=1)
        if kind == "4bit":
            values = jnp.asarray(NF4)[indices] * scales[:, None]
        else:
            values = indices.astype(jnp.float32) * scales[:, :1] + scales[:, 1:]
    return values.reshape(-1, codes.shape[-1])[:inputs]


class QuantizedKernel(nnx.Module):
    """Replaces the kernel (M, N) of a `Linear` by codes and scales.

    The axis of blocks is sharded like the kernel's inputs, and the axis of outputs like the kernel's outputs. The axis
    of blocks is replicated if its size is not divisible by the size of the mesh axis. A kernel without the metadata
    `axes` is replicated.
    """

    def __init__(self, kernel: nnx.Variable, kind: str):
        codes, scales = quantize(kernel[...], kind)
        from_, to = kernel.get_metadata("axes", (None, None))
        self.codes = Frozen(codes, axes=(from_, None, to), draw=None, holds=kernel.shape)
        axes = (from_, to) if scales.ndim == 2 else (from_, None, to)
        self.scales = Frozen(scales, axes=axes, draw=None, holds=(0,))
        self.inputs = kernel.shape[0]

    def __getitem__(self, key: object) -> jax.Array:
        """Returns the dequantized kernel in float32, or a slice of it."""
        return dequantize(self.codes[...], self.scales[...], self.inputs)[key]

    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        """Returns x W like `matmul`. The backward pass dequantizes the kernel again, which saves memory."""

        @jax.checkpoint
        def product(x_BLD: jax.Array, codes: jax.Array, scales: jax.Array) -> jax.Array:
            return matmul(x_BLD, dequantize(codes, scales, self.inputs))

        return product(x_BLD, self.codes[...], self.scales[...])


def quantize_frozen(model: nnx.Module, kind: str) -> int:
    """Quantizes the frozen kernels of all `Linear` layers, with or without adapters. Returns the number of kernels."""
    found = 0
    for _, part in list(nnx.iter_modules(model)):
        if isinstance(part, Linear) and isinstance(part.kernel, Frozen):
            part.kernel = QuantizedKernel(part.kernel, kind)
            found += 1
    return found


Read = Callable[[Mapping[str, jax.ShapeDtypeStruct]], Params]
"""Function that reads arrays: {name: shape, dtype and sharding} -> {name: array}."""

CODES, SCALES = "/codes", "/scales"


def load_frozen(read: Read, frozen: Mapping[str, nnx.Variable], mesh: Mesh) -> Params:
    """Reads the frozen variables of a model, and quantizes the kernels that are `QuantizedKernel`s in the model.

    Kernels are read and quantized one after the other, so that not all of them are in float32 at once.

    Args:
      read: function that reads unquantized weights, such as `Pretrained.load`.
      frozen: the model's frozen variables by name, including the parts of each `QuantizedKernel`.
    """
    kernels = [name.removesuffix(CODES) for name in frozen if name.endswith(CODES)]
    packed = {f"{kernel}{part}" for kernel in kernels for part in (CODES, SCALES)}
    values = read(sharding.abstract({n: v for n, v in frozen.items() if n not in packed}, mesh))
    for kernel in kernels:
        names = f"{kernel}{CODES}", f"{kernel}{SCALES}"
        codes = frozen[names[0]]
        shape, (from_, _, to) = codes.get_metadata("holds"), codes.get_metadata("axes")
        unpacked = NamedSharding(mesh, sharding.spec((from_, to), shape, mesh, kernel))
        wanted = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=unpacked)
        shardings = sharding.shardings({name: frozen[name] for name in names}, mesh)
        pack = jax.jit(quantize, static_argnums=1, out_shardings=tuple(shardings.values()))
        kind = kind_of(codes, frozen[names[1]])
        values |= zip(names, pack(read({kernel: wanted})[kernel], kind), strict=True)
    return values


class Cost(NamedTuple):
    """Bytes of a kernel in float32 and quantized, and the relative Frobenius norm of the quantization error."""

    name: str
    before: int
    after: int
    error: float


def costs(read: Read, wanted: Mapping[str, jax.ShapeDtypeStruct], kind: str) -> Iterator[Cost]:
    """Yields the cost of quantizing each kernel in `wanted`, reading one kernel at a time."""
    for name, one in wanted.items():
        if name.endswith("/kernel"):
            kernel = read({name: one})[name]
            codes, scales, error = _cost(kernel, kind)
            yield Cost(name, kernel.nbytes, codes.nbytes + scales.nbytes, float(error))


@partial(jax.jit, static_argnums=1)
def _cost(kernel_MN: jax.Array, kind: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    codes, scales = quantize(kernel_MN, kind)
    error_MN = dequantize(codes, scales, len(kernel_MN)) - kernel_MN
    return codes, scales, jnp.linalg.norm(error_MN) / jnp.linalg.norm(kernel_MN)
