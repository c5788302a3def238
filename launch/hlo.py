"""The text of a compiled program (HLO), as far as a plan reads it: which computation runs which, and how often."""

import re
from typing import NamedTuple

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) .*\{$")
_INSTRUCTION = re.compile(
    r"^\s*(?P<root>ROOT )?%?(?P<name>[\w.-]+) = (?P<type>.*?) (?P<operation>[a-z][\w-]*)\((?P<given>.*?)\)(?P<rest>.*)$"
)
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|\w+_computation)=%?([\w.-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


class Instruction(NamedTuple):
    """`name = type operation(given)rest`"""

    type: str
    operation: str
    given: str
    rest: str

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.-]+)", self.given)

    @property
    def called(self) -> list[str]:
        """The computations that it runs; of a branch all arms."""
        arms = [name for arms in _BRANCHES.findall(self.rest) for name in arms.split(",")]
        return _CALLED.findall(self.rest) + [name.strip(" %") for name in arms]

    @property
    def number(self) -> int | None:
        """The value of a whole constant."""
        whole = self.operation == "constant" and self.given.lstrip("-").isdecimal()
        return int(self.given) if whole else None

    @property
    def index(self) -> int:
        """Which part of a tuple it takes."""
        return int(re.search(r"index=(\d+)", self.rest)[1])


class Computation(NamedTuple):
    """Instructions by name, and the name of the one whose value it returns."""

    instructions: dict[str, Instruction]
    root: str

    def source(self, name: str) -> Instruction:
        """Where a value comes from, behind copies of it."""
        found = self.instructions[name]
        while found.operation in ("copy", "bitcast") and found.operands:
            found = self.instructions[found.operands[0]]
        return found


class Program(NamedTuple):
    computations: dict[str, Computation]
    entry: str


def parse(text: str) -> Program:
    """The computations of a program."""
    computations: dict[str, Computation] = {}
    entry = ""
    name, instructions = "", {}
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            name, instructions = header[2], {}
            computations[name] = Computation(instructions, "")
            entry = name if header[1] else entry
        elif name and (found := _INSTRUCTION.match(line)):
            parts = Instruction(*found.group("type", "operation", "given", "rest"))
            instructions[found["name"]] = parts
            if found["root"]:
                computations[name] = Computation(instructions, found["name"])
    return Program(computations, entry)


def trips(program: Program, within: Computation, loop: Instruction) -> int | None:
    """How often the body of a `while` runs; None where that is not known.

    The compiler says so of most loops. Of others it can be seen: those that count up to a constant in equal steps.
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
        place = counter.index
        following = body.source(body.source(body.root).operands[place])
        before, step = sorted(
            (body.source(name) for name in following.operands), key=lambda x: x.number is not None
        )
        first = within.source(within.source(loop.operands[0]).operands[place])
        simple = (test.operation, following.operation) == ("compare", "add") and (
            "direction=LT" in test.rest and before.index == place
        )
        return -(-(end.number - first.number) // step.number) if simple else None
    except (KeyError, IndexError, TypeError, ValueError, ZeroDivisionError):
        return None  # it counts in another way
