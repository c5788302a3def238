"""How much of a program's traffic is in loops, read from its text (HLO): compilers count the body of a loop once."""

from launch import hlo
from launch.collectives import array_bytes
from launch.hlo import Computation, Instruction, Program

_NOTHING = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "iota")
_PARTS = ("slice", "dynamic-slice", "gather")


def repeated(text: str) -> float:
    """How many times as much as in a program whose loops run once is read and written in this one.

    Each instruction reads its operands and writes its result, a fusion being one; of what it slices or updates it
    touches a part. A loop of which nobody knows how often it runs counts once.
    """
    program = hlo.parse(text)
    once = _moved(program, program.entry, False)
    return _moved(program, program.entry, True) / once if once else 1.0


def _moved(program: Program, name: str, often: bool) -> float:
    """Bytes that a computation reads and writes; loops in it run as often as they do, or once."""
    computation, total = program.computations[name], 0.0
    for instruction in computation.instructions.values():
        match instruction.operation:
            case "while":
                trips = hlo.trips(program, computation, instruction) if often else 1
                times = 1 if trips is None else trips
                total += times * sum(_moved(program, one, often) for one in instruction.called)
            case "conditional" | "call":
                total += sum(_moved(program, one, often) for one in instruction.called)
            case "fusion":
                total += _fused(program, computation, instruction)
            case _:
                total += _single(computation, instruction)
    return total


def _single(computation: Computation, instruction: Instruction) -> float:
    if instruction.operation in _NOTHING or instruction.operation.endswith("-done"):
        return 0
    if instruction.operation in _PARTS:
        return 2 * array_bytes(instruction.type)
    read = [array_bytes(computation.instructions[name].type) for name in instruction.operands]
    if instruction.operation == "dynamic-update-slice":
        return 2 * read[1]
    if instruction.operation.endswith("-start"):  # its result names its operands once more
        return 2 * sum(read)
    return sum(read) + array_bytes(instruction.type)


def _fused(program: Program, computation: Computation, instruction: Instruction) -> float:
    inner = program.computations[instruction.called[0]]
    total = 0.0
    for name, one in inner.instructions.items():
        if one.operation == "parameter":
            users = [user for user in inner.instructions.values() if name in user.operands]
            parts = [_part(inner, name, user) for user in users]
            total += array_bytes(one.type) if None in parts else sum(parts)
    root = inner.instructions[inner.root]
    results = root.operands if root.operation == "tuple" else [inner.root]
    return total + sum(_written(inner, name) for name in results)


def _part(inner: Computation, name: str, user: Instruction) -> float | None:
    """What an instruction reads of an operand of which it needs a part; None where it needs all of it."""
    if user.operation in _PARTS and user.operands[0] == name:
        return array_bytes(user.type)
    if user.operation == "dynamic-update-slice" and user.operands[0] == name:
        return 0
    return None


def _written(inner: Computation, name: str) -> float:
    made = inner.source(name)
    if made.operation == "dynamic-update-slice":
        return array_bytes(inner.instructions[made.operands[1]].type)
    return array_bytes(inner.instructions[name].type)
