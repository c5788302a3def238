"""Devices -> mesh, and the one table that maps what a dimension means to the mesh axes it is split over."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from common.errors import UserError

MESH_AXES = ("data", "fsdp", "tensor")

# Every logical axis of every array of the project. Parameters name theirs where they are made; activations in
# `constrain`.
RULES: dict[str, str | tuple[str, ...] | None] = {
    "batch": ("data", "fsdp"),
    "length": None,
    "width": None,  # the embedding axis of an activation: whole on every device
    "embed": "fsdp",  # the embedding axis of a parameter
    "heads": "tensor",
    "head_dim": None,
    "kv": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
    "position": None,
    "layers": None,
}


def make_mesh(sizes: Mapping[str, int], devices: list | None = None) -> Mesh:
    """A mesh data x fsdp x tensor over all devices of all processes.

    Args:
      sizes: a size per mesh axis; at most one may be -1, which takes what the others leave.

    Raises:
      UserError: the sizes do not multiply to the number of devices, or processes would have to share rows of a batch.
    """
    devices = jax.devices() if devices is None else devices
    shape = [int(sizes.get(axis, 1)) for axis in MESH_AXES]
    if any(size < 1 and size != -1 for size in shape) or shape.count(-1) > 1:
        raise UserError(
            f"mesh sizes must be positive, at most one of them -1: got {dict(zip(MESH_AXES, shape, strict=True))}"
        )
    fixed = math.prod(size for size in shape if size != -1)
    if -1 in shape:
        shape[shape.index(-1)] = max(1, len(devices) // fixed)
    if math.prod(shape) != len(devices):
        text = " x ".join(f"{axis}={size}" for axis, size in zip(MESH_AXES, shape, strict=True))
        raise UserError(
            f"the mesh {text} needs {math.prod(shape)} devices, but there are {len(devices)}"
        )
    grid = np.asarray(devices).reshape(shape)
    if any(len({device.process_index for device in row}) > 1 for row in grid.reshape(-1, shape[2])):
        raise UserError(
            f"mesh.tensor={shape[2]} spans several processes; it must divide the devices of each"
        )
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def spec(
    axes: tuple[str | None, ...], shape: tuple[int, ...], mesh: Mesh, name: str = "array"
) -> PartitionSpec:
    """The partition of one array. A dimension that its mesh axis does not divide stays whole.

    Raises:
      ValueError: as many axes as dimensions are not named, an axis is unknown, or a mesh axis is used twice.
    """
    if len(axes) != len(shape):
        raise ValueError(f"{name}: {len(axes)} axes {axes} for {len(shape)} dimensions {shape}")
    parts, used = [], []
    for axis, size in zip(axes, shape, strict=True):
        if axis is not None and axis not in RULES:
            raise ValueError(f"{name}: no rule for the axis {axis!r}")
        rule = RULES[axis] if axis is not None else None
        names = () if rule is None else (rule,) if isinstance(rule, str) else rule
        used += names
        ways = math.prod(mesh.shape[n] for n in names)
        parts.append(rule if names and size % ways == 0 else None)
    if len(used) != len(set(used)):
        raise ValueError(f"{name}: axes {axes} put one mesh axis on two dimensions: {used}")
    return PartitionSpec(*parts)


def shardings(variables: Mapping[str, Any], mesh: Mesh) -> dict[str, NamedSharding]:
    """A sharding per variable, from the logical axes in its metadata."""
    return {
        name: NamedSharding(mesh, spec(v.get_metadata("axes"), v.shape, mesh, name))
        for name, v in variables.items()
    }


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows over data and fsdp."""
    return NamedSharding(mesh, PartitionSpec(RULES["batch"]))


def num_batch_shards(mesh: Mesh) -> int:
    """Into how many parts the rows of a batch are split."""
    return math.prod(mesh.shape[axis] for axis in RULES["batch"])


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Fixes the partition of an activation where a mesh is set (`jax.set_mesh`); elsewhere does nothing."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, spec(axes, x.shape, mesh))


def place(
    values: Mapping[str, np.ndarray], where: Mapping[str, NamedSharding]
) -> dict[str, jax.Array]:
    """Host values, known to every process, as sharded arrays; a process touches its own shards only."""

    return {
        name: jax.make_array_from_callback(value.shape, where[name], value.__getitem__)
        for name, value in values.items()
    }
