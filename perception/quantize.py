"""Pretrained weights into a model whose frozen kernels are in 8 or 4 bits, and what that costs in precision."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from common import sharding
from common.train.checkpoint import abstract
from common.variables import Params
from perception.quantized import dequantize, quantize

Read = Callable[[Mapping[str, jax.ShapeDtypeStruct]], Params]

CODES, SCALES = "/codes", "/scales"


def load(read: Read, frozen: Mapping[str, nnx.Variable], mesh: Mesh) -> Params:
    """The values of frozen variables, out of weights in float32.

    A kernel is quantized before the next one is read: no more than one is ever in float32.

    Args:
      read: from what is wanted by name to arrays of that shape and place.
      frozen: of the model; some of them are parts of a `QuantizedKernel`.
    """
    kernels = [name.removesuffix(CODES) for name in frozen if name.endswith(CODES)]
    packed = {f"{kernel}{part}" for kernel in kernels for part in (CODES, SCALES)}
    values = read(abstract({n: v for n, v in frozen.items() if n not in packed}, mesh))
    for kernel in kernels:
        names = f"{kernel}{CODES}", f"{kernel}{SCALES}"
        codes = frozen[names[0]]
        shape, (from_, _, to) = codes.get_metadata("holds"), codes.get_metadata("axes")
        place = NamedSharding(mesh, sharding.spec((from_, to), shape, mesh, kernel))
        wanted = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=place)
        where = sharding.shardings({name: frozen[name] for name in names}, mesh)
        pack = jax.jit(quantize, static_argnums=1, out_shardings=tuple(where.values()))
        kind = "int8" if codes.dtype == jnp.int8 else "4bit"
        values |= zip(names, pack(read({kernel: wanted})[kernel], kind), strict=True)
    return values


class Cost(NamedTuple):
    """Of a kernel: bytes before and after, and the norm of the error over that of the kernel."""

    name: str
    before: int
    after: int
    error: float


def costs(read: Read, wanted: Mapping[str, jax.ShapeDtypeStruct], kind: str) -> Iterator[Cost]:
    """Of the kernels among what is wanted, one after the other."""
    for name, one in wanted.items():
        if name.endswith("/kernel"):
            kernel = read({name: one})[name]
            codes, scales, error = _cost(kernel, kind)
            yield Cost(name, kernel.nbytes, codes.nbytes + scales.nbytes, float(error))


@partial(jax.jit, static_argnums=1)
def _cost(kernel_DF: jax.Array, kind: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    codes, scales = quantize(kernel_DF, kind)
    lost_DF = dequantize(codes, scales, len(kernel_DF)) - kernel_DF
    return codes, scales, jnp.linalg.norm(lost_DF) / jnp.linalg.norm(kernel_DF)
