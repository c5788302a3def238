"""Batches of examples that all have the same shape, by their numbers: digits, windows of text."""

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import grain
import jax
import numpy as np

from common.data.batching import ENDLESS, Batch, check_rows, local_rows


class ExampleBatches(grain.MapDataset):
    """Training batches with random access: endless epochs, each in an order of its own.

    The seed, the epoch and the position give a batch. The last one of an epoch is filled up with empty rows.

    Attributes:
        batches_per_epoch: batches in one epoch.
    """

    def __init__(
        self,
        gather: Callable[[np.ndarray], Batch],
        count: int,
        rows: int,
        *,
        multiple: int = 1,
        seed: int = 0,
    ) -> None:
        """Takes what reads examples.

        Args:
            gather: numbers of examples, -1 for an empty row, to the rows of a batch.
            count: number of examples.
            rows: of a global batch.
            multiple: has to divide `rows`.
            seed: of the order.

        Raises:
            UserError: `multiple` does not divide `rows`.
        """
        super().__init__()
        check_rows(rows, multiple)
        self._gather, self._count, self._rows, self._seed = gather, count, rows, seed
        self.batches_per_epoch = -(-count // rows)
        # Two, as threads that read ahead may be on both sides of the border of an epoch.
        self._order = lru_cache(maxsize=2)(self._make_order)

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int | slice) -> Any:
        """The part of global batch `index` that belongs to this process."""
        if isinstance(index, slice):
            return self.slice(index)
        epoch, position = divmod(index, self.batches_per_epoch)
        ids = self._order(epoch)[position * self._rows : (position + 1) * self._rows]
        return self._gather(local_rows(ids, self._rows, jax.process_index(), jax.process_count()))

    def _make_order(self, epoch: int) -> np.ndarray:
        return np.random.default_rng((self._seed, epoch)).permutation(self._count)


def in_order(
    gather: Callable[[np.ndarray], Batch], count: int, rows: int, *, multiple: int = 1
) -> Iterator[Batch]:
    """Every example once; the arguments are those of `ExampleBatches`."""
    check_rows(rows, multiple)
    for start in range(0, count, rows):
        ids = np.arange(start, min(start + rows, count))
        yield gather(local_rows(ids, rows, jax.process_index(), jax.process_count()))
