"""Reads collectives, matrix products and memory traffic from the text of a compiled program (HLO)."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import NamedTuple

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

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) .*\{$")
_INSTRUCTION = re.compile(
    r"^\s*(?P<root>ROOT )?%?(?P<name>[\w.-]+) = (?P<type>.*?) (?P<operation>[a-z][\w-]*)"
    r"\((?P<arguments>.*?)\)(?P<rest>.*)$"
)
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|\w+_computation)=%?([\w.-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
# The TPU compiler may split an asynchronous collective over several fusions, which share a channel.
_PART = "async_collective_fusion_config"
# The TPU compiler writes a reduce-scatter as a fusion of an all-reduce and a slice.
_SCATTERED = "all-reduce-scatter"

# The TPU compiler writes the part of a collective between slices as a send and a receive of the "megascale" runtime.
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

_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")

_KERNEL = 'custom_call_target="tpu_custom_call"'  # a Pallas kernel
# Operations that count as no memory traffic.
_NOTHING = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "iota")
# Operations that read only a part of their first operand, as large as their result.
_PARTS = ("slice", "dynamic-slice", "gather")


class Instruction(NamedTuple):
    """An HLO instruction: name = type operation(arguments)rest."""

    type: str
    operation: str
    arguments: str
    rest: str

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.-]+)", self.arguments)

    @property
    def called(self) -> list[str]:
        """Names of the computations that the instruction calls. A conditional calls all its branches."""
        arms = [name for arms in _BRANCHES.findall(self.rest) for name in arms.split(",")]
        return _CALLED.findall(self.rest) + [name.strip(" %") for name in arms]

    @property
    def number(self) -> int | None:
        """Value of the instruction if it is an integer constant, otherwise None."""
        constant = self.operation == "constant" and self.arguments.lstrip("-").isdecimal()
        return int(self.arguments) if constant else None

    @property
    def collective(self) -> str | None:
        """Kind of the collective that the instruction starts, or None if it starts no collective."""
        if self.operation == "recv" and (transfer := _MEGASCALE.search(self.rest)):
            return _TRANSFERS[transfer["type"]] + BETWEEN
        kind = self.operation.removesuffix("-start")
        return kind if kind in KINDS else None

    @property
    def index(self) -> int:
        """Index of a get-tuple-element instruction."""
        return int(re.search(r"index=(\d+)", self.rest)[1])


class Computation(NamedTuple):
    """An HLO computation.

    Attributes:
      instructions: name -> instruction.
      root: name of the root instruction, which computes the result.
    """

    instructions: dict[str, Instruction]
    root: str

    def source(self, name: str) -> Instruction:
        """Returns the instruction that computes the value `name`, skipping copies and bitcasts."""
        instruction = self.instructions[name]
        while instruction.operation in ("copy", "bitcast") and instruction.operands:
            instruction = self.instructions[instruction.operands[0]]
        return instruction


class Program(NamedTuple):
    """An HLO program.

    Attributes:
      computations: name -> computation.
      entry: name of the entry computation.
    """

    computations: dict[str, Computation]
    entry: str


def parse(text: str) -> Program:
    """Parses the text of an HLO program."""
    computations: dict[str, Computation] = {}
    entry = ""
    name, instructions = "", {}
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            name, instructions = header[2], {}
            computations[name] = Computation(instructions, "")
            entry = name if header[1] else entry
        elif name and (match := _INSTRUCTION.match(line)):
            parts = Instruction(*match.group("type", "operation", "arguments", "rest"))
            instructions[match["name"]] = parts
            if match["root"]:
                computations[name] = Computation(instructions, match["name"])
    return Program(computations, entry)


def trip_count(program: Program, within: Computation, loop: Instruction) -> int | None:
    """Returns the trip count of a `while` instruction, or None if it is unknown.

    Reads the compiler's annotation. Without an annotation, recognises loops that count up to a constant in constant
    steps.

    Args:
      within: the computation that contains the loop.
    """
    if known := _TRIPS.search(loop.rest):
        return int(known[1])
    try:
        condition, body = (
            program.computations[re.search(rf"{part}=%?([\w.-]+)", loop.rest)[1]]
            for part in ("condition", "body")
        )
        test = condition.source(condition.root)
        counter, end = (condition.source(name) for name in test.operands)
        index = counter.index
        following = body.source(body.source(body.root).operands[index])
        before, step = sorted(
            (body.source(name) for name in following.operands), key=lambda x: x.number is not None
        )
        first = within.source(within.source(loop.operands[0]).operands[index])
        simple = (test.operation, following.operation) == ("compare", "add") and (
            "direction=LT" in test.rest and before.index == index
        )
        return -(-(end.number - first.number) // step.number) if simple else None
    except (KeyError, IndexError, TypeError, ValueError, ZeroDivisionError):
        return None  # The loop does not count up to a constant in constant steps.


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
    """The collectives of a program.

    Attributes:
      rows: a row for each kind of collective.
      unknown_loops: number of loops with collectives and an unknown trip count.
    """

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
    """Counts the collectives in the text of a program that runs on slices of `devices` devices.

    The body of a loop counts once per iteration. All branches of a conditional count.

    Args:
      unknown_trips: number of iterations to count for a loop with an unknown trip count.
    """
    program = parse(text)
    times, unknown = _times(program, lambda x: x.collective is not None, unknown_trips)
    kinds = *KINDS, *(kind + BETWEEN for kind in KINDS)
    counts: dict[str, int] = dict.fromkeys(kinds, 0)
    sizes: dict[str, float] = dict.fromkeys(kinds, 0.0)
    seen: set[str] = set()
    for name, executions in times.items():
        for instruction in program.computations[name].instructions.values():
            kind = instruction.collective
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
    rows = [Row(kind, counts[kind], round(sizes[kind])) for kind in kinds if counts[kind]]
    return Collectives(rows, unknown)


class Product(NamedTuple):
    """A matrix product: types and shapes of its operands and result, and its axes.

    Attributes:
      left, right, result: (type, shape), such as ("bf16", (2048, 512)).
      contracted, batched: (axes of left, axes of right).
    """

    left: tuple[str, tuple[int, ...]]
    right: tuple[str, tuple[int, ...]]
    result: tuple[str, tuple[int, ...]]
    contracted: tuple[tuple[int, ...], tuple[int, ...]]
    batched: tuple[tuple[int, ...], tuple[int, ...]]

    @property
    def flops(self) -> int:
        """FLOPs of the product, two per multiply-add."""
        inner = math.prod(self.left[1][axis] for axis in self.contracted[0])
        return 2 * math.prod(self.result[1]) * inner


def read_products(text: str, unknown_trips: int = 1) -> Counter[Product]:
    """Returns {matrix product: executions in one run of the program} from the text of a program.

    The body of a loop counts once per iteration. All branches of a conditional count.

    Args:
      unknown_trips: number of iterations to count for a loop with an unknown trip count.
    """
    program = parse(text)
    times, _ = _times(program, lambda x: x.operation == "dot", unknown_trips)
    counts: Counter[Product] = Counter()
    for name, executions in times.items():
        computation = program.computations[name]
        for instruction in computation.instructions.values():
            if instruction.operation == "dot":
                counts[_product(computation, instruction)] += executions
    return counts


def _product(computation: Computation, dot: Instruction) -> Product:
    def array(type_: str) -> tuple[str, tuple[int, ...]]:
        kind, shape = _ARRAY.search(type_).groups()
        return kind, _integers(shape)

    def axes(kind: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        found = (
            re.search(rf"{side}_{kind}_dims={{([\d,]*)}}", dot.rest) for side in ("lhs", "rhs")
        )
        left, right = (_integers(match[1]) if match else () for match in found)
        return left, right

    left, right = (array(computation.instructions[name].type) for name in dot.operands)
    return Product(left, right, array(dot.type), axes("contracting"), axes("batch"))


def _integers(text: str) -> tuple[int, ...]:
    return tuple(map(int, filter(None, text.split(","))))


def _times(
    program: Program, wanted: Callable[[Instruction], bool], unknown_trips: int
) -> tuple[dict[str, int], int]:
    """Counts the executions of each computation that contains a wanted instruction.

    Args:
      unknown_trips: number of iterations to count for a loop with an unknown trip count.

    Returns:
      {name of the computation: executions in one run of the program}, and the number of loops that contain a wanted
      instruction and have an unknown trip count.
    """
    known: dict[str, bool] = {}

    def is_wanted(name: str) -> bool:
        if name not in known:
            instructions = program.computations[name].instructions.values()
            known[name] = any(
                wanted(instruction) or any(map(is_wanted, instruction.called))
                for instruction in instructions
            )
        return known[name]

    times: dict[str, int] = defaultdict(int)
    unknown = 0

    def visit(name: str, executions: int) -> None:
        nonlocal unknown
        times[name] += executions
        computation = program.computations[name]
        for instruction in computation.instructions.values():
            inner = [called for called in instruction.called if is_wanted(called)]
            trips: int | None = 1
            if inner and instruction.operation == "while":
                trips = trip_count(program, computation, instruction)
                unknown += trips is None
            for called in inner:
                visit(called, executions * (unknown_trips if trips is None else trips))

    visit(program.entry, 1)
    return times, unknown


def _received(kind: str, instruction: Instruction, devices: int) -> float:
    """Returns the bytes that each of n devices must receive for a collective with a result of S bytes.

    All-gather and all-to-all: (n - 1) / n S. All-reduce: 2 (n - 1) / n S, as a reduce-scatter and an all-gather.
    Reduce-scatter: (n - 1) S, because its result is one of n parts. Permute and broadcast: S. Between slices,
    n is the number of slices.
    """
    arrays = _ARRAY.findall(instruction.type)
    paired = instruction.operation in ("all-gather-start", "collective-permute-start")
    if paired:
        # The type of an asynchronous start lists operands, then results and scalars. Keep the results.
        arrays = [array for array in arrays if array[1]]
        arrays = arrays[len(arrays) // 2 :]
    if instruction.operation == "recv":
        arrays = arrays[:1]  # The type of a receive is its result, a context and a token.
    size = sum(_size(*array) for array in arrays)
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
    as in {1,2}x{0:7}, or the ids of all its devices.
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
        # A replica group lists whole mesh axes, 'x', and parts of mesh axes, 'x':(1)2.
        axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", mesh[2])
        return math.prod(int(part or sizes[axis]) for axis, part in axes)
    return devices


def array_bytes(type_: str) -> int:
    """Returns the bytes of all arrays in an HLO type, such as (f32[8,128]{1,0}, s32[])."""
    return sum(_size(*array) for array in _ARRAY.findall(type_))


def _size(kind: str, shape: str) -> int:
    """Returns the bytes of an array, such as ("bf16", "512,2048")."""
    if kind == "token":
        return 0
    bits = 8 if kind == "pred" else int(re.search(r"\d+", kind)[0])
    return math.prod(_integers(shape)) * bits // 8


def loop_factor(text: str) -> float:
    """Returns the ratio of the memory traffic with all loop iterations to the traffic with one iteration per loop.

    The compiler's cost analysis counts a loop body once: multiply its "bytes accessed" by this ratio. The traffic of an
    instruction or fusion is the size of its operands and its result. Slices and updates read or write only a part of an
    operand. Counts the body of a loop with an unknown trip count once.
    """
    program = parse(text)
    once = _moved(program, program.entry, False)
    return _moved(program, program.entry, True) / once if once else 1.0


def kernel_bytes(text: str) -> float:
    """Returns the bytes of the operands and results of all Pallas kernels, which the compiler's "bytes accessed" omits.

    A kernel in a loop counts once. A block of an operand that a kernel reads several times counts once.
    """
    return sum(
        _single(computation, instruction)
        for computation in parse(text).computations.values()
        for instruction in computation.instructions.values()
        if _KERNEL in instruction.rest
    )


def _moved(program: Program, name: str, iterate: bool) -> float:
    """Returns the bytes that the computation `name` reads and writes.

    Args:
      iterate: whether to count all iterations of a loop, or only one.
    """
    computation, total = program.computations[name], 0.0
    for instruction in computation.instructions.values():
        match instruction.operation:
            case "while":
                trips = trip_count(program, computation, instruction) if iterate else 1
                times = 1 if trips is None else trips
                total += times * sum(_moved(program, name, iterate) for name in instruction.called)
            case "conditional" | "call":
                total += sum(_moved(program, name, iterate) for name in instruction.called)
            case "fusion":
                total += _fused(program, computation, instruction)
            case _:
                total += _single(computation, instruction)
    return total


def _single(computation: Computation, instruction: Instruction) -> float:
    """Returns the bytes that an instruction, other than a fusion, reads and writes."""
    if instruction.operation in _NOTHING or instruction.operation.endswith("-done"):
        return 0
    if instruction.operation in _PARTS:
        return 2 * array_bytes(instruction.type)
    read = [array_bytes(computation.instructions[name].type) for name in instruction.operands]
    if instruction.operation == "dynamic-update-slice":
        return 2 * read[1]
    if instruction.operation in ("send", "recv"):
        return array_bytes(instruction.type)
    # The type of an asynchronous start contains the operands and the result.
    if instruction.operation.endswith("-start"):
        return 2 * sum(read)
    return sum(read) + array_bytes(instruction.type)


def _fused(program: Program, computation: Computation, instruction: Instruction) -> float:
    """Returns the bytes that a fusion reads and writes."""
    inner = program.computations[instruction.called[0]]
    total = 0.0
    for name, parameter in inner.instructions.items():
        if parameter.operation == "parameter":
            users = [user for user in inner.instructions.values() if name in user.operands]
            parts = [_part(name, user) for user in users]
            total += array_bytes(parameter.type) if None in parts else sum(parts)
    root = inner.instructions[inner.root]
    results = root.operands if root.operation == "tuple" else [inner.root]
    return total + sum(_written(inner, name) for name in results)


def _part(name: str, user: Instruction) -> float | None:
    """Returns the bytes that an instruction reads of its operand `name`; None if it reads the whole operand."""
    if user.operation in _PARTS and user.operands[0] == name:
        return array_bytes(user.type)
    if user.operation == "dynamic-update-slice" and user.operands[0] == name:
        return 0
    return None


def _written(inner: Computation, name: str) -> float:
    """Returns the bytes that a fusion writes for its result `name`. A dynamic-update-slice writes only the new part."""
    source = inner.source(name)
    if source.operation == "dynamic-update-slice":
        return array_bytes(inner.instructions[source.operands[1]].type)
    return array_bytes(inner.instructions[name].type)
