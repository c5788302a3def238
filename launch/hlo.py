"""Reads the text of a compiled program (HLO): its computations, instructions and loops."""

import math
import re
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) .*\{$")
_INSTRUCTION = re.compile(
    r"^\s*(?P<root>ROOT )?%?(?P<name>[\w.-]+) = (?P<type>.*?) (?P<operation>[a-z][\w-]*)"
    r"\((?P<arguments>.*?)\)(?P<rest>.*)$"
)
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|\w+_computation)=%?([\w.-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')

_ITERATIONS = re.compile(r"iterations=([\d.e+-]+)")

ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")


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
    def index(self) -> int:
        """Index of a get-tuple-element instruction."""
        return int(re.search(r"index=(\d+)", self.rest)[1])


class Computation(NamedTuple):
    """An HLO computation: name -> instruction, and the name of the root instruction, which computes the result."""

    instructions: dict[str, Instruction]
    root: str

    def source(self, name: str) -> Instruction:
        """Returns the instruction that computes the value `name`, skipping copies and bitcasts."""
        instruction = self.instructions[name]
        while instruction.operation in ("copy", "bitcast") and instruction.operands:
            instruction = self.instructions[instruction.operands[0]]
        return instruction


class Program(NamedTuple):
    """An HLO program: name -> computation, and the name of the entry computation."""

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


def trip_count(program: Program, within: Computation, loop: Instruction) -> float | None:
    """Returns the trip count of a `while` instruction in the computation `within`; None if the count is unknown.

    Reads the compiler's annotation. Without an annotation, recognises loops that count from a constant up to a constant
    in constant steps. For any other loop, returns the mean number of iterations if a name scope of the loop states this
    number (`common.train.flops`).
    """
    if known := _TRIPS.search(loop.rest):
        return int(known[1])
    counted = _counted_trips(program, within, loop)
    if counted is None and (scopes := _ITERATIONS.findall(loop.rest)):
        return float(scopes[-1])
    return counted


def _counted_trips(program: Program, within: Computation, loop: Instruction) -> int | None:
    """Returns the trip count of a loop that counts from a constant up to a constant in constant steps, else None."""
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
        return None


def count_executions(
    program: Program, wanted: Callable[[Instruction], bool], unknown_trips: int
) -> tuple[dict[str, float], int]:
    """Counts the executions of the entry computation and of each other computation with a wanted instruction.

    The instructions of a computation include the instructions of the computations that it calls.

    Args:
      wanted: function that returns whether an instruction is wanted.
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

    times: dict[str, float] = defaultdict(float)
    unknown = 0

    def visit(name: str, executions: float) -> None:
        nonlocal unknown
        times[name] += executions
        computation = program.computations[name]
        for instruction in computation.instructions.values():
            inner = [called for called in instruction.called if is_wanted(called)]
            trips: float | None = 1
            if inner and instruction.operation == "while":
                trips = trip_count(program, computation, instruction)
                unknown += trips is None
            for called in inner:
                visit(called, executions * (unknown_trips if trips is None else trips))

    visit(program.entry, 1)
    return times, unknown


def integers(text: str) -> tuple[int, ...]:
    """Returns the integers of a list such as "512,2048"."""
    return tuple(map(int, filter(None, text.split(","))))


def array_bytes(type_: str) -> int:
    """Returns the bytes of all arrays in an HLO type, such as (f32[8,128]{1,0}, s32[])."""
    return sum(size_of(*array) for array in ARRAY.findall(type_))


def size_of(kind: str, shape: str) -> int:
    """Returns the bytes of an array from its HLO type and its shape, such as "bf16" and "512,2048"."""
    if kind == "token":
        return 0
    bits = 8 if kind == "pred" else int(re.search(r"\d+", kind)[0])
    return math.prod(integers(shape)) * bits // 8
