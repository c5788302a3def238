"""What decoding remembers of a sequence, and how it grows without being copied.

XLA copies an array that a loop both reads and writes. So a long memory has two arrays: the past, which a run of steps
only reads, and the few recent positions, which they write; `settle` moves these over when the run is done.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from common.model.row import PARTS

NEVER = 2**31 - 1
"""The position of what has not been written: behind every other."""


@dataclass(frozen=True)
class CacheSpec:
    """How much a memory can hold.

    Attributes:
      length: positions in all.
      dtype: of what is remembered.
      recent: positions that may be written before the memory is settled; 0 keeps all in one array.
    """

    length: int
    dtype: Any
    recent: int = 0


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["past", "recent", "start"],
    meta_fields=["axis", "each"],
)
@dataclass(frozen=True)
class DecodeCache:
    """An array over positions.

    Attributes:
      past: positions 0 to `start` - 1, and room for more; None where all is recent.
      recent: positions `start` and after.
      start: how many positions are settled; None is 0.
      axis: where the positions are.
      each: entries of a position.
    """

    past: jax.Array | None
    recent: jax.Array
    start: jax.Array | None
    axis: int
    each: int

    @classmethod
    def empty(
        cls, shape: tuple[int, ...], axis: int, room: CacheSpec, dtype: Any = None, value: int = 0
    ) -> "DecodeCache":
        """Nothing remembered yet; `shape` is that of one position."""

        def filled(positions: int) -> jax.Array:
            whole = (*shape[:axis], positions * shape[axis], *shape[axis + 1 :])
            return jnp.full(whole, value, dtype or room.dtype)

        if not room.recent:
            return cls(None, filled(room.length), None, axis, shape[axis])
        # What is settled last may reach beyond the length; a whole number of parts can be read in parallel.
        positions = -(-(room.length + room.recent) // PARTS) * PARTS
        past, recent = filled(positions), filled(room.recent)
        return cls(past, recent, jnp.int32(0), axis, shape[axis])

    def write(self, new: jax.Array, index: jax.Array) -> "DecodeCache":
        """With position `index`."""
        place = (index if self.start is None else index - self.start) * self.each
        update = jax.lax.dynamic_update_slice_in_dim
        return replace(self, recent=update(self.recent, new, place, self.axis))

    def filled(self, new: jax.Array) -> "DecodeCache":
        """With the first positions of an empty memory, settled."""
        update = partial(jax.lax.dynamic_update_slice_in_dim, start_index=0, axis=self.axis)
        if self.past is None:
            return replace(self, recent=update(self.recent, new))
        start = jnp.int32(new.shape[self.axis] // self.each)
        return replace(self, past=update(self.past, new), start=start)

    def settled(self, count: int) -> "DecodeCache":
        """With `count` recent positions in the past, and none recent."""
        if self.past is None:
            return self
        update = jax.lax.dynamic_update_slice_in_dim
        past = update(self.past, self.recent, self.start * self.each, self.axis)
        return replace(self, past=past, start=self.start + count)

    def parts(
        self, first: jax.Array | None = None, count: int = 0
    ) -> list[tuple[jax.Array, jax.Array]]:
        """The arrays that hold it, each with the position of every entry (`NEVER` where there is none).

        With `first`, only the `count` positions from there need be in them; what was written last always is.
        """
        found = []
        if self.past is not None:
            past, positions = self._part(self.past, 0, first, count)
            found.append((past, jnp.where(positions < self.start, positions, NEVER)))
            first = None
        begin = 0 if self.start is None else self.start
        return [*found, self._part(self.recent, begin, first, count)]

    def _part(self, array, begin, first, count) -> tuple[jax.Array, jax.Array]:
        size = array.shape[self.axis]
        positions = begin + jnp.arange(size) // self.each
        if first is None or count * self.each >= size:
            return array, positions
        cut = partial(
            jax.lax.dynamic_slice_in_dim,
            start_index=first * self.each,
            slice_size=count * self.each,
        )
        return cut(array, axis=self.axis), cut(positions, axis=0)


def _each(change: Callable, cache: Any, *others: Any) -> Any:
    is_memory = lambda x: isinstance(x, DecodeCache)  # noqa: E731
    return jax.tree.map(change, cache, *others, is_leaf=is_memory)


def settle(cache: Any, count: int) -> Any:
    """A cache after a run of `count` steps, ready for the next."""
    return _each(lambda x: x.settled(count) if isinstance(x, DecodeCache) else x, cache)


def changing(cache: Any) -> Any:
    """The part of a cache that a run of steps writes."""
    return _each(lambda x: x.recent if isinstance(x, DecodeCache) else x, cache)


def changed(cache: Any, part: Any) -> Any:
    """The cache with that part in place of its own."""
    return _each(
        lambda x, new: replace(x, recent=new) if isinstance(x, DecodeCache) else new, cache, part
    )
