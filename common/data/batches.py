"""Reads global batches in order, and gives each process its rows."""

from collections.abc import Callable, Iterator

import grain
import jax
import numpy as np

from common.errors import check

Batch = dict[str, np.ndarray]
"""Name -> array (B, ...) with the rows of this process."""

THREADS = 2
"""Number of threads that assemble batches."""


class EndlessBatches(grain.MapDataset):
    """Endless training batches. Subclasses implement `__getitem__`, which returns this process's rows of a batch."""

    def __len__(self) -> int:
        return 2**62


def iterate(
    batches: grain.MapDataset, start: dict[str, int] | None = None
) -> Iterator[tuple[Batch, dict[str, int]]]:
    """Yields each batch in order, with the data state after the batch: a JSON object of numbers.

    Args:
      start: data state that an earlier iteration yielded, possibly with another number of processes. Resumes after the
        batch of this state. None starts at the first batch.
    """
    options = grain.ReadOptions(num_threads=THREADS, prefetch_buffer_size=16)
    iterator = iter(batches.to_iter_dataset(options))
    try:
        if start is not None:
            iterator.set_state(start)
        for batch in iterator:
            yield batch, iterator.get_state()
    finally:
        iterator.close()


def check_rows(rows: int, multiple: int, option: str = "--config.data.batch") -> None:
    """Raises a UserError unless `rows`, the number of rows of a global batch, is a positive multiple of `multiple`.

    The message names `option`, the command-line option of `rows`.
    """
    check(
        rows >= 1 and rows % multiple == 0,
        f"{option}={rows} must be a positive multiple of {multiple}, the product of --config.mesh.data,"
        " --config.mesh.fsdp and --config.train.accumulate",
    )


def local_rows(ids: np.ndarray, rows: int) -> np.ndarray:
    """Pads the example ids of a global batch with -1 to `rows` ids, and returns the part of this process."""
    index, count = jax.process_index(), jax.process_count()
    full = np.full(rows, -1, np.int32)
    full[: len(ids)] = ids
    return full[index * rows // count : (index + 1) * rows // count]


def in_order(
    gather: Callable[[np.ndarray], Batch], count: int, rows: int, *, multiple: int = 1
) -> Iterator[Batch]:
    """Yields this process's rows of batches that together contain the examples 0 to `count` - 1 once, in order.

    Args:
      gather: function from example ids (-1 for an empty row) to a batch.
      rows: number of rows of a global batch, which is rounded up to a multiple of `multiple`.

    Yields:
      The batch that `gather` returns, with the example ids as the array `ids`.
    """
    rows = -(-rows // multiple) * multiple
    for start in range(0, count, rows):
        ids = local_rows(np.arange(start, min(start + rows, count)), rows)
        yield {**gather(ids), "ids": ids}
