"""What the devices of a compiled program send each other, read from its text (HLO)."""

import math
import re
from collections import defaultdict
from typing import NamedTuple

from launch import hlo
from launch.hlo import Instruction, Program

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)

# How the compiler for TPUs writes two things down. An operation that it spreads over several fusions, so that it goes
# on beside other work, is in all of them, with the same channel; and a sum of which every device keeps a part is in a
# fusion of its own, as a sum that all of them get and a slice of it.
_PART = "async_collective_fusion_config"
_SCATTERED = "all-reduce-scatter"

_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")


class Row(NamedTuple):
    """All operations of one kind: how often a step runs them, and what that has every device receive."""

    kind: str
    count: int
    received: int


class Collectives(NamedTuple):
    """Rows by kind; and loops that hold collectives though nobody knows how often they run."""

    rows: list[Row]
    unknown_loops: int

    @property
    def received(self) -> int:
        """Bytes that a device receives in a step."""
        return sum(row.received for row in self.rows)


def read(text: str, devices: int) -> Collectives:
    """The collectives of one program that runs on so many devices.

    The body of a loop counts as often as the loop runs, once where that is not known; of a branch all arms count.
    """
    program = hlo.parse(text)
    times, unknown = _times(program)
    counts: dict[str, int] = dict.fromkeys(KINDS, 0)
    sizes: dict[str, float] = dict.fromkeys(KINDS, 0.0)
    seen: set[str] = set()
    for name, often in times.items():
        for instruction in program.computations[name].instructions.values():
            kind = instruction.operation.removesuffix("-start")
            if kind not in KINDS:
                continue
            if _PART in instruction.rest:
                channel = re.search(r"channel_id=(\d+)", instruction.rest)[1]
                if channel in seen:
                    continue
                seen.add(channel)
            received = _received(kind, instruction, devices)
            if name.startswith(_SCATTERED):
                kind, received = "reduce-scatter", received / 2
            counts[kind] += often
            sizes[kind] += often * received
    rows = [Row(kind, counts[kind], round(sizes[kind])) for kind in KINDS if counts[kind]]
    return Collectives(rows, unknown)


def _times(program: Program) -> tuple[dict[str, int], int]:
    """How often a step runs each computation; and how many loops that hold collectives run unknown times."""
    holds: dict[str, bool] = {}

    def inside(name: str) -> bool:
        if name not in holds:
            instructions = program.computations[name].instructions.values()
            holds[name] = any(
                one.operation.removesuffix("-start") in KINDS or any(map(inside, one.called))
                for one in instructions
            )
        return holds[name]

    times: dict[str, int] = defaultdict(int)
    unknown = 0

    def visit(name: str, often: int) -> None:
        nonlocal unknown
        times[name] += often
        computation = program.computations[name]
        for instruction in computation.instructions.values():
            inner = [called for called in instruction.called if inside(called)]
            trips: int | None = 1
            if inner and instruction.operation == "while":
                trips = hlo.trips(program, computation, instruction)
                unknown += trips is None
            for called in inner:
                visit(called, often * (1 if trips is None else trips))

    visit(program.entry, 1)
    return times, unknown


def _received(kind: str, instruction: Instruction, devices: int) -> float:
    """Bytes that a device has to receive, by whatever way they are sent.

    Of n devices with results of S bytes: (n - 1) / n S when parts are gathered or exchanged, twice that in a sum that
    all of them get, since it is one of parts and their gathering; (n - 1) S where each keeps the sum of a part.
    """
    arrays = _ARRAY.findall(instruction.type)
    paired = instruction.operation in ("all-gather-start", "collective-permute-start")
    if paired:
        # Begun here and ended elsewhere, it hands on operands, results, and numbers that are its own affair.
        arrays = [array for array in arrays if array[1]]
        arrays = arrays[len(arrays) // 2 :]
    size = sum(_size(*array) for array in arrays)
    n = _group(instruction.rest, devices)
    share = (n - 1) / n
    match kind:
        case "all-reduce":
            return 2 * share * size
        case "reduce-scatter":
            return (n - 1) * size
        case "collective-permute" | "collective-broadcast":
            return size
        case _:
            return share * size


def _group(rest: str, devices: int) -> int:
    """How many devices take part in one operation together, from any of the three ways to write that down."""
    if lists := re.search(r"replica_groups=\{\{([\d,]+)\}", rest):
        return lists[1].count(",") + 1
    if grid := re.search(r"replica_groups=\[(\d+),(\d+)\]<=", rest):
        return int(grid[2])
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\].*?\{([^}]*)\}", rest):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", mesh[2])  # a whole axis, or a part of one
        return math.prod(int(part or sizes[axis]) for axis, part in axes)
    return devices


def array_bytes(type_: str) -> int:
    """Bytes of all arrays of a type such as (f32[8,128]{1,0}, s32[])."""
    return sum(_size(*array) for array in _ARRAY.findall(type_))


def _size(kind: str, shape: str) -> int:
    """Bytes of an array such as bf16[512,2048]."""
    bits = 8 if kind == "pred" else int(re.search(r"\d+", kind)[0])
    return math.prod(map(int, filter(None, shape.split(",")))) * bits // 8
