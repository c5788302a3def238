"""Sums losses and gradients over the batch with one exchange between devices: each device first sums its own rows.

If a parameter is split over the mesh axis fsdp, each device holds one shard of it, and gathers the shards over fsdp
whenever the model reads the parameter. The mesh axis tensor still splits the gathered parameter. With
rematerialization, the backward pass gathers the shards again.

A scan over layers (`common.model.scan`) gathers the parameters of one layer at a time. Unless blocks are
rematerialized, the scan stores the gathered parameters for the backward pass. Without gradient accumulation, the
backward pass of a scan reduce-scatters the gradients of one layer at a time, so that no device ever holds the whole
gradients of all layers.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from common.model.linear import Linear
from common.model.stored import stored
from common.sharding import RULES
from common.variables import AbstractModel, Frozen, Params

BATCH = RULES["batch"]
"""Mesh axes that split the batch. Losses and gradients are summed over these axes."""

_SPLIT = "fsdp"
"""The mesh axis that splits parameters as well as the batch."""


def local_sums(
    function: Callable, mesh: Mesh, batch: Any, *arguments: Any, shardings: Any = ()
) -> Any:
    """Calls `function` on each shard of the batch, and stacks the results of all shards along a new first axis.

    The new axis has the sharding of the batch. Inside `function`, an array of the batch has only the rows of one shard.
    There, `common.sharding.batch_shard` returns the index of the shard, and `sum_over_batch` and `max_over_batch`
    reduce over all shards. The compiler partitions the computation over the tensor axis.

    Args:
      function: (batch, *arguments) -> tree of sums over the rows of the batch.
      arguments: trees of arrays.
      shardings: trees of shardings, one for each of the first `len(shardings)` arguments. If fsdp splits an array of
        these arguments, `function` gets one shard of the array. It gets all other arrays of `arguments` whole.
    """

    def of_shard(batch: Any, *arguments: Any) -> Any:
        return jax.tree.map(lambda x: x[None], function(batch, *arguments))

    split = jax.tree.map(lambda sharding: _only(sharding.spec, _SPLIT), tuple(shardings))
    whole = (P(),) * (len(arguments) - len(split))
    # The batch axes are manual, and so is every axis of size 1. If the tensor axis has size 1, all axes are thus
    # manual, and the compiler has nothing to partition.
    axes = {axis for axis in mesh.axis_names if axis in BATCH or mesh.shape[axis] == 1}
    return jax.shard_map(
        of_shard,
        mesh=mesh,
        in_specs=(P(BATCH), *split, *whole),
        out_specs=P(BATCH),
        axis_names=axes,
        check_vma=False,  # With True, every use of an array would all-reduce its gradient.
    )(batch, *arguments)


def add_up(sums: Any, shardings: Any, mesh: Mesh, dtype: str, scattered: Collection[str]) -> Any:
    """Adds up the results of `local_sums` over all shards of the batch.

    Totals that are split over fsdp are reduce-scattered over fsdp, then all-reduced over data. All other totals are
    all-reduced over data and fsdp.

    Args:
      shardings: tree with the sharding of each total.
      dtype: dtype of the exchange, float32 or bfloat16. Scalars, such as the loss, keep their dtype in the exchange;
        the stacked scalars of several layers do not. Totals have the dtypes of the sums.
      scattered: names (keys of dictionaries in `sums`) of stacked parameters. If fsdp splits such a parameter, the
        backward pass has already reduce-scattered its gradient (see `gathering`).
    """

    def total(path: tuple, stacked: jax.Array, sharding: NamedSharding) -> jax.Array:
        x, axes = stacked[0], BATCH
        y = x.astype(dtype) if x.ndim else x
        dimension = split_dimension(sharding)
        if dimension is not None:
            if not (path and path[-1].key in scattered):
                y = _reduce_scatter(y, dimension)
            axes = tuple(axis for axis in BATCH if axis != _SPLIT)
        return jax.lax.psum(y, axes).astype(x.dtype)

    tensor = jax.tree.map(lambda sharding: P(BATCH, *_only(sharding.spec, "tensor")), shardings)
    return jax.shard_map(
        lambda sums: jax.tree.map_with_path(total, sums, shardings),
        mesh=mesh,
        in_specs=(tensor,),
        out_specs=jax.tree.map(lambda sharding: sharding.spec, shardings),
        check_vma=False,
    )(sums)


def _reduce_scatter(x: jax.Array, dimension: int) -> jax.Array:
    """Returns this device's shard of the sum of x over fsdp. The sum is split along `dimension`.

    Lays out x so that each shard is contiguous in memory. Otherwise the TPU compiler would replace the reduce-scatter
    by an all-reduce of the whole array, in which a device receives twice the bytes.
    """
    order = (dimension, *(d for d in range(x.ndim) if d != dimension))
    x = with_layout_constraint(x, Layout(order))
    return jax.lax.psum_scatter(x, _SPLIT, scatter_dimension=dimension, tiled=True)


def split_dimension(sharding: NamedSharding) -> int | None:
    """Returns the dimension along which fsdp splits an array; None if fsdp does not split the array."""
    axes = list(sharding.spec)
    return axes.index(_SPLIT) if _SPLIT in axes and sharding.mesh.shape[_SPLIT] > 1 else None


def _only(spec: P, axis: str) -> P:
    return P(*(axis if name == axis else None for name in spec))


def gathering(
    abstract_model: AbstractModel,
    trainable: Params,
    frozen: Params,
    shardings: Sequence[Mapping[str, NamedSharding]],
    scattered: Mapping[str, str],
) -> tuple[Params, Callable[[Params], nnx.Module]]:
    """Returns stand-ins (the arrays to differentiate by) and a function that builds the model from the stand-ins.

    Call `gathering` inside the function that `local_sums` runs.

    Args:
      trainable, frozen: {path: shard of this device}.
      shardings: {path: sharding} of the trainable values, and {path: sharding} of the frozen values.
      scattered: {path: dtype of the exchange} of stacked parameters. The backward pass of a scan reduce-scatters their
        gradients.

    Returns:
      (stand-ins, build) with stand-ins {path: array of zeros}. The model reads the gathered parameter in place of the
      zeros. A stand-in has the shape of the whole parameter, and its gradient is a sum over the rows of this device.
      But a stand-in with a path in `scattered` has the shape of this device's shard. If fsdp splits this parameter, the
      gradient of the stand-in is this device's shard of the sum over fsdp.
    """
    shards, shardings = trainable | frozen, {**shardings[0], **shardings[1]}
    stand_ins, constants = (
        {name: jnp.zeros(x.shape, kind[name].dtype) for name, x in shapes.items()}
        for shapes, kind in zip(abstract_model.shapes(), (trainable, frozen), strict=True)
    )
    stand_ins |= {name: jnp.zeros_like(trainable[name]) for name in scattered}

    def build(stand_ins: Params) -> nnx.Module:
        model = abstract_model.build(stand_ins, constants)
        dtypes = kernel_dtypes(model)
        for path, part in nnx.iter_graph(model):
            name = "/".join(map(str, path))
            if name in shards:
                dtype = dtypes.get(name, shards[name].dtype)
                reader = Reader(shards[name], shardings[name], dtype, scattered.get(name))
                part.set_metadata("on_get_value", reader)
        return model

    return stand_ins, build


@dataclasses.dataclass(frozen=True)
class Reader:
    """A hook `on_get_value` for a variable whose value is a stand-in (see `gathering`).

    The hook returns the whole parameter instead of the stand-in. If fsdp splits the parameter, the hook gathers the
    shards in `dtype`, and casts the result to the dtype of the shard.

    Attributes:
      shard: this device's shard of the parameter.
      sharding: sharding of the parameter.
      exchange: dtype in which the backward pass reduce-scatters the gradient over fsdp; None: the gradient of the
        stand-in is the gradient of the whole parameter.
    """

    shard: jax.Array
    sharding: NamedSharding
    dtype: jnp.dtype
    exchange: str | None

    def __call__(self, variable: nnx.Variable, stand_in: jax.Array) -> jax.Array:
        dimension = split_dimension(self.sharding)
        gather = self._keep_tensor(
            partial(jax.lax.all_gather, axis_name=_SPLIT, axis=dimension, tiled=True)
        )
        scatter = self._keep_tensor(partial(_reduce_scatter, dimension=dimension))

        def whole(stand_in: jax.Array, shard: jax.Array) -> jax.Array:
            del stand_in
            if dimension is None:
                return shard
            with jax.named_scope("gather"):
                return stored(gather(shard.astype(self.dtype))).astype(shard.dtype)

        if isinstance(variable, Frozen):  # has no gradient
            return whole(stand_in, self.shard)

        def backward(_: None, gradient: jax.Array) -> tuple[jax.Array, None]:
            if self.exchange is None or dimension is None:
                return gradient, None
            with jax.named_scope("exchange"):
                return scatter(gradient.astype(self.exchange)).astype(gradient.dtype), None

        read = jax.custom_vjp(whole)
        read.defvjp(lambda *values: (whole(*values), None), backward)
        return read(stand_in, self.shard)

    def of_layer(self, shard: jax.Array) -> "Reader":
        """Returns the reader of one layer of a stacked parameter. `shard` is this device's shard of the layer."""
        sharding = NamedSharding(self.sharding.mesh, P(*self.sharding.spec[1:]))
        return dataclasses.replace(self, shard=shard, sharding=sharding)

    def _keep_tensor(self, function: Callable) -> Callable:
        """Returns a function that applies `function` to each shard of an array over the mesh axis tensor.

        If `function` were applied to the array itself, the compiler would also gather the array over the tensor axis.
        """
        mesh, tensor = jax.sharding.get_abstract_mesh(), _only(self.sharding.spec, "tensor")
        if mesh.are_all_axes_manual:
            return function
        rest = set(mesh.axis_names) - set(mesh.manual_axes)
        return jax.shard_map(
            function, in_specs=tensor, out_specs=tensor, axis_names=rest, check_vma=False
        )


def kernel_dtypes(model: nnx.Module) -> dict[str, jnp.dtype]:
    """Returns {path of a linear layer's kernel: dtype to which `linear.matmul` casts the kernel}.

    This is the dtype of the layer's activations: the attribute `dtype` of the innermost module that contains the layer
    and has this attribute. Omits layers without such a module, and layers with quantized kernels.
    """
    parts = {tuple(map(str, path)): part for path, part in nnx.iter_modules(model)}
    owners = {path: getattr(part, "dtype", None) for path, part in parts.items()}
    dtypes = {path: dtype for path, dtype in owners.items() if dtype is not None}
    return {
        "/".join((*path, "kernel")): dtypes[path[:depth]]
        for path, part in parts.items()
        if isinstance(part, Linear) and isinstance(part.kernel, nnx.Variable)
        for depth in range(len(path))
        if path[:depth] in dtypes
    }
