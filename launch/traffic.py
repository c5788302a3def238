"""Corrects the compiler's count of memory traffic ("bytes accessed") for loops and for Pallas kernels."""

from launch.hlo import Computation, Instruction, Program, array_bytes, parse, trip_count

_KERNEL = 'custom_call_target="tpu_custom_call"'  # a Pallas kernel
# Operations that count as no memory traffic.
_NOTHING = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "iota")
# Operations that read only a part of their first operand, as large as their result.
_PARTS = ("slice", "dynamic-slice", "gather")


def loop_factor(text: str) -> float:
    """Returns the ratio of the memory traffic with all loop iterations to the traffic with one iteration per loop.

    The compiler's cost analysis counts a loop body once: multiply its "bytes accessed" by this ratio. The traffic of an
    instruction or fusion is the size of its operands and its result. Slices and updates read or write only a part of an
    operand. Counts the body of a loop with an unknown trip count once, and all branches of a conditional.
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
    """Returns the bytes that a computation reads and writes. If `iterate`, counts all iterations of loops, else one."""
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
                total += _fused(program, instruction)
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
    # The type of an asynchronous start lists its results, and may list its operands and other values too. For an
    # all-gather, count the type, which lists the operands and the results. Assume that the results of all other starts
    # are as large as their operands, and count the operands twice.
    if instruction.operation == "all-gather-start":
        return array_bytes(instruction.type)
    if instruction.operation.endswith("-start"):
        return 2 * sum(read)
    return sum(read) + array_bytes(instruction.type)


def _fused(program: Program, instruction: Instruction) -> float:
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
