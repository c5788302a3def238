"""What the devices of a compiled program send each other, read from its text (HLO)."""

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) .*\{$")
_OPERATION = re.compile(
    rf"= (?P<type>.*?) (?P<kind>{'|'.join(KINDS)})(?P<start>-start)?\(.*?\)(?P<rest>, .*|$)"
)
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|\w+_computation)=%?([\w.-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")


class Row(NamedTuple):
    """All operations of one kind: how often a step runs them, and what that has every device receive."""

    kind: str
    count: int
    received: int


class Collectives(NamedTuple):
    """Rows by kind; and loops that hold collectives though the compiler does not know how often they run."""

    rows: list[Row]
    unknown_loops: int

    @property
    def received(self) -> int:
        """Bytes that a device receives in a step."""
        return sum(row.received for row in self.rows)


def read(text: str, devices: int) -> Collectives:
    """The collectives of one program that runs on so many devices.

    The body of a loop counts as often as the loop runs, once where that is not known; of a branch all arms count.
    Parts of one operation that the compiler has spread over several fusions are one: they share its channel.
    """
    found: dict[str, list[tuple[str, str | None, float]]] = defaultdict(list)
    calls: dict[str, list[tuple[str, int | None]]] = defaultdict(list)
    entry = computation = ""
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            computation = header[2]
            entry = computation if header[1] else entry
            continue
        # A reduction's own function holds none.
        operation = _OPERATION.search(line)
        if operation:
            channel = re.search(r"channel_id=(\d+)", operation["rest"])
            size = _received(operation, devices)
            found[computation].append((operation["kind"], channel and channel[1], size))
        elif "=%" in line or "_computations={" in line:
            calls[computation] += _calls(line)
    times, unknown = _times(entry, calls, {name for name in found})
    counts: dict[str, int] = dict.fromkeys(KINDS, 0)
    sizes: dict[str, float] = dict.fromkeys(KINDS, 0.0)
    seen: set[str] = set()
    for name, operations in found.items():
        for kind, channel, size in operations:
            if not times[name] or channel in seen:
                continue
            seen |= {channel} - {None}
            counts[kind] += times[name]
            sizes[kind] += times[name] * size
    rows = [Row(kind, counts[kind], round(sizes[kind])) for kind in KINDS if counts[kind]]
    return Collectives(rows, unknown)


def _calls(line: str) -> Iterator[tuple[str, int | None]]:
    """Computations that an instruction runs, and how often; None where that is not known."""
    times: int | None = 1
    if " while(" in line:
        trips = _TRIPS.search(line)
        times = int(trips[1]) if trips else None
    names = _CALLED.findall(line)
    for branches in _BRANCHES.findall(line):
        names += re.findall(r"[\w.-]+", branches)
    return ((name, times) for name in names)


def _times(
    entry: str, calls: dict[str, list[tuple[str, int | None]]], wanted: set[str]
) -> tuple[dict[str, int], int]:
    """How often a step runs each computation; and how many loops with a `wanted` one inside run unknown times."""
    holds: dict[str, bool] = {}

    def inside(name: str) -> bool:
        if name not in holds:
            holds[name] = name in wanted or any(inside(inner) for inner, _ in calls[name])
        return holds[name]

    times: dict[str, int] = defaultdict(int)
    unknown = 0

    def visit(name: str, often: int) -> None:
        nonlocal unknown
        times[name] += often
        for inner, trips in calls[name]:
            if inside(inner):
                unknown += trips is None
                visit(inner, often * (1 if trips is None else trips))

    visit(entry, 1)
    return times, unknown


def _received(operation: re.Match, devices: int) -> float:
    """Bytes that a device has to receive, by whatever way they are sent.

    Of n devices with results of S bytes: (n - 1) / n S when parts are gathered or exchanged, twice that in a sum that
    all of them get, since it is one of parts and their gathering; (n - 1) S where each keeps the sum of a part.
    """
    arrays = _ARRAY.findall(operation["type"])
    if operation["start"] and operation["kind"] in ("all-gather", "collective-permute"):
        # Begun here and ended elsewhere, it hands on operands, results, and numbers that are its own affair.
        arrays = [array for array in arrays if array[1]]
        arrays = arrays[len(arrays) // 2 :]
    size = sum(_size(*array) for array in arrays)
    n = _group(operation["rest"], devices)
    share = (n - 1) / n
    match operation["kind"]:
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


def _size(kind: str, shape: str) -> int:
    """Bytes of an array such as bf16[512,2048]."""
    bits = 8 if kind == "pred" else int(re.search(r"\d+", kind)[0])
    return math.prod(map(int, filter(None, shape.split(",")))) * bits // 8
