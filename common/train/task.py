"""What the one training loop asks of a paper."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from common.metrics.predictions import Predictions
from common.variables import AbstractModel, Params

Batch = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class ModelState:
    """A model with its values, as evaluators get it."""

    abstract_model: AbstractModel
    trainable: Params
    frozen: Params
    mesh: Mesh


@dataclass(frozen=True)
class PretrainedWeights:
    """Frozen values that no checkpoint keeps, since files outside of the run hold them.

    Attributes:
      values: on the mesh.
      fingerprint: tells these files from others; "" where there are none.
    """

    values: Mapping[str, jax.Array]
    fingerprint: str


NO_PRETRAINED_WEIGHTS = PretrainedWeights({}, "")


@dataclass(frozen=True)
class TaskSpec:
    """A run without its data and values: what a step can be compiled from.

    Attributes:
      config: as the loop takes it; `train.steps` is 0 where only the data say how many there are.
      task: as far as `build`, `loss`, `loss_at` and `learning_rate_overrides`.
      batch: arrays of a global training batch, as `batches` gives them; of several shapes the one with longest rows.
      tokens: in it, padding too; examples where rows have no length.
    """

    config: ConfigDict
    task: "Task"
    batch: Mapping[str, jax.ShapeDtypeStruct]
    tokens: int


def integers(*shape: int) -> jax.ShapeDtypeStruct:
    """What stands for an array of token ids, labels or numbers of examples."""
    return jax.ShapeDtypeStruct(shape, np.int32)


class Task(Protocol):
    """Model, data, loss and evaluation of one kind of experiment. The loop knows no task by name.

    A task that derives from this class has what most of them have in common.
    """

    objective: str
    """Name of the validation metric that is maximised or minimised, as `evaluate` returns it."""

    mode: str
    """"max" or "min"."""

    select = "valid"
    """The examples by which the best step is chosen, as people call them."""

    unit = "tokens"
    """What the weights of `loss` count."""

    seedless = False
    """Whether nothing that the run does depends on the seed; its summary has none then."""

    tests_last = False
    """Whether the summary has the test of the last values too, beside that of the best."""

    def build(self, rngs: nnx.Rngs) -> nnx.Module:
        """The model, reservoirs already frozen."""

    @property
    def batches_per_epoch(self) -> float | None:
        """Steps in which the training data are seen once; None where there is no such number."""
        return None

    def start(self, trainable: Params) -> Params:
        """The values at step 0, given those that `build` drew: the same ones, or a warm start, lying as they did; and
        those of frozen variables that no seed draws."""
        return trainable

    def outside(self, abstract_model: AbstractModel) -> PretrainedWeights:
        """Frozen values that files outside of the run hold; read whenever the run is begun or gone on with."""
        del abstract_model
        return NO_PRETRAINED_WEIGHTS

    def loss(
        self, model: nnx.Module, batch: Mapping[str, jax.Array], key: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """(sum of the loss over the batch, sum of the weights): exact under accumulation and padding."""

    def loss_at(self, step: int) -> Callable:
        """The loss of one step: `loss`, or another where steps differ. Each is compiled once per shape."""
        del step
        return self.loss

    def learning_rate_overrides(self) -> Mapping[str, float]:
        """Parts of the model, by a name in their paths, that have an Adam of their own with this constant rate."""
        return {}

    def batches(self, start: dict | None) -> Iterator[tuple[Batch, dict]]:
        """This process's rows of the global training batches, without end, each with the JSON state from which the next
        batch follows. `start` is such a state; it does not depend on the number of processes."""

    def predict(self, values: ModelState, split: str) -> Predictions | None:
        """What the model predicts for each example of "valid" or "test", the same on every process; None where the
        metrics are not made of examples."""
        del values, split
        return None

    def evaluate(self, values: ModelState, split: str) -> dict[str, float | str]:
        """Metrics on "valid" or "test", the same on every process; with "valid" also texts to look at."""
        return self.predict(values, split).metrics()

    def save(self, workdir: Any) -> None:
        """Writes what using the trained model needs besides its weights (tokenizers)."""
