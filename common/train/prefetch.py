"""Copies batches to the devices before the training step needs them."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from common.errors import UserError, check
from common.sharding import batch_sharding
from common.train.task import Batch


def put(batch: Batch, mesh: Mesh) -> dict[str, jax.Array]:
    """Copies this process's rows of a batch to its devices; returns the global, sharded arrays."""
    sharding = batch_sharding(mesh)
    return {
        name: jax.make_array_from_process_local_data(sharding, rows) for name, rows in batch.items()
    }


def device_prefetch(
    batches: Iterable[tuple[Batch, Any]], mesh: Mesh, ahead: int = 2
) -> Iterator[tuple[dict[str, jax.Array], Any]]:
    """Yields (batch on the devices, data state after the batch). Copies the next `ahead` batches in advance.

    Raises a UserError if `batches` is not iterable, or yields a value that is not a tuple of two dictionaries.
    """
    check(
        isinstance(batches, Iterable),
        f"Task.batches must return an iterable of tuples (batch, data state); it returned {batches!r:.80}",
    )
    queue: deque = deque()
    for pair in batches:
        parts = pair if isinstance(pair, tuple) else ()
        if [isinstance(part, Mapping) for part in parts] != [True, True]:
            types = f" ({', '.join(type(part).__name__ for part in parts)})" if parts else ""
            raise UserError(
                "Task.batches must yield a tuple of two dictionaries, (batch, data state); it yielded the type"
                f" {type(pair).__name__}{types}"
            )
        batch, data_state = pair
        queue.append((put(batch, mesh), data_state))
        if len(queue) > ahead:
            yield queue.popleft()
    while queue:
        yield queue.popleft()
