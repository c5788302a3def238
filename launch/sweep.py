"""Estimates which mesh, batch size and gradient accumulation are fastest and fit into memory.

python -m launch.plan --sweep --config=configs/wmt_ffn_res.py --topology=v5e:4x4
"""

import math
from collections.abc import Iterator

from ml_collections import ConfigDict

from common.config import flatten, override
from common.errors import UserError, check
from common.sharding import MESH_AXES
from launch.estimate import Estimate, TooLarge, estimate
from launch.topology import Topology

BATCH = ("data.tokens_per_batch", "data.batch", "train.batch")
"""Possible fields of the batch size. Each configuration in configs/ has one of these fields."""

TIMES = (2, 4)
"""Multiples of the configured batch size to try, unless the configured batch size is too large for memory."""

PARTS = (2, 4, 8)
"""Factors by which to multiply `train.accumulate` if the configured batch size is too large for memory."""

WIDTHS = (*map(len, MESH_AXES), 10, 10, 9, 9, 14)
COLUMNS = (*MESH_AXES, "batch", "accumulate", "MiB", "ms", "tokens/s")


def meshes(devices: int) -> Iterator[tuple[int, int, int]]:
    """Yields all sizes (data, fsdp, tensor) whose product is the number of devices."""
    for tensor in range(1, devices + 1):
        for fsdp in range(1, devices // tensor + 1):
            if devices % (tensor * fsdp) == 0:
                yield devices // (tensor * fsdp), fsdp, tensor


def best(config: ConfigDict, topology: Topology) -> Estimate:
    """Returns the estimate with the most tokens per second, over all meshes.

    Prints a line for each attempt, and the options of the returned estimate.

    For each mesh: if the configured batch size is too large for memory, tries each factor in PARTS times the configured
    `train.accumulate`, until an attempt is not too large. Otherwise tries each factor in TIMES times the batch size,
    until an attempt is too large.

    Raises a UserError if no mesh and batch size can run, the speed of the devices is unknown, or the configuration has
    none of the fields in `BATCH`.
    """
    check(
        topology.chip is not None,
        f"--sweep cannot use --topology={topology.name}, because the speed of its devices is unknown: choose a TPU"
        " slice, such as v5e:4x4, or GPUs, such as h100:8",
    )
    field = next((name for name in BATCH if name in flatten(config)), "")
    check(
        bool(field),
        f"--sweep needs one of the fields {', '.join(BATCH)}, which the configuration lacks: leave out --sweep",
    )
    print(_line(COLUMNS), flush=True)
    fastest: Estimate | None = None
    faults: list[tuple[UserError, tuple]] = []
    for sizes in meshes(len(topology.devices)):
        mesh = dict(zip(MESH_AXES, sizes, strict=True))
        try:
            topology.mesh(mesh)
        except UserError as fault:
            print(_line((*sizes, "", "", str(fault))), flush=True)
            faults.append((fault, sizes))
            continue
        for tried, result in _outcomes(config, field, mesh, topology):
            cells = *sizes, f"{flatten(tried)[field]:,}", tried.train.accumulate
            if isinstance(result, UserError):
                large = isinstance(result, TooLarge)
                reason = f"{result.missing / 2**20:,.0f} MiB missing" if large else str(result)
                print(_line((*cells, reason)), flush=True)
                faults.append((result, cells))
                continue
            print(_line((*cells, *_cells(result))), result.bound.binds, flush=True)
            if fastest is None or result.tokens_per_second > fastest.tokens_per_second:
                fastest = result
    if fastest is None:
        closest, cells = min(faults, key=lambda one: getattr(one[0], "missing", math.inf))
        which = "attempt closest to fitting" if isinstance(closest, TooLarge) else "first attempt"
        names = zip((*MESH_AXES, field, "train.accumulate"), cells, strict=False)
        tried = ", ".join(f"{name}={cell}" for name, cell in names)
        raise UserError(
            f"--sweep found no mesh and batch size that can run on --topology={topology.name}; in the"
            f" {which} ({tried}), {closest}"
        )
    chosen, configured = flatten(fastest.config), flatten(config)
    options = [f"--config.mesh.{axis}={size}" for axis, size in fastest.mesh.shape.items()]
    options.append(f"--config.{field}={chosen[field]}")
    if chosen["train.accumulate"] != configured["train.accumulate"]:
        options.append(f"--config.train.accumulate={chosen['train.accumulate']}")
    by = " (estimated from compute and links only)" if fastest.bound.memory is None else ""
    print(f"\nfastest that fits{by}: {' '.join(options)}\n")
    return fastest


def _outcomes(
    config: ConfigDict, field: str, mesh: dict[str, int], topology: Topology
) -> Iterator[tuple[ConfigDict, Estimate | UserError]]:
    """Yields (configuration, estimate or error) for each attempt of `best` on a mesh. `field` is a field of `BATCH`."""

    def attempt(times: int, parts: int) -> tuple[ConfigDict, Estimate | UserError]:
        tried = config.copy_and_resolve_references()
        tried.mesh.update(mesh)
        override(tried, field, str(flatten(config)[field] * times))
        tried.train.accumulate *= parts
        try:
            return tried, estimate(tried, topology)
        except UserError as fault:
            return tried, fault

    first = attempt(1, 1)
    yield first
    large = isinstance(first[1], TooLarge)
    for times, parts in [(1, n) for n in PARTS] if large else [(n, 1) for n in TIMES]:
        following = attempt(times, parts)
        yield following
        if isinstance(following[1], TooLarge) != large:
            return


def _cells(result: Estimate) -> tuple[str, str, str]:
    held = sum(result.held.values()) / 2**20
    return f"{held:,.0f}", f"{1e3 * result.bound.seconds:,.4g}", f"{result.tokens_per_second:,.0f}"


def _line(cells: tuple) -> str:
    return "  ".join(str(c).rjust(w) for c, w in zip(cells, WIDTHS, strict=False))
