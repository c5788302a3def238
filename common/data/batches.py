"""Global batches with random access: a batch is a function of its index, whatever the number of processes."""

from collections.abc import Iterator

import grain
import numpy as np

from common.errors import UserError

Batch = dict[str, np.ndarray]
"""Arrays (B, ...) of this process's rows."""

ENDLESS = 2**62
"""The length of endless data."""


def iterate(
    batches: grain.MapDataset,
    start: dict[str, int] | None = None,
    *,
    threads: int = 2,
    prefetch: int = 16,
) -> Iterator[tuple[Batch, dict[str, int]]]:
    """Reads batches in order with prefetching threads.

    Args:
        start: state of an earlier iteration, with any number of processes: continues after the batch that it was
            yielded with. None starts at the beginning.
        threads: number of threads that assemble batches.
        prefetch: number of batches assembled ahead.

    Yields:
        A batch and the state after it, a JSON object of numbers.
    """
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=prefetch)
    iterator = iter(batches.to_iter_dataset(options))
    try:
        if start is not None:
            iterator.set_state(start)
        for batch in iterator:
            yield batch, iterator.get_state()
    finally:
        iterator.close()


def check_rows(rows: int, multiple: int) -> None:
    """Checks that `multiple` divides the rows of a global batch.

    Raises:
        UserError: it does not.
    """
    if rows < 1 or rows % multiple:
        raise UserError(
            f"a batch of {rows} examples is not divisible by {multiple} (devices times microbatches)"
        )


def local_rows(ids: np.ndarray, rows: int, index: int, count: int) -> np.ndarray:
    """Returns this process's part of a batch, (rows / count,): `ids` padded with -1 to `rows`, then split."""
    full = np.full(rows, -1, np.int32)
    full[: len(ids)] = ids
    return full[index * rows // count : (index + 1) * rows // count]
