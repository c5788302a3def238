"""Copies batches to the devices ahead of the steps that use them."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import jax
from jax.sharding import Mesh

from common.sharding import batch_sharding
from common.train.task import Batch


def put(batch: Batch, mesh: Mesh) -> dict[str, jax.Array]:
    """A global array for each array of this process's rows."""
    where = batch_sharding(mesh)
    return {
        name: jax.make_array_from_process_local_data(where, rows) for name, rows in batch.items()
    }


def device_prefetch(
    batches: Iterable[tuple[Batch, Any]], mesh: Mesh, ahead: int = 2
) -> Iterator[tuple[dict[str, jax.Array], Any]]:
    """Yields batches with the data state behind each, copied to the devices `ahead` batches early."""
    queue: deque = deque()
    for batch, data_state in batches:
        queue.append((put(batch, mesh), data_state))
        if len(queue) > ahead:
            yield queue.popleft()
    while queue:
        yield queue.popleft()
