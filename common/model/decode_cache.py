"""Decoding caches. A loop of decoding steps can extend a cache without copying all of it in each step.

XLA copies an array that a loop both reads and writes. A cache may therefore have two arrays: `past`, which a loop of
decoding steps only reads, and the short `recent`, which the steps write. `settle` copies `recent` into `past` after the
loop.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

UNWRITTEN = 2**31 - 1
"""Position that marks the free space of `DecodeCache.past`. It is greater than the position of every token."""


@dataclass(frozen=True)
class CacheSpec:
    """Size and dtype of a cache.

    Attributes:
      length: maximum number of positions.
      dtype: dtype of the cached values, unless `empty` gets another dtype.
      recent: number of positions in `DecodeCache.recent`. A loop of decoding steps may write at most this number
        before `settle`. 0 for a cache with a single array of `length` positions.
    """

    length: int
    dtype: Any
    recent: int = 0

    def empty(
        self, shape: tuple[int, ...], axis: int, dtype: Any = None, value: int = 0
    ) -> "DecodeCache":
        """Returns an empty cache, whose free space is filled with `value`.

        Args:
          shape: shape of the values of one position.
          axis: axis along which the positions are concatenated.
          dtype: dtype of the cache; None for the dtype of this spec.
        """

        def filled(positions: int) -> jax.Array:
            whole = (*shape[:axis], positions * shape[axis], *shape[axis + 1 :])
            return jnp.full(whole, value, dtype or self.dtype)

        if not self.recent:
            return DecodeCache(None, filled(self.length), None, axis, shape[axis])
        # `settle` copies the whole array of `recent` positions into `past`, at a start position of at most `length`.
        # The additional positions of `past` make room for this copy.
        past, recent = filled(self.length + self.recent), filled(self.recent)
        return DecodeCache(past, recent, jnp.int32(0), axis, shape[axis])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeCache:
    """A cached array, split along its axis of positions into `past` and `recent`.

    Attributes:
      past: values of the positions 0 to `start` - 1, then free space; None if `recent` holds the whole cache.
      recent: values of the positions from `start` on (from 0 on if `past` is None), then free space.
      start: number of positions that `past` holds; None if `past` is None.
      axis: the axis of the positions in both arrays.
      each: number of indices along `axis` that belong to one position, such as the number of beams.
    """

    past: jax.Array | None
    recent: jax.Array
    start: jax.Array | None
    axis: int = field(metadata={"static": True})
    each: int = field(metadata={"static": True})

    def write(self, new: jax.Array, index: jax.Array) -> "DecodeCache":
        """Returns the cache with `new` at position `index`."""
        place = (index if self.start is None else index - self.start) * self.each
        update = jax.lax.dynamic_update_slice_in_dim
        return replace(self, recent=update(self.recent, new, place, self.axis))

    def filled(self, new: jax.Array) -> "DecodeCache":
        """Returns this cache, which must be empty, with `new` written from position 0 on.

        Writes to `past`, or to `recent` if `past` is None.
        """
        update = partial(jax.lax.dynamic_update_slice_in_dim, start_index=0, axis=self.axis)
        if self.past is None:
            return replace(self, recent=update(self.recent, new))
        start = jnp.int32(new.shape[self.axis] // self.each)
        return replace(self, past=update(self.past, new), start=start)

    def settled(self, count: int) -> "DecodeCache":
        """Returns the cache with the first `count` positions of `recent` copied into `past`, if `past` is not None."""
        if self.past is None:
            return self
        update = jax.lax.dynamic_update_slice_in_dim
        past = update(self.past, self.recent, self.start * self.each, self.axis)
        return replace(self, past=past, start=self.start + count)

    def parts(
        self, first: jax.Array | None = None, count: int = 0
    ) -> list[tuple[jax.Array, jax.Array]]:
        """Returns pairs (array, positions) for `past` and `recent`.

        `positions` holds the position of every index along `axis`; `UNWRITTEN` marks the free space of `past`.

        Args:
          first, count: the caller needs the positions `first` to `first` + `count` - 1; all positions if `first` is
            None. The arrays may contain additional positions.
        """
        parts = []
        if self.past is not None:
            past, positions = self._part(self.past, 0, first, count)
            parts.append((past, jnp.where(positions < self.start, positions, UNWRITTEN)))
            first = None
        begin = 0 if self.start is None else self.start
        return [*parts, self._part(self.recent, begin, first, count)]

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


_map = partial(jax.tree.map, is_leaf=lambda x: isinstance(x, DecodeCache))


def settle(cache: Any, count: int) -> Any:
    """Returns a tree of caches with `recent` copied into `past`, after `count` decoding steps."""
    return _map(lambda x: x.settled(count) if isinstance(x, DecodeCache) else x, cache)


def writable(cache: Any) -> Any:
    """Returns the arrays that decoding steps write: the tree `cache` without `past` and `start` of each DecodeCache."""
    return _map(lambda x: x.recent if isinstance(x, DecodeCache) else x, cache)


def with_writable(cache: Any, part: Any) -> Any:
    """Inverse of `writable`: returns the tree of caches with its writable arrays replaced by the arrays of `part`."""
    return _map(
        lambda x, new: replace(x, recent=new) if isinstance(x, DecodeCache) else new, cache, part
    )
