"""Counts the matrix products (`dot` instructions) of a compiled program (HLO)."""

import math
import re
from collections import Counter
from typing import NamedTuple

from launch.hlo import ARRAY, Computation, Instruction, count_executions, integers, parse


class Product(NamedTuple):
    """A matrix product.

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

    The body of a loop counts once per iteration: `unknown_trips` times if the trip count is unknown. All branches of a
    conditional count.
    """
    program = parse(text)
    times, _ = count_executions(program, lambda x: x.operation == "dot", unknown_trips)
    counts: Counter[Product] = Counter()
    for name, executions in times.items():
        computation = program.computations[name]
        for instruction in computation.instructions.values():
            if instruction.operation == "dot":
                counts[_product(computation, instruction)] += executions
    return counts


def _product(computation: Computation, dot: Instruction) -> Product:
    def array(type_: str) -> tuple[str, tuple[int, ...]]:
        kind, shape = ARRAY.search(type_).groups()
        return kind, integers(shape)

    def axes(kind: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        found = (
            re.search(rf"{side}_{kind}_dims={{([\d,]*)}}", dot.rest) for side in ("lhs", "rhs")
        )
        left, right = (integers(match[1]) if match else () for match in found)
        return left, right

    left, right = (array(computation.instructions[name].type) for name in dot.operands)
    return Product(left, right, array(dot.type), axes("contracting"), axes("batch"))
