"""Meshes and sizes of a batch, tried one after the other: which is the fastest that fits."""

from collections.abc import Iterator

from ml_collections import ConfigDict

from common.config import check, flatten, override
from common.errors import UserError
from common.sharding import MESH_AXES
from launch.estimate import Estimate, TooLarge, estimate
from launch.topology import Topology

BATCH = ("data.tokens_per_batch", "data.batch", "train.batch")
"""What says how large a batch is; a configuration has one of them."""

TIMES = (2, 4)
"""Of the configured batch, where it fits."""

PARTS = (2, 4, 8)
"""In which it is worked on one after the other, where it does not."""

WIDTHS = (*map(len, MESH_AXES), 10, 10, 9, 9, 14)
COLUMNS = (*MESH_AXES, "batch", "accumulate", "MiB", "ms", "tokens/s")


def meshes(devices: int) -> Iterator[tuple[int, int, int]]:
    """All sizes data x fsdp x tensor of so many devices."""
    for tensor in range(1, devices + 1):
        for fsdp in range(1, devices // tensor + 1):
            if devices % (tensor * fsdp) == 0:
                yield devices // (tensor * fsdp), fsdp, tensor


def best(config: ConfigDict, topology: Topology) -> Estimate:
    """The one with the most tokens per second by the bound; a line for each is printed as soon as it is known.

    Where the configured batch fits, larger ones are tried until one does not; where it does not fit, the same one in
    more and more parts (`train.accumulate`) until it does.

    Raises:
      UserError: none fits or is possible, or no speed is known.
    """
    check(
        topology.chip is not None,
        f"--sweep looks for the fastest, and of --topology={topology.name} no speed is known",
    )
    field = next((name for name in BATCH if name in flatten(config)), "")
    check(bool(field), "--sweep: the configuration has no size of a batch")
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
                reason = f"{one.missing / 2**20:,.0f} are missing" if large else str(one)
                print(_line((*what, reason)), flush=True)
                faults.append(one)
                continue
            print(_line((*what, *_cells(one))), one.bound.binds, flush=True)
            if found is None or one.tokens_per_second > found.tokens_per_second:
                found = one
    if found is None:
        least = min(faults, key=lambda fault: getattr(fault, "missing", float("inf")))
        raise UserError(f"nothing of all this fits; what comes nearest: {least}")
    chosen, given = flatten(found.config), flatten(config)
    options = [f"--config.mesh.{axis}={size}" for axis, size in found.mesh.shape.items()]
    options.append(f"--config.{field}={chosen[field]}")
    if chosen["train.accumulate"] != given["train.accumulate"]:
        options.append(f"--config.train.accumulate={chosen['train.accumulate']}")
    by = ", by compute and links alone" if found.bound.memory is None else ""
    print(f"\nthe fastest that fits{by}: {' '.join(options)}\n")
    return found


def _outcomes(
    config: ConfigDict, field: str, mesh: dict[str, int], topology: Topology
) -> Iterator[tuple[ConfigDict, Estimate | UserError]]:
    """What is tried with one mesh, and what comes of it."""

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
