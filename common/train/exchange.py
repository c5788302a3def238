"""Sums over the batch that devices exchange once: each device first sums over its own rows, without communication."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from common.sharding import RULES

REDUCE_DTYPES = ("float32", "bfloat16")
"""Dtypes in which gradients can be exchanged."""

_BATCH: tuple[str, ...] = RULES["batch"]
_, _FSDP = _BATCH


def local_sums(function: Callable, mesh: Mesh, batch: Any, *whole: Any) -> Any:
    """Returns the sums of every shard of the batch, stacked along a new first axis with the sharding of the batch.

    Inside `function` an array of the batch has the rows of one shard. The functions `batch_shard`, `sum_over_batch` and
    `max_over_batch` of `common.sharding` tell it about the other shards. The tensor axis stays with the compiler.

    Args:
      function: (batch, *whole) -> tree of sums over the rows of the batch.
      whole: trees of arrays. Shards of the mesh axis fsdp are gathered, once.
    """

    def of_shard(batch: Any, *whole: Any) -> Any:
        return jax.tree.map(lambda x: x[None], function(batch, *whole))

    # Without a tensor axis all axes are manual, and the compiler has nothing to partition.
    axes = {axis for axis in mesh.axis_names if axis in _BATCH or mesh.shape[axis] == 1}
    return jax.shard_map(
        of_shard,
        mesh=mesh,
        in_specs=(P(_BATCH), *(P() for _ in whole)),
        out_specs=P(_BATCH),
        axis_names=axes,
        check_vma=False,  # Otherwise JAX would exchange gradients of whole arrays at every use.
    )(batch, *whole)


def add_up(sums: Any, shardings: Any, mesh: Mesh, dtype: str = "float32") -> Any:
    """Returns the totals of the sums of every shard of the batch (see `local_sums`).

    A total that is split over fsdp is exchanged by a reduce-scatter, all others by an all-reduce.

    Args:
      shardings: tree with the sharding of each total.
      dtype: dtype of the exchange, one of `REDUCE_DTYPES`. Scalars, such as the loss, keep their dtype in the exchange.
        Totals have the dtypes of the sums.
    """
    axes = {axis for axis in _BATCH if mesh.shape[axis] > 1}

    def total(stacked: jax.Array, to: NamedSharding) -> jax.Array:
        x, scattered = stacked[0], axes & {_FSDP} & set(to.spec)
        reduced = x.astype(dtype) if x.ndim else x
        for axis in scattered:
            split = tuple(to.spec).index(axis)
            reduced = jax.lax.psum_scatter(reduced, axis, scatter_dimension=split, tiled=True)
        return jax.lax.psum(reduced, tuple(sorted(axes - scattered))).astype(x.dtype)

    def stacked(to: NamedSharding) -> P:
        return P(_BATCH, *(None if part == _FSDP else part for part in to.spec))

    return jax.shard_map(
        lambda sums: jax.tree.map(total, sums, shardings),
        mesh=mesh,
        in_specs=(jax.tree.map(stacked, shardings),),
        out_specs=jax.tree.map(lambda to: to.spec, shardings),
        check_vma=False,
    )(sums)
