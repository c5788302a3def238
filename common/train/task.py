"""The interface between the training loop and a paper."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from common.metrics.predictions import Predictions
from common.variables import AbstractModel, Params

Batch = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class ModelState:
    """A model with its values, for evaluation."""

    abstract_model: AbstractModel
    trainable: Params
    frozen: Params
    mesh: Mesh


@dataclass(frozen=True)
class PretrainedWeights:
    """Frozen values that stay in files outside of the workdir.

    Attributes:
      values: on the mesh, by path.
      fingerprint: of the files; "" without any.
    """

    values: Mapping[str, jax.Array]
    fingerprint: str


NO_PRETRAINED_WEIGHTS = PretrainedWeights({}, "")


class BatchSpec(NamedTuple):
    """A global training batch without its data, for compiling the training step.

    Attributes:
      arrays: shapes and dtypes, as `Task.batches` yields them; of several lengths the longest.
      tokens: in the batch, with padding; examples where rows have no length.
    """

    arrays: Mapping[str, jax.ShapeDtypeStruct]
    tokens: int


def integers(*shape: int) -> jax.ShapeDtypeStruct:
    """The abstract int32 array of token ids, labels or example numbers."""
    return jax.ShapeDtypeStruct(shape, np.int32)


class Task(Protocol):
    """Model, data, loss and evaluation of one kind of experiment. The loop knows no task by name.

    Tasks derive from this class for the defaults.
    """

    objective: str
    """The validation metric of `evaluate` that selects the best step."""

    mode: str
    """"max" or "min": whether a larger objective is better."""

    select = "valid"
    """The split that selects the best step."""

    unit = "tokens"
    """The unit of the weights of `loss`."""

    seedless = False
    """Whether nothing in the run depends on the seed; its summary then has no seed."""

    tests_last = False
    """Whether the last values are tested too, beside the best ones."""

    def build(self, rngs: nnx.Rngs) -> nnx.Module:
        """The model, with its frozen layers already frozen."""

    @property
    def batches_per_epoch(self) -> float | None:
        """Steps per epoch; None where that is not defined."""
        return None

    def start(self, trainable: Params) -> Params:
        """Initial parameters, optionally warm-started, with unchanged shardings. May add values of frozen variables
        that have no initializer."""
        return trainable

    def outside(self, abstract_model: AbstractModel) -> PretrainedWeights:
        """Pretrained frozen values, read at every start of the run."""
        del abstract_model
        return NO_PRETRAINED_WEIGHTS

    def loss(
        self, model: nnx.Module, batch: Mapping[str, jax.Array], key: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """(sum of the loss over the batch, sum of the weights): exact under gradient accumulation and padding."""

    def loss_at(self, step: int) -> Callable:
        """The loss function of a step: `loss`, unless steps differ. Each is compiled once per batch shape."""
        del step
        return self.loss

    def learning_rate_overrides(self) -> Mapping[str, float]:
        """Modules, by a part of their paths, that Adam trains at this constant learning rate."""
        return {}

    def batch_spec(self, multiple: int) -> BatchSpec:
        """The shapes of a global training batch, known without data; `multiple` divides its rows."""

    def batches(self, start: dict | None) -> Iterator[tuple[Batch, dict]]:
        """Yields this process's rows of global training batches without end, each with the JSON data state of the next
        one. `start` is such a state, or None; it does not depend on the number of processes."""

    def predict(self, values: ModelState, split: str) -> Predictions | None:
        """Predictions for each example of "valid" or "test", the same on every process; None for a task without."""
        del values, split
        return None

    def evaluate(self, values: ModelState, split: str) -> dict[str, float | str]:
        """Metrics on "valid" or "test", the same on every process; with "valid" also samples of text."""
        return self.predict(values, split).metrics()

    def save(self, workdir: Any) -> None:
        """Writes tokenizers and other files that using the trained model needs."""
