"""Counts the collectives of a compiled program (HLO), and the bytes that devices receive."""

import math
import re
from typing import NamedTuple

from launch.hlo import ARRAY, Instruction, count_executions, parse, size_of

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)
BETWEEN = " between slices"
"""Suffix of the kind of a collective that crosses the network between slices."""

# The TPU compiler may split an asynchronous collective over several fusions, which share a channel.
_PART = "async_collective_fusion_config"
# The TPU compiler writes a reduce-scatter as a fusion of an all-reduce and a slice, and gives the fusion this prefix.
_SCATTERED = "all-reduce-scatter"

# The TPU compiler writes the inter-slice part of a collective as a send and a receive of the "megascale" runtime.
_MEGASCALE = re.compile(
    r'_xla_megascale_target="?(?P<groups>.+?)"?,_xla_megascale_transfer_type="(?P<type>\w+)"'
)
_TRANSFERS = {
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}
_IDS_OF_SLICE = 100_000  # Device k of slice n has the id 100,000 n + k, with n from 1.


def collective(instruction: Instruction) -> str | None:
    """Returns the kind of the collective that the instruction starts, or None if it starts no collective."""
    if instruction.operation == "recv" and (transfer := _MEGASCALE.search(instruction.rest)):
        return _TRANSFERS[transfer["type"]] + BETWEEN
    kind = instruction.operation.removesuffix("-start")
    return kind if kind in KINDS else None


class Row(NamedTuple):
    """All collectives of one kind.

    Attributes:
      kind: kind of collective, such as "all-reduce" or "all-reduce between slices".
      count: number of executions in one run of the program.
      received: bytes that each device receives in one run of the program.
    """

    kind: str
    count: int
    received: int


class Collectives(NamedTuple):
    """The collectives of a program by kind, and the number of loops with collectives and an unknown trip count."""

    rows: list[Row]
    unknown_loops: int

    @property
    def received(self) -> int:
        """Bytes that each device receives from devices of its slice in one run of the program."""
        return sum(row.received for row in self.rows if not row.kind.endswith(BETWEEN))

    @property
    def received_between(self) -> int:
        """Bytes that each device receives from other slices in one run of the program."""
        return sum(row.received for row in self.rows if row.kind.endswith(BETWEEN))


def read_collectives(text: str, devices: int, unknown_trips: int = 1) -> Collectives:
    """Counts the collectives in the text of a compiled program (HLO) for slices of `devices` devices.

    The body of a loop counts once per iteration: `unknown_trips` times if the trip count is unknown. All branches of a
    conditional count.
    """
    program = parse(text)
    times, unknown = count_executions(program, lambda x: collective(x) is not None, unknown_trips)
    kinds = *KINDS, *(kind + BETWEEN for kind in KINDS)
    counts: dict[str, float] = dict.fromkeys(kinds, 0.0)
    sizes: dict[str, float] = dict.fromkeys(kinds, 0.0)
    seen: set[str] = set()
    for name, executions in times.items():
        for instruction in program.computations[name].instructions.values():
            kind = collective(instruction)
            if kind is None:
                continue
            if _PART in instruction.rest:
                channel = re.search(r"channel_id=(\d+)", instruction.rest)[1]
                if channel in seen:
                    continue
                seen.add(channel)
            received = _received(kind, instruction, devices)
            if name.startswith(_SCATTERED):
                kind, received = "reduce-scatter", received / 2
            counts[kind] += executions
            sizes[kind] += executions * received
    rows = [Row(k, max(1, round(counts[k])), round(sizes[k])) for k in kinds if counts[k]]
    return Collectives(rows, unknown)


def _received(kind: str, instruction: Instruction, devices: int) -> float:
    """Returns the bytes that each of n devices must receive for a collective with a result of S bytes.

    All-gather and all-to-all: S (n - 1) / n. All-reduce: 2 S (n - 1) / n, as a reduce-scatter and an all-gather.
    Reduce-scatter: S (n - 1), because its result is one of n parts. Permute and broadcast: S. Between slices,
    n is the number of slices.
    """
    arrays = ARRAY.findall(instruction.type)
    starts = ("all-gather", "reduce-scatter", "all-to-all", "collective-permute")
    if instruction.operation in [f"{start}-start" for start in starts]:
        # The type of an asynchronous start lists operands, then results and scalars. Keep the results.
        arrays = [array for array in arrays if array[1]]
        arrays = arrays[len(arrays) // 2 :]
    if instruction.operation == "recv":
        arrays = arrays[:1]  # The type of a receive is its result, a context and a token.
    size = sum(size_of(*array) for array in arrays)
    n = _group(instruction.rest, devices)
    match kind.removesuffix(BETWEEN):
        case "all-reduce":
            return 2 * (n - 1) / n * size
        case "reduce-scatter":
            return (n - 1) * size
        case "collective-permute" | "collective-broadcast":
            return size
        case _:
            return (n - 1) / n * size


def _group(rest: str, devices: int) -> int:
    """Returns the number of devices in a replica group, or the number of slices of a collective between slices.

    HLO has three notations for replica groups. A collective between slices lists its slices and their devices,
    as in {1,2}x{0:7}, or the ids of all its devices. If an instruction lists no group in `Instruction.rest`,
    returns `devices`.
    """
    if between := _MEGASCALE.search(rest):
        first = re.match(r"\{+([^}]*)\}", between["groups"])[1]
        ids = [int(number) for number in re.findall(r"\d+", first)]
        return len({number // _IDS_OF_SLICE or number for number in ids})
    if lists := re.search(r"replica_groups=\{\{([\d,]+)\}", rest):
        return lists[1].count(",") + 1
    if grid := re.search(r"replica_groups=\[(\d+),(\d+)\]<=", rest):
        return int(grid[2])
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\].*?\{([^}]*)\}", rest):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        # A replica group lists mesh axes: a whole axis as 'x', a part of size 2 of an axis as 'x':(1)2.
        axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", mesh[2])
        return math.prod(int(part or sizes[axis]) for axis, part in axes)
    return devices
