"""The device mesh, and the table of rules from logical axes to mesh axes."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from common.errors import UserError

MESH_AXES = ("data", "fsdp", "tensor")

# Every logical axis of the project. Layers name the axes of their parameters in the metadata `axes`, and the axes of
# activations in `constrain`.
RULES: dict[str, str | tuple[str, ...] | None] = {
    "batch": ("data", "fsdp"),
    "length": None,
    "width": None,  # the embedding axis of an activation
    "embed": "fsdp",  # the embedding axis of a parameter
    "heads": "tensor",
    "head_dim": None,
    "kv": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
    "position": None,
    "layers": None,
}


def backend() -> str:
    """Returns "cpu", "gpu" or "tpu": the platform of the current mesh (`jax.set_mesh`), else JAX's default backend.

    They differ when a step is compiled for devices that this machine does not have.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.platform if device else jax.default_backend()


def make_mesh(sizes: Mapping[str, int], devices: list | None = None) -> Mesh:
    """Returns the mesh data x fsdp x tensor over all devices of all processes.

    Args:
      sizes: size of each mesh axis; one of them may be -1, which takes all remaining devices.

    Raises:
      UserError: the product of the sizes is not the number of devices, or the tensor axis spans processes, which would
        share rows of a batch.
    """
    devices = jax.devices() if devices is None else devices
    shape = [int(sizes.get(axis, 1)) for axis in MESH_AXES]
    if any(size < 1 and size != -1 for size in shape) or shape.count(-1) > 1:
        raise UserError(
            f"--config.mesh sizes must be positive, and at most one -1: got {dict(zip(MESH_AXES, shape, strict=True))}"
        )
    fixed = math.prod(size for size in shape if size != -1)
    if -1 in shape:
        shape[shape.index(-1)] = max(1, len(devices) // fixed)
    if math.prod(shape) != len(devices):
        text = " x ".join(f"{axis}={size}" for axis, size in zip(MESH_AXES, shape, strict=True))
        raise UserError(
            f"the mesh {text} needs {math.prod(shape)} devices, but there are {len(devices)}: change --config.mesh"
        )
    grid = np.asarray(devices).reshape(shape)
    if any(len({device.process_index for device in row}) > 1 for row in grid.reshape(-1, shape[2])):
        raise UserError(
            f"--config.mesh.tensor={shape[2]} spans several processes; it must divide the number of devices per process"
        )
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def spec(
    axes: tuple[str | None, ...], shape: tuple[int, ...], mesh: Mesh, name: str = "array"
) -> PartitionSpec:
    """Returns the partition of one array. A dimension that its mesh axes do not divide is replicated.

    Raises:
      ValueError: the number of axes is not the number of dimensions, an axis has no rule, or a mesh axis is used twice.
    """
    if len(axes) != len(shape):
        raise ValueError(f"{name}: {len(axes)} axes {axes} for {len(shape)} dimensions {shape}")
    parts, used = [], []
    for axis, size in zip(axes, shape, strict=True):
        if axis is not None and axis not in RULES:
            raise ValueError(f"{name}: no rule for the axis {axis!r} in common.sharding.RULES")
        rule = RULES[axis] if axis is not None else None
        names = () if rule is None else (rule,) if isinstance(rule, str) else rule
        used += names
        shards = math.prod(mesh.shape[n] for n in names)
        parts.append(rule if names and size % shards == 0 else None)
    if len(used) != len(set(used)):
        raise ValueError(f"{name}: axes {axes} use a mesh axis for two dimensions: {used}")
    return PartitionSpec(*parts)


def shardings(variables: Mapping[str, Any], mesh: Mesh) -> dict[str, NamedSharding]:
    """Returns the sharding of each variable, from the logical axes in its metadata."""
    return {
        name: NamedSharding(mesh, spec(v.get_metadata("axes"), v.shape, mesh, name))
        for name, v in variables.items()
    }


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Shards the rows of a batch over data and fsdp."""
    return NamedSharding(mesh, PartitionSpec(RULES["batch"]))


def num_batch_shards(mesh: Mesh) -> int:
    """Returns the number of shards of a batch's rows."""
    return math.prod(mesh.shape[axis] for axis in RULES["batch"])


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Constrains the sharding of an activation; without a mesh (`jax.set_mesh`) returns x."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, spec(axes, x.shape, mesh))


def place(
    values: Mapping[str, np.ndarray], shardings: Mapping[str, NamedSharding]
) -> dict[str, jax.Array]:
    """Returns host arrays, equal on every process, as sharded arrays; a process transfers only its own shards."""
    return {
        name: jax.make_array_from_callback(value.shape, shardings[name], value.__getitem__)
        for name, value in values.items()
    }
