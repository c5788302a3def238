"""Finds the fastest mesh and batch size that fit into memory (launch.plan --sweep)."""

from collections.abc import Iterator

from ml_collections import ConfigDict

from common.config import check, flatten, override
from common.errors import UserError
from common.sharding import MESH_AXES
from launch.estimate import Estimate, TooLarge, estimate
from launch.topology import Topology

BATCH = ("data.tokens_per_batch", "data.batch", "train.batch")
"""Fields that set the batch size; a configuration has one of them."""

TIMES = (2, 4)
"""Multiples of the configured batch to try if it fits."""

PARTS = (2, 4, 8)
"""Gradient accumulation steps to try if the configured batch does not fit."""

WIDTHS = (*map(len, MESH_AXES), 10, 10, 9, 9, 14)
COLUMNS = (*MESH_AXES, "batch", "accumulate", "MiB", "ms", "tokens/s")


def meshes(devices: int) -> Iterator[tuple[int, int, int]]:
    """Yields all sizes (data, fsdp, tensor) whose product is the number of devices."""
    for tensor in range(1, devices + 1):
        for fsdp in range(1, devices // tensor + 1):
            if devices % (tensor * fsdp) == 0:
                yield devices // (tensor * fsdp), fsdp, tensor


def best(config: ConfigDict, topology: Topology) -> Estimate:
    """Returns the estimate with the most tokens per second; prints one line per attempt.

    If the configured batch fits, tries larger batches until one does not fit. Otherwise increases
    `train.accumulate` until the batch fits.

    Raises:
      UserError: no mesh fits, or the speed of the devices is unknown.
    """
    check(
        topology.chip is not None,
        f"--sweep needs a TPU slice: the speed of --topology={topology.name} is unknown",
    )
    field = next((name for name in BATCH if name in flatten(config)), "")
    check(bool(field), f"--sweep: the configuration has none of the batch sizes {', '.join(BATCH)}")
    print(_line(COLUMNS), flush=True)
    found: Estimate | None = None
    faults: list[UserError] = []
    for sizes in meshes(len(topology.devices)):
        mesh = dict(zip(MESH_AXES, sizes, strict=True))
        try:
            topology.mesh(mesh)
        except UserError as fault:
            print(_line((*sizes, "", "", str(fault))), flush=True)
            faults.append(fault)
            continue
        for tried, one in _outcomes(config, field, mesh, topology):
            what = *sizes, f"{flatten(tried)[field]:,}", tried.train.accumulate
            if isinstance(one, UserError):
                large = isinstance(one, TooLarge)
                reason = f"{one.missing / 2**20:,.0f} too many" if large else str(one)
                print(_line((*what, reason)), flush=True)
                faults.append(one)
                continue
            print(_line((*what, *_cells(one))), one.bound.binds, flush=True)
            if found is None or one.tokens_per_second > found.tokens_per_second:
                found = one
    if found is None:
        closest = min(faults, key=lambda fault: getattr(fault, "missing", float("inf")))
        raise UserError(f"no mesh and batch size fit; the closest: {closest}")
    chosen, configured = flatten(found.config), flatten(config)
    options = [f"--config.mesh.{axis}={size}" for axis, size in found.mesh.shape.items()]
    options.append(f"--config.{field}={chosen[field]}")
    if chosen["train.accumulate"] != configured["train.accumulate"]:
        options.append(f"--config.train.accumulate={chosen['train.accumulate']}")
    by = " (bounded by compute and links only)" if found.bound.memory is None else ""
    print(f"\nfastest that fits{by}: {' '.join(options)}\n")
    return found


def _outcomes(
    config: ConfigDict, field: str, mesh: dict[str, int], topology: Topology
) -> Iterator[tuple[ConfigDict, Estimate | UserError]]:
    """Yields the configurations tried with one mesh, and their estimates or errors."""

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


def _cells(one: Estimate) -> tuple[str, str, str]:
    held = sum(one.held.values()) / 2**20
    return f"{held:,.0f}", f"{1e3 * one.bound.seconds:,.4g}", f"{one.tokens_per_second:,.0f}"


def _line(cells: tuple) -> str:
    return "  ".join(str(c).rjust(w) for c, w in zip(cells, WIDTHS, strict=False))
