"""`Task`, the interface between the training loop and a paper."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from common.errors import check
from common.metrics.curve import Curve
from common.metrics.predictions import Predictions
from common.variables import AbstractModel, Params

Batch = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class ModelState:
    """A model with its values, for evaluation.

    Attributes:
      trainable, frozen: path -> array on the mesh.
      interruption: function that an evaluation must call between batches. After a signal, the function raises an
        exception that must end the evaluation.
      keep: function (split, predictions) that `Task.evaluate` calls with the result of `Task.predict`.
    """

    abstract_model: AbstractModel
    trainable: Params
    frozen: Params
    mesh: Mesh
    interruption: Callable[[], None] = lambda: None
    keep: Callable[[str, Predictions], None] = lambda split, predictions: None


@dataclass(frozen=True)
class PretrainedWeights:
    """Frozen values that a run reads from files outside of its workdir.

    Attributes:
      values: path -> array on the mesh.
      fingerprint: fingerprint of the files; "" without pretrained weights.
    """

    values: Mapping[str, jax.Array]
    fingerprint: str


NO_PRETRAINED_WEIGHTS = PretrainedWeights({}, "")


class BatchSpec(NamedTuple):
    """Shapes of a global training batch.

    Attributes:
      arrays: name -> shape and dtype of each array of the batch, at the maximum sequence length.
      tokens: number of tokens in the batch, including padding; number of examples if rows are not sequences.
    """

    arrays: Mapping[str, jax.ShapeDtypeStruct]
    tokens: int


class Decoding(NamedTuple):
    """A decoding program and the shapes of its inputs, to compile the program without data.

    Attributes:
      program: jitted `common.decode.rows.by_rows(rows, ...)`, a function (trainable, frozen, *inputs) that takes
        gathered weights.
      rows: function (trainable, frozen, *inputs) that decodes all rows of its inputs.
      inputs: shapes and dtypes of the inputs of all devices together.
      steps: maximum number of tokens that one call of the program generates for each row.
      tokens: number of tokens per row over which `launch.decoding` spreads the cost of one gather of the weights.
    """

    program: Callable
    rows: Callable
    inputs: tuple
    steps: int
    tokens: int


def integers(*shape: int) -> jax.ShapeDtypeStruct:
    """Returns an abstract int32 array, such as token ids or labels."""
    return jax.ShapeDtypeStruct(shape, np.int32)


class Task:
    """Model, data, loss and evaluation of an experiment.

    A subclass sets `objective` and `mode`, defines `build`, `loss` and `batches`, and overrides `predict` or
    `evaluate`; `check_complete` checks this. The other members are optional.
    """

    objective: str
    """Name of the metric of `evaluate` that selects the best step."""

    mode: str
    """"max" if a larger objective is better, "min" if a smaller objective is better."""

    select = "valid"
    """Name, in messages, of the split that selects the best step. `evaluate` gets "valid", whatever the name is."""

    unit = "tokens"
    """Unit of the weight that `loss` returns, such as "tokens" or "examples"."""

    seedless = False
    """True if training uses no randomness. The field `seed` of the summary is then null."""

    tests_last = False
    """Whether to test the parameters of the last step in addition to the parameters of the best step."""

    def build(self, rngs: nnx.Rngs) -> nnx.Module:
        """Returns a new model, whose frozen parameters are variables of the type `common.variables.Frozen`."""

    @property
    def batches_per_epoch(self) -> float | None:
        """Number of steps in an epoch; None if the task has no epochs."""
        return None

    def start(self, trainable: Params, frozen: Params) -> Params:
        """Returns the initial parameters: `trainable`, or warm-started values with the same shardings.

        The result may also contain values of frozen variables that have no initializer and are missing in `frozen`.
        """
        return trainable

    def pretrained_weights(self, abstract_model: AbstractModel) -> PretrainedWeights:
        """Loads pretrained frozen values. Called at every start and resume of a run, and to load its trained model."""
        return NO_PRETRAINED_WEIGHTS

    def loss(
        self, model: nnx.Module, batch: Mapping[str, jax.Array], key: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the loss and the weight, such as the number of tokens, each summed over the rows of `batch`.

        Sums instead of means keep gradient accumulation and padding exact. `key` is the random key of this step or
        microbatch, for dropout; None turns dropout off. On several devices `batch` may have the rows of one device
        only; the training step adds the returned sums of all devices. A loss that itself needs a total over all rows
        calls `common.sharding.sum_over_batch`.
        """

    def loss_at(self, step: int) -> Callable:
        """Returns the loss function of a step, counted from 0 (default: `loss`).

        The training step is compiled once per loss function and batch shape.
        """
        return self.loss

    def losses(self) -> Sequence[Callable]:
        """Returns the loss functions that `loss_at` may return, to compile the training step in advance.

        The default returns the loss function of the first step. If `loss_at` returns another function, training waits
        until the step with this function is compiled.
        """
        return (self.loss_at(0),)

    def learning_rate_overrides(self) -> Mapping[str, float]:
        """Returns {name: constant learning rate}, for parameters that Adam trains instead of the run's optimizer.

        A name, such as "head", selects all parameters whose paths have this component.
        """
        return {}

    def batch_spec(self, multiple: int) -> BatchSpec:
        """Returns the shapes of a global training batch without reading data. The default returns None.

        The number of rows must be a multiple of `multiple`.
        """

    def decoding(self, abstract_model: AbstractModel) -> Decoding | None:
        """Returns the program that generates text, to compile it without data; None if the task generates no text."""
        return None

    def batches(self, start: dict | None) -> Iterator[tuple[Batch, dict]]:
        """Yields (this process's rows of a global training batch, data state after the batch) without end.

        A data state is a JSON object and does not depend on the number of processes.

        Args:
          start: data state from which to continue; None for the first batch.
        """

    def batch_samples(self) -> Iterator[Batch]:
        """Yields a batch (this process's rows) of each shape that `batches` yields, to compile the step in advance.

        The default yields no batch: the step is compiled when the first batch of a shape arrives.
        """
        return iter(())

    def predict(self, values: ModelState, split: str) -> Predictions | None:
        """Returns predictions, such as classes, for each example of "valid" or "test", equal on every process.

        A task without predictions per example returns None and overrides `evaluate`.
        """
        return None

    def evaluate(self, values: ModelState, split: str) -> dict[str, float | str]:
        """Returns metrics on the split "valid" or "test", equal on every process, from the result of `predict`.

        A metric is a Python number or a text. The metric `objective` must be present, and must be a number. An override
        that adds metrics should call this method with `super()`: the test of a run then also writes the predictions of
        this call, instead of calling `predict` again.
        """
        predictions = self.predict(values, split)
        check(
            isinstance(predictions, Predictions),
            f"{type(self).__name__}.predict returned {predictions!r:.80}; return predictions, such as an object of"
            " common.metrics.classes.Classes, or define evaluate without super().evaluate",
        )
        values.keep(split, predictions)
        return predictions.metrics()

    def fingerprints(self) -> dict[str, str]:
        """Returns {name: fingerprint} of splits and tokenizers, such as {"the train split": fingerprint}.

        The fingerprints must be equal on all processes, and at every start and resume of a run. They must not depend on
        fields that may change when a run resumes (`common.train.workdir.FREE`). The default compares nothing.
        """
        return {}

    def save(self, workdir: Any) -> None:
        """Writes tokenizers and other files that are needed to use the trained model. The default writes nothing.

        Called on process 0, at every start and resume of a run.
        """


def check_complete(task: Task) -> None:
    """Raises a UserError if `task` is not a `Task`, lacks a required member, or `mode` is neither "min" nor "max"."""
    cls = type(task)
    check(
        isinstance(task, Task),
        f"the task must be an object of a class that inherits common.train.task.Task, got {task!r:.80}",
    )
    missing = [name for name in ("objective", "mode") if not hasattr(task, name)]
    methods = ("build", "loss", "batches")
    missing += [name for name in methods if getattr(cls, name) is getattr(Task, name)]
    if cls.predict is Task.predict and cls.evaluate is Task.evaluate:
        missing.append("predict or evaluate")
    check(
        not missing,
        f"the task {cls.__module__}:{cls.__qualname__} lacks {', '.join(missing)}; define the members that"
        " common.train.task.Task requires",
    )
    Curve(task.objective, task.mode)  # raises a UserError for an invalid mode
