"""The device mesh, and the rules that map logical axes to mesh axes."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from common.errors import UserError, check

MESH_AXES = ("data", "fsdp", "tensor")

# Logical axis -> mesh axes. Layers name the logical axes of a parameter in its metadata `axes`, and the logical axes of
# an activation in a call of `constrain`.
RULES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp"),
    "length": (),
    "width": (),  # the embedding axis of activations
    "embed": ("fsdp",),  # the embedding axis of parameters
    "heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
    "position": (),
}


def backend() -> str:
    """Returns the platform of the current mesh (`jax.set_mesh`), or without a mesh JAX's default backend.

    The two differ if a program compiles for devices that this machine lacks.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.platform if device else jax.default_backend()


def make_mesh(sizes: Mapping[str, int], devices: list | None = None) -> Mesh:
    """Returns the mesh data x fsdp x tensor.

    CPUs and GPUs keep the order of `devices`. TPUs are placed by `jax.experimental.mesh_utils`, which makes a mesh axis
    a ring of neighbours if the torus of the slice allows such a ring. If the tensor axis would then span several
    processes, the TPUs of each slice keep JAX's order instead. With several TPU slices, only the data axis is split
    over slices, so the gradients cross the data-centre network only once per step.

    Args:
      sizes: size of each mesh axis, 1 if missing. One size may be -1: this axis takes all remaining devices.
      devices: devices of the mesh; None for all devices of all processes.

    Raises:
      UserError: a size is invalid, the product of the sizes is not the number of devices, the data axis is not a
        multiple of the number of TPU slices, or the tensor axis spans several processes (each process feeds whole rows
        of a batch).
    """
    devices = jax.devices() if devices is None else devices
    shape = [int(sizes.get(axis, 1)) for axis in MESH_AXES]
    requested = ", ".join(f"{axis}={size}" for axis, size in zip(MESH_AXES, shape, strict=True))
    check(
        all(size >= 1 or size == -1 for size in shape) and shape.count(-1) <= 1,
        "--config.mesh.data, --config.mesh.fsdp and --config.mesh.tensor must be at least 1, except that one of them"
        f" may be -1 (all remaining devices): got {requested}",
    )
    fixed = math.prod(size for size in shape if size != -1)
    if -1 in shape:
        shape[shape.index(-1)] = max(1, len(devices) // fixed)
    text = " x ".join(f"{axis}={size}" for axis, size in zip(MESH_AXES, shape, strict=True))
    needed, found = math.prod(shape), len(devices)
    check(
        needed == found,
        f"the mesh {text} needs {needed} device{'s' * (needed > 1)}, but there {'are' if found > 1 else 'is'} {found}:"
        f" set --config.mesh.data, --config.mesh.fsdp and --config.mesh.tensor to sizes whose product is {found}",
    )
    tpus = devices[0].platform == "tpu"
    grid = _tpu_grid(devices, shape) if tpus else np.asarray(devices).reshape(shape)
    check(
        not _spans_processes(grid),
        f"--config.mesh.tensor={shape[2]} spans several processes: choose a divisor of the number of devices of each"
        " process",
    )
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def _tpu_grid(devices: list, shape: list[int]) -> np.ndarray:
    """Returns the devices of one or several TPU slices as an array (data, fsdp, tensor)."""
    # A device of a single slice may lack slice_index.
    slice_of = {device: getattr(device, "slice_index", 0) for device in devices}
    slices = len(set(slice_of.values()))
    check(
        shape[0] % slices == 0,
        f"--config.mesh.data={shape[0]} must be a multiple of {slices}, the number of TPU slices: set"
        " --config.mesh.data, --config.mesh.fsdp and --config.mesh.tensor so that their product is still"
        f" {len(devices)}",
    )
    if slices == 1:
        grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    else:
        grid = mesh_utils.create_hybrid_device_mesh(
            (shape[0] // slices, *shape[1:]),
            (slices, 1, 1),
            devices,
            allow_split_physical_axes=True,
        )
    if _spans_processes(grid):
        # `mesh_utils` may place a tensor axis across several hosts, even if the axis fits on one host. Use the order in
        # which JAX lists the devices of each slice instead: host by host. A tensor axis that divides the devices of a
        # host is then on one host, but fewer devices are neighbours along the axes data and fsdp.
        grid = np.asarray(sorted(devices, key=slice_of.__getitem__)).reshape(shape)
    return grid


def _spans_processes(grid: np.ndarray) -> bool:
    """Returns whether the tensor axis, the last axis of the grid, spans several processes."""
    rows = grid.reshape(-1, grid.shape[-1])
    return any(len({device.process_index for device in row}) > 1 for row in rows)


def spec(
    axes: tuple[str | None, ...], shape: tuple[int, ...], mesh: Mesh, name: str = "array"
) -> PartitionSpec:
    """Returns the PartitionSpec of an array with logical axes `axes`.

    A dimension is replicated if the number of devices along its mesh axes does not divide its size. The spec omits the
    manual axes of `jax.shard_map`, because inside `jax.shard_map` an array is already the shard along these axes.

    Raises:
      UserError: the number of axes is not the number of dimensions, an axis has no rule, or a mesh axis is used twice.
        The message begins with `name`.
    """
    if len(axes) != len(shape):
        raise UserError(
            f"{name} has the axes {axes} but the shape {shape}: name one axis for each dimension"
        )
    parts, used = [], []
    for axis, size in zip(axes, shape, strict=True):
        if axis is not None and axis not in RULES:
            raise UserError(
                f"{name}: the logical axis {axis!r} is unknown: use None or one of {', '.join(RULES)}"
            )
        names = _mesh_axes(axis, mesh)
        used += names
        shards = math.prod(mesh.shape[n] for n in names)
        parts.append(names if size % shards == 0 else None)
    if twice := sorted({axis for axis in used if used.count(axis) > 1}):
        raise UserError(
            f"{name}: the axes {axes} use the mesh axis {' and '.join(twice)} for more than one dimension: of the axes"
            f" that use {' or '.join(twice)}, replace all but one by None"
        )
    return PartitionSpec(*parts)


def _mesh_axes(axis: str | None, mesh: Any) -> tuple[str, ...]:
    """Returns the axes of the mesh that split a logical axis, without the manual axes of `jax.shard_map`."""
    names = RULES[axis] if axis is not None else ()
    return tuple(n for n in names if n in mesh.shape and n not in mesh.manual_axes)


def shardings(variables: Mapping[str, Any], mesh: Mesh) -> dict[str, NamedSharding]:
    """Returns {name: sharding} of variables, from the logical axes in their metadata `axes`."""
    return {
        name: NamedSharding(mesh, spec(v.get_metadata("axes"), v.shape, mesh, name))
        for name, v in variables.items()
    }


def abstract(variables: Mapping[str, Any], mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns {name: abstract array with its sharding} of all variables."""
    return {
        name: jax.ShapeDtypeStruct(variables[name].shape, variables[name].dtype, sharding=sharding)
        for name, sharding in shardings(variables, mesh).items()
    }


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of a batch: its rows are split over the mesh axes data and fsdp."""
    return NamedSharding(mesh, PartitionSpec(RULES["batch"]))


def num_batch_shards(mesh: Mesh) -> int:
    """Returns the number of shards that the rows of a batch are split into."""
    return math.prod(mesh.shape.get(axis, 1) for axis in RULES["batch"])


def batch_shard() -> jax.Array | None:
    """Returns the index of this device's shard of the batch; None outside of `jax.shard_map` over the batch axes."""
    axes = _manual_batch_axes()
    return jax.lax.axis_index(axes) if axes else None


def sum_over_batch(values: Any) -> Any:
    """Sums values that each shard of the batch has computed from its rows; outside of shard_map, returns `values`."""
    axes = _manual_batch_axes()
    return jax.lax.psum(values, axes) if axes else values


def max_over_batch(value: jax.Array) -> jax.Array:
    """Returns the elementwise maximum over all shards of the batch; outside of `jax.shard_map`, returns `value`."""
    axes = _manual_batch_axes()
    return jax.lax.pmax(value, axes) if axes else value


def _manual_batch_axes() -> tuple[str, ...]:
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(axis for axis in RULES["batch"] if axis in manual)


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Constrains the sharding of an activation with logical axes `axes`.

    Returns x unchanged without `jax.set_mesh`, on a single device, and inside `jax.shard_map` over all mesh axes, where
    x is the shard of one device.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1 or mesh.are_all_axes_manual:
        return x
    return jax.lax.with_sharding_constraint(x, spec(axes, x.shape, mesh))


def num_shards(axis: str) -> int:
    """Returns the number of shards into which the current mesh splits a logical axis; see `spec`."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[name] for name in _mesh_axes(axis, mesh))


def place(
    values: Mapping[str, np.ndarray], shardings: Mapping[str, NamedSharding]
) -> dict[str, jax.Array]:
    """Transfers host arrays, which must be equal on all processes, to the devices as sharded arrays."""
    return {
        name: jax.make_array_from_callback(value.shape, shardings[name], value.__getitem__)
        for name, value in values.items()
    }
