"""Batches from the host onto the mesh, a few ahead of the step that uses them."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import jax
from jax.sharding import Mesh

from common.sharding import batch_sharding
from common.train.task import Batch


def put(batch: Batch, mesh: Mesh) -> dict[str, jax.Array]:
    """This process's rows as its part of the global arrays."""
    where = batch_sharding(mesh)
    return {
        name: jax.make_array_from_process_local_data(where, rows) for name, rows in batch.items()
    }


def device_prefetch(
    batches: Iterable[tuple[Batch, Any]], mesh: Mesh, ahead: int = 2
) -> Iterator[tuple[dict[str, jax.Array], Any]]:
    """Each batch with the data position behind it, copied to the devices while earlier ones are used."""
    queue: deque = deque()
    for batch, position in batches:
        queue.append((put(batch, mesh), position))
        if len(queue) > ahead:
            yield queue.popleft()
    while queue:
        yield queue.popleft()
