"""The evaluation loop: calls a function of the model on all batches, and collects its outputs by example."""

from collections.abc import Callable, Iterable

import jax
import numpy as np
from flax import nnx

from common import sharding
from common.train.prefetch import put
from common.train.task import Batch, ModelState


class PerExample:
    """Evaluates a function of the model on all examples. Compiles the function once for each batch shape.

    All calls must have the same model and mesh.

    Args:
      rows: function (model, batch) -> {name: array (B, ...)}, with an output row for each row of the batch.
        `batch["ids"]`, (B,), holds the index of the example in each row, or -1 in padding rows.
    """

    def __init__(self, rows: Callable[[nnx.Module, Batch], dict[str, jax.Array]]):
        self._rows = rows
        self._compiled: Callable | None = None

    def __call__(
        self, values: ModelState, batches: Iterable[Batch], count: int
    ) -> dict[str, np.ndarray]:
        """Returns {name: array (E, ...)}, indexed by example and equal on every process.

        E is `count`. Rows of examples that no batch contains are zero.
        """
        if self._compiled is None:
            abstract_model, rows = values.abstract_model, self._rows

            def run(trainable, frozen, batch):
                return batch["ids"], rows(abstract_model.build(trainable, frozen), batch)

            self._compiled = jax.jit(run, out_shardings=sharding.replicated(values.mesh))
        outputs: dict[str, np.ndarray] = {}
        for batch in batches:
            values.interruption()
            placed = put(batch, values.mesh)
            ids_B, parts = jax.device_get(self._compiled(values.trainable, values.frozen, placed))
            filled_B = ids_B >= 0
            for name, x in parts.items():
                output = outputs.setdefault(name, np.zeros((count, *x.shape[1:]), x.dtype))
                output[ids_B[filled_B]] = x[filled_B]
        return outputs
