"""Batches of examples of equal shape, such as images or windows of text."""

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from common.data.batches import Batch, EndlessBatches, check_rows, local_rows


class ExampleBatches(EndlessBatches):
    """Endless training batches with random access. Every epoch shuffles the examples.

    The seed and the index determine a batch. The last batch of an epoch is padded with empty rows.
    """

    def __init__(
        self,
        gather: Callable[[np.ndarray], Batch],
        count: int,
        rows: int,
        *,
        multiple: int = 1,
        seed: int = 0,
        option: str = "--config.data.batch",
    ) -> None:
        """Splits the examples 0 to `count` - 1 into batches.

        Args:
          gather: function from example indices (-1 for an empty row) to a batch.
          rows: number of rows of a global batch, a multiple of `multiple`.
          option: command-line option of `rows`, for the error message.

        Raises:
          UserError: `rows` is not a positive multiple of `multiple`.
        """
        super().__init__()
        check_rows(rows, multiple, option)
        self._gather, self._rows = gather, rows
        self.batches_per_epoch = -(-count // rows)
        # Cache two epochs, because prefetching threads may already read the next epoch.
        self._order = lru_cache(maxsize=2)(
            lambda epoch: np.random.default_rng((seed, epoch)).permutation(count)
        )

    def __getitem__(self, index: int) -> Batch:
        epoch, position = divmod(index, self.batches_per_epoch)
        ids = self._order(epoch)[position * self._rows : (position + 1) * self._rows]
        return self._gather(local_rows(ids, self._rows))
