"""Decoding by rows: every device holds all weights and decodes its own rows of a batch, without communication.

A decoding step is small, so a collective operation in each step would cost more than the step. The weights are
therefore gathered once, before the loop over tokens. The rows are split over all mesh axes, including "tensor", which
splits matrix products in training. A loop over tokens may stop when the rows of its device are complete, so it must not
contain a collective operation: devices in the loop would wait forever for devices that have stopped.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from common import sharding
from common.variables import AbstractModel, Params

ROWS = PartitionSpec(sharding.MESH_AXES)
"""The partition of an array whose first axis is the rows of a batch."""


def row_specs(tree: Any) -> Any:
    """Returns the partition of every array in a tree: rows are split over the devices, scalars are replicated."""
    return jax.tree.map(lambda x: ROWS if jnp.ndim(x) else PartitionSpec(), tree)


def by_rows(function: Callable, mesh: Mesh, outputs: Any = ROWS) -> Callable:
    """Returns a function that applies `function(trainable, frozen, *inputs)` on each device to the device's own rows.

    Weights are replicated, inputs are partitioned by `row_specs`, and outputs by `outputs`. The number of devices must
    divide the number of rows.
    """

    def apply(trainable: Params, frozen: Params, *inputs: Any) -> Any:
        specs = PartitionSpec(), PartitionSpec(), *row_specs(inputs)
        # check_vma=True would reject loops whose state starts equal on all devices and then differs between devices.
        mapped = jax.shard_map(
            function, mesh=mesh, in_specs=specs, out_specs=outputs, check_vma=False
        )
        return mapped(trainable, frozen, *inputs)

    return apply


def gather_weights(abstract_model: AbstractModel, mesh: Mesh) -> Callable:
    """Returns a function that copies all weights to every device: (trainable, frozen) -> (trainable, frozen).

    Kernels of linear layers (`common.train.exchange.kernel_dtypes`) are gathered in the dtype of activations, because
    `common.model.linear.matmul` would cast the kernels to this dtype anyway. All other parameters keep their dtype. On
    a single device, the function returns the weights unchanged, without a copy.
    """
    if mesh.size == 1:
        return lambda trainable, frozen: (trainable, frozen)
    # Import here, because a run on one device does not need this module.
    from common.train.exchange import kernel_dtypes

    variables = {**abstract_model.trainable, **abstract_model.frozen}
    shardings = sharding.shardings(variables, mesh)

    def gather(*values: Params) -> list[Params]:
        dtypes = kernel_dtypes(abstract_model.build(*values))

        def cast(name: str, x: jax.Array) -> jax.Array:
            if name not in dtypes:
                return x
            # Without the constraint, the compiler may gather the array in its old dtype and cast the whole array.
            return jax.lax.with_sharding_constraint(x.astype(dtypes[name]), shardings[name])

        return [{name: cast(name, x) for name, x in part.items()} for part in values]

    return jax.jit(gather, out_shardings=sharding.replicated(mesh))
