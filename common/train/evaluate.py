"""The one evaluation loop: applies a function of the model to batches and collects its rows by example."""

from collections.abc import Callable, Iterable

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from common import sharding
from common.train.prefetch import put
from common.train.task import Batch, ModelState

Rows = Callable[[nnx.Module, Batch], dict[str, jax.Array]]
"""(model, batch) -> arrays (B, ...), a row for each row of the batch."""


class PerExample:
    """Evaluates a function of the model on every example; compiled once per shape of a batch.

    Args:
      rows: measures each row of a batch; the batch's `ids` (B,) are example numbers, -1 for padding rows.
    """

    def __init__(self, rows: Rows, mesh: Mesh):
        self._rows, self._mesh = rows, mesh
        self._compiled: Callable | None = None

    def __call__(
        self, values: ModelState, batches: Iterable[Batch], count: int
    ) -> dict[str, np.ndarray]:
        """Arrays (E, ...) in the order of the ids, the same on every process; `count` is E."""
        if self._compiled is None:
            abstract_model, rows = values.abstract_model, self._rows

            def run(trainable, frozen, batch):
                return batch["ids"], rows(abstract_model.build(trainable, frozen), batch)

            self._compiled = jax.jit(run, out_shardings=sharding.replicated(self._mesh))
        found: dict[str, np.ndarray] = {}
        for batch in batches:
            placed = put(batch, self._mesh)
            ids_B, parts = jax.device_get(self._compiled(values.trainable, values.frozen, placed))
            filled_B = ids_B >= 0
            for name, x in parts.items():
                every = found.setdefault(name, np.zeros((count, *x.shape[1:]), x.dtype))
                every[ids_B[filled_B]] = x[filled_B]
        return found
