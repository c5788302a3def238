"""Meshes and sizes of a batch, tried one after the other: which is the fastest that fits."""

from collections.abc import Iterator

from ml_collections import ConfigDict

from common.config import flatten, override, require
from common.errors import UserError
from common.sharding import MESH_AXES, make_mesh
from launch.estimate import Estimate, TooLarge, estimate
from launch.topology import Topology

BATCH = ("data.tokens_per_batch", "data.batch", "train.batch")
"""What says how large a batch is; a configuration has one of them."""

TIMES = (1, 2, 4)
"""Of the configured batch."""

WIDTHS = (*map(len, MESH_AXES), 10, 9, 9, 14)
COLUMNS = (*MESH_AXES, "batch", "MiB", "ms", "tokens/s")


def meshes(devices: int) -> Iterator[tuple[int, int, int]]:
    """All sizes data x fsdp x tensor of so many devices."""
    for tensor in range(1, devices + 1):
        for fsdp in range(1, devices // tensor + 1):
            if devices % (tensor * fsdp) == 0:
                yield devices // (tensor * fsdp), fsdp, tensor


def best(config: ConfigDict, topology: Topology) -> Estimate:
    """The one with the most tokens per second by the bound; a line for each is printed as soon as it is known.

    A batch that does not fit is not tried in a larger size.

    Raises:
      UserError: none fits or is possible, or no speed is known.
    """
    require(
        topology.chip is not None,
        f"--sweep looks for the fastest, and of --topology={topology.name} no speed is known",
    )
    field = next((name for name in BATCH if name in flatten(config)), "")
    require(bool(field), "--sweep: the configuration has no size of a batch")
    print(_line(COLUMNS), flush=True)
    found: Estimate | None = None
    faults: list[UserError] = []
    for sizes in meshes(len(topology.devices)):
        mesh = dict(zip(MESH_AXES, sizes, strict=True))
        try:
            make_mesh(mesh, topology.devices)
        except UserError as fault:
            print(_line((*sizes, "", str(fault))), flush=True)
            faults.append(fault)
            continue
        for times in TIMES:
            tried = config.copy_and_resolve_references()
            tried.mesh.update(mesh)
            batch = flatten(config)[field] * times
            override(tried, field, str(batch))
            try:
                one = estimate(tried, topology)
            except UserError as fault:
                large = isinstance(fault, TooLarge)
                reason = f"{fault.missing / 2**20:,.0f} are missing" if large else str(fault)
                print(_line((*sizes, f"{batch:,}", reason)), flush=True)
                faults.append(fault)
                if large:
                    break
                continue
            print(_line((*sizes, f"{batch:,}", *_cells(one))), one.bound.binds, flush=True)
            if found is None or one.tokens_per_second > found.tokens_per_second:
                found = one
    if found is None:
        least = min(faults, key=lambda fault: getattr(fault, "missing", float("inf")))
        raise UserError(f"nothing of all this fits; what comes nearest: {least}")
    options = [f"--config.mesh.{axis}={size}" for axis, size in found.mesh.shape.items()]
    options.append(f"--config.{field}={flatten(found.sketch.config)[field]}")
    by = ", by compute and links alone" if found.bound.memory is None else ""
    print(f"\nthe fastest that fits{by}: {' '.join(options)}\n")
    return found


def _cells(one: Estimate) -> tuple[str, str, str]:
    held = sum(one.held.values()) / 2**20
    return f"{held:,.0f}", f"{1e3 * one.bound.seconds:,.4g}", f"{one.tokens_per_second:,.0f}"


def _line(cells: tuple) -> str:
    return "  ".join(str(c).rjust(w) for c, w in zip(cells, WIDTHS, strict=False))
