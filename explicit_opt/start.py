"""The base class of the tasks (language models and digit classifiers), and the initial parameters of training."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from common import sharding, variables
from common.config import check_choice, check_least
from common.data.batches import check_rows, iterate
from common.data.examples import ExampleBatches
from common.errors import check
from common.model import initializers
from common.train.task import Batch, BatchSpec, ModelState, Task, integers
from common.variables import Params

STARTS = ("cold", "zero", "explicit", "warm", "scaled")
"""Values of `config.start`. "cold" trains from random values, "zero" from zeros, "warm" from the explicit solution, and
"scaled" from the explicit solution with one fitted factor for each layer (`solution.fit_scale`). "explicit" takes the
explicit solution without training."""

INITIALIZERS: dict[str, Callable[[int], Callable]] = {
    "torch": lambda inputs: initializers.uniform(inputs**-0.5),
    "normal": lambda inputs: initializers.normal(1.0),
}
"""Name -> function from the number of inputs to the initializer of a cold start. "torch" draws like PyTorch's Linear,
"normal" from N(0, 1)."""


def validate_start(config: ConfigDict) -> None:
    """Raises a UserError for invalid fields that language models and digit classifiers share."""
    check_choice("--config.start", config.start, STARTS)
    check_choice("--config.model.cold", config.model.cold, INITIALIZERS)
    check(
        config.solution.sign in (-1, 1),
        f"--config.solution.sign must be -1 or 1, got {config.solution.sign}",
    )
    check(
        config.train.steps == 0,
        f"--config.train.steps={config.train.steps} must be 0, because --config.train.epochs determines the number of"
        " steps: leave out --config.train.steps, and set --config.train.epochs",
    )
    check_least(config, ("train.epochs", "train.batch"))
    check(
        config.start != "explicit" or config.eval.start,
        "--config.start=explicit trains nothing: evaluate the solution with --config.eval.start=true, or choose another"
        " --config.start",
    )


class StartTask(Task, ABC):
    """Base class of the tasks of this paper, which classify examples with a model without dropout.

    The field `config.start` selects the initial parameters.

    Attributes:
      examples: number of training examples (tokens or images). Before the data are read: `data.tokens` for a language
        model, 0 for a digit classifier.
      multiple: number that must divide `train.batch`, the number of rows of a training batch.
    """

    mode = "min"

    def __init__(self, config: ConfigDict, mesh: Mesh):
        self.config, self.mesh, self.examples = config, mesh, 0
        self.multiple = sharding.num_batch_shards(mesh) * config.train.accumulate

    @abstractmethod
    def nats(self, model: nnx.Module, batch: Batch) -> jax.Array:
        """Returns the cross-entropy of each row of a batch, (B,), in nats."""

    @abstractmethod
    def inputs(self, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns name -> shape and dtype of the arrays of a batch, except for targets and weights."""

    @abstractmethod
    def explicit_start(self, trainable: Params) -> Params:
        """Returns {path: explicit solution} of all parameters, with fitted factors if `config.start` is "scaled"."""

    def with_parameters(self, trainable: Params) -> ModelState:
        """Returns the model state with the parameters `trainable`, for evaluation."""
        abstract_model = variables.abstract(self.build)
        return ModelState(abstract_model, trainable, {}, self.mesh)

    def set_examples(self, gather: Callable[[np.ndarray], Batch], examples: int) -> None:
        """Sets the training examples. `gather` returns the batch of an array of example indices (-1: empty row)."""
        self.examples = examples
        self.training_batches = ExampleBatches(
            gather,
            examples,
            self.config.train.batch,
            multiple=self.multiple,
            seed=self.config.seed,
            option="--config.train.batch",
        )

    @property
    def exponent(self) -> float | None:
        """Exponent of f in eq. (3). A negative `solution.exponent` gives None: (K - 1) / K, see `prior_exponent`."""
        exponent = self.config.solution.exponent
        return None if exponent < 0 else exponent

    @property
    def seedless(self) -> bool:
        # With `start=explicit` the result does not depend on the seed: the explicit solution replaces all random
        # values, and no training step follows.
        return self.config.start == "explicit"

    @property
    def batches_per_epoch(self) -> int:
        return -(-self.examples // self.config.train.batch)

    def start(self, trainable: Params, frozen: Params) -> Params:
        match self.config.start:
            case "cold":
                return trainable
            case "zero":
                return {
                    n: jax.device_put(jnp.zeros_like(x), x.sharding) for n, x in trainable.items()
                }
            case _:
                return self.explicit_start(trainable)

    def loss(
        self, model: nnx.Module, batch: Batch, key: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        return jnp.sum(self.nats(model, batch) * batch["weights"]), jnp.sum(batch["weights"])

    def batch_spec(self, multiple: int) -> BatchSpec:
        rows = self.config.train.batch
        check_rows(rows, multiple, "--config.train.batch")
        targets = {
            "targets": integers(rows),
            "weights": jax.ShapeDtypeStruct((rows,), np.float32),
        }
        return BatchSpec(self.inputs(rows) | targets, rows)

    def batches(self, start: dict | None) -> Iterator[tuple[Batch, dict]]:
        return iterate(self.training_batches, start)
