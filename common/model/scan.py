"""Stacks that scan their repeating blocks; see `common.model.layers`."""

from collections.abc import Hashable, Sequence

import jax
from flax import nnx

from common.model.block import Block, Context
from common.model.dropout import Key
from common.model.stack import Stack


def runs(kinds: Sequence[Hashable]) -> list[tuple[int, int, int]]:
    """Splits a sequence into runs (start, period, stop). A run consists of copies of its first `period` elements.

    From left to right, takes the run whose copies after the first have the most elements. "LLLRLRLLL" has the runs
    "LLL", "RLRL" and "LL". An element that does not repeat is a run of its own.
    """
    found, start = [], 0
    while start < len(kinds):
        candidates = []
        for period in range(1, len(kinds) - start + 1):
            stop = start + period
            while stop < len(kinds) and kinds[stop] == kinds[stop - period]:
                stop += 1
            repeated = (stop - start) // period - 1
            candidates.append((repeated * period, -period, start + (repeated + 1) * period))
        _, period, stop = max(candidates)
        found.append((start, -period, stop))
        start = stop
    return found


class ScannedStack(Stack):
    """A stack in a training step: each run of blocks (see `runs`) is one `jax.lax.scan`. Cannot decode.

    The backward pass computes the gradient at the input of every block, even if no array before the first block trains.

    Attributes:
      depth: number of blocks of the unrolled stack.
      runs: (start, period, stop) of each run.
      blocks: "first:stop:period" -> block whose variables hold the values of the blocks range(first, stop, period).
    """

    def __init__(self, stack: Stack):
        self.norm, self.remat, self.skip_rate = stack.norm, stack.remat, stack.skip_rate
        self.depth, self.runs = len(stack.blocks), tuple(runs([_kind(b) for b in stack.blocks]))
        self.blocks = nnx.Dict()
        for start, period, stop in self.runs:
            for number in range(start, start + period):
                block = _stacked(stack.blocks[number], (stop - start) // period)
                self.blocks[f"{number}:{stop}:{period}"] = block

    def __call__(self, x_BLD: jax.Array, context: Context, key: Key = None) -> jax.Array:
        keys_P = self._block_keys(key, self.depth)
        for start, period, stop in self.runs:
            numbers = range(start, start + period)
            parts = [nnx.split(_read(self.blocks[f"{n}:{stop}:{period}"])) for n in numbers]
            keys = [None if key is None else keys_P[n:stop:period] for n in numbers]

            def unit(x_BLD: jax.Array, scanned: tuple, numbers=numbers, parts=parts) -> tuple:
                for number, (graphdef, _), state, key in zip(numbers, parts, *scanned, strict=True):
                    block = nnx.merge(graphdef, state)
                    x_BLD = self._call_block(block, number, x_BLD, context, key)
                return x_BLD, None

            x_BLD, _ = jax.lax.scan(unit, x_BLD, ([state for _, state in parts], keys))
        return self._leave(x_BLD)


def scan_stacks(model: nnx.Module, least: int) -> None:
    """Replaces each stack that has at least `least` blocks and a repeating run of blocks (`runs`) by a `ScannedStack`.

    `model` must have abstract variables.
    """
    for _, part in list(nnx.iter_modules(model)):
        for name, stack in list(vars(part).items()):
            if isinstance(stack, Stack) and len(stack.blocks) >= least:
                scanned = ScannedStack(stack)
                if len(scanned.blocks) < scanned.depth:
                    setattr(part, name, scanned)


def _kind(block: Block) -> tuple:
    """Returns the structure of a block without the values of its variables. Blocks of equal structure are copies."""
    graphdef, state = nnx.split(block)
    leaves, structure = jax.tree.flatten(state)
    return graphdef, structure, *((x.shape, x.dtype) for x in leaves)


def _stacked(block: Block, layers: int) -> Block:
    """Returns a copy of the block whose variables are abstract and have a new first axis of `layers` blocks."""
    block = nnx.clone(block)
    for _, part in nnx.iter_modules(block):
        for name, variable in list(vars(part).items()):
            if isinstance(variable, nnx.Variable):
                value = jax.ShapeDtypeStruct((layers, *variable.shape), variable.dtype)
                metadata = variable.get_metadata()
                metadata |= {"axes": (None, *metadata["axes"])}
                setattr(part, name, type(variable)(value, **metadata))
    return block


def _read(block: Block) -> Block:
    """Replaces each variable by a variable with its value, without the hook `on_get_value` (`common.train.exchange`).

    The hook returns the values of all layers, so it must be called before a scan slices the values.
    """
    for _, part in nnx.iter_modules(block):
        for name, variable in list(vars(part).items()):
            if isinstance(variable, nnx.Variable):
                metadata = {"axes": variable.get_metadata("axes")}
                setattr(part, name, type(variable)(variable.get_value(), **metadata))
    return block
