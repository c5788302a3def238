"""Sums over the batch that devices exchange once: each device first sums over its own rows, without communication."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

REDUCE_DTYPES = ("float32", "bfloat16")
"""Dtypes in which gradients can be exchanged."""

_BATCH = "data"
"""Mesh axis over which sums are exchanged. The mesh axis fsdp must have size 1."""


def local_sums(function: Callable, mesh: Mesh, batch: Any, *whole: Any) -> Any:
    """Returns the sums of every shard of the batch, stacked along a new first axis with the sharding of the batch.

    Inside `function` an array of the batch has the rows of one shard. In `common.sharding`, `batch_shard` returns the
    index of the shard, and `sum_over_batch` and `max_over_batch` reduce over all shards. The compiler partitions the
    tensor axis.

    Args:
      function: (batch, *whole) -> tree of sums over the rows of the batch.
      whole: trees of arrays that every shard of the batch reads whole.
    """

    def of_shard(batch: Any, *whole: Any) -> Any:
        return jax.tree.map(lambda x: x[None], function(batch, *whole))

    # Axes of size 1 are manual too: without a tensor axis, the compiler then has nothing to partition.
    axes = {axis for axis in mesh.axis_names if axis == _BATCH or mesh.shape[axis] == 1}
    return jax.shard_map(
        of_shard,
        mesh=mesh,
        in_specs=(P(_BATCH), *(P() for _ in whole)),
        out_specs=P(_BATCH),
        axis_names=axes,
        check_vma=False,  # True would all-reduce a gradient at every use of its array.
    )(batch, *whole)


def add_up(sums: Any, shardings: Any, mesh: Mesh, dtype: str = "float32") -> Any:
    """Adds up the sums of all shards of the batch, made by `local_sums`, with one all-reduce for each array.

    Args:
      shardings: tree with the sharding of each total. The mesh axes of the batch must not split the totals.
      dtype: dtype of the exchange, one of `REDUCE_DTYPES`. Scalars, such as the loss, keep their dtype in the exchange.
        Totals have the dtypes of the sums.
    """

    def total(stacked: jax.Array) -> jax.Array:
        x = stacked[0]
        return jax.lax.psum(x.astype(dtype) if x.ndim else x, _BATCH).astype(x.dtype)

    return jax.shard_map(
        lambda sums: jax.tree.map(total, sums),
        mesh=mesh,
        in_specs=(jax.tree.map(lambda to: P(_BATCH, *to.spec), shardings),),
        out_specs=jax.tree.map(lambda to: to.spec, shardings),
        check_vma=False,
    )(sums)
