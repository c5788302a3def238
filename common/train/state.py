"""The training state, initialised with its sharding, and the compiled training step."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from common import heap, sharding, variables
from common.train import flops
from common.train import optimizer as optimizers
from common.train.checkpoint import abstract
from common.train.task import Task
from common.variables import AbstractModel, Params


@dataclasses.dataclass
class TrainState:
    """What a training step changes.

    Attributes:
      step: training steps done.
      params: trainable values by path.
      opt_state: of the optimizer.
    """

    step: int
    params: Params
    opt_state: Any


def initial_params(task: Task, abstract_model: AbstractModel, seed: int, mesh: Mesh) -> Params:
    """The trainable values at step 0; every device makes its own shards."""

    def make() -> Params:
        model = task.build(variables.ParamKeys(jax.random.key(seed)))
        return {n: v.get_value() for n, v in variables.split(model).trainable.items()}

    return jax.jit(make, out_shardings=sharding.shardings(abstract_model.trainable, mesh))()


def optimizer_shardings(
    optimizer: optax.GradientTransformation,
    trainable: Mapping[str, Any],
    where: Mapping[str, Any],
    mesh: Mesh,
) -> Any:
    """Optimizer moments inherit their parameter's sharding; everything else is replicated."""
    whole = sharding.replicated(mesh)

    def place(path: tuple, moment: Any) -> Any:
        keys = (getattr(entry, "key", None) for entry in path)
        name = next((key for key in keys if key in where), None)
        alike = name is not None and moment.shape == trainable[name].shape
        return where[name] if alike else whole

    return jax.tree.map_with_path(place, jax.eval_shape(optimizer.init, dict(trainable)))


@dataclasses.dataclass
class Step:
    """The training step, compiled once per shape of a batch and per loss.

    Args:
      accumulate: microbatches per batch; gradients and weights are summed over them, then divided.
      compiled: by `cache_key`, the compiled step and its FLOPs over all devices.
    """

    task: Task
    abstract_model: AbstractModel
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    mesh: Mesh
    seed: int
    accumulate: int = 1
    compiled: dict[tuple, tuple[Any, int]] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, config: ConfigDict, task: Task, mesh: Mesh) -> "Step":
        """The step of a run."""
        abstract_model = variables.abstract(lambda: task.build(variables.ParamKeys(0)))
        update, schedule = optimizers.make(
            config.optimizer,
            config.train.steps,
            task.learning_rate_overrides(),
            abstract_model.trainable,
        )
        accumulate = config.train.accumulate
        return cls(task, abstract_model, update, schedule, mesh, config.seed, accumulate)

    def gradients(
        self, loss: Callable, trainable: Params, frozen: Params, batch: Any, key: jax.Array
    ) -> tuple[Any, Any, Any]:
        """Sums over the batch: (loss, weight, gradients of the loss)."""

        def of_values(trainable, batch, key):
            return loss(self.abstract_model.build(trainable, frozen), batch, key)

        gradient = jax.value_and_grad(of_values, has_aux=True)
        if self.accumulate == 1:
            (total, weight), grads = gradient(trainable, batch, key)
            return total, weight, grads

        # Every device splits its own rows: neighbouring rows go to different microbatches.
        parts = jax.tree.map(
            lambda x: x.reshape(-1, self.accumulate, *x.shape[1:]).swapaxes(0, 1), batch
        )

        def add(sums, part):
            number, batch = part
            (total, weight), grads = gradient(trainable, batch, jax.random.fold_in(key, number))
            return jax.tree.map(jnp.add, sums, (total, weight, grads)), None

        zero = (jnp.zeros(()), jnp.zeros(()), jax.tree.map(jnp.zeros_like, trainable))
        sums, _ = jax.lax.scan(add, zero, (jnp.arange(self.accumulate), parts))
        return sums

    def _step(self, loss, trainable, opt_state, frozen, batch, number):
        key = jax.random.fold_in(jax.random.key(self.seed), number)
        total, weight, grads = self.gradients(loss, trainable, frozen, batch, key)
        weight_or_1 = jnp.maximum(weight, 1.0)
        # Computed before the division, whose result would otherwise be written to memory.
        gradient_norm = optax.global_norm(grads) / weight_or_1
        grads = jax.tree.map(lambda g: g / weight_or_1, grads)
        updates, opt_state = self.optimizer.update(grads, opt_state, trainable)
        metrics = {
            "loss": total / weight_or_1,
            "weight": weight,
            "gradient_norm": gradient_norm,
            "learning_rate": jnp.asarray(self.schedule(number)),
        }
        return optax.apply_updates(trainable, updates), opt_state, metrics

    def arguments(self) -> tuple[Params, Any, Params]:
        """Abstract trainable values, optimizer state and frozen values, with their shardings."""
        abstract_model = self.abstract_model
        trainable, frozen = (
            abstract(x, self.mesh) for x in (abstract_model.trainable, abstract_model.frozen)
        )
        where = optimizer_shardings(
            self.optimizer,
            trainable,
            sharding.shardings(abstract_model.trainable, self.mesh),
            self.mesh,
        )
        opt_state = jax.tree.map(
            lambda x, to: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to),
            jax.eval_shape(self.optimizer.init, trainable),
            where,
        )
        return trainable, opt_state, frozen

    def compile(
        self,
        trainable: Params,
        opt_state: Any,
        frozen: Params,
        batch: Mapping[str, jax.Array],
        number: int = 0,
    ) -> None:
        """Compiles the step for the shape of `batch` and the loss of step `number`."""
        where = lambda tree: jax.tree.map(lambda x: x.sharding, tree)  # noqa: E731
        whole = sharding.replicated(self.mesh)
        key = self.cache_key(batch, number)
        step = partial(self._step, self.task.loss_at(number))
        counter = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)
        arguments = (trainable, opt_state, frozen, batch, counter)
        lowered = jax.jit(
            step,
            donate_argnums=(0, 1),
            out_shardings=(where(trainable), where(opt_state), whole),
        ).lower(*arguments)
        heap.release_free_memory()
        self.compiled[key] = lowered.compile(), flops.count(step, *arguments)
        heap.release_free_memory()

    def __call__(
        self,
        trainable: Params,
        opt_state: Any,
        frozen: Params,
        batch: Any,
        number: int,
        key: tuple | None = None,
    ) -> tuple:
        """(trainable, opt_state, metrics) after one update; the first two arguments are donated.

        Args:
          key: the `cache_key` of batch and number, if the caller has it already.
        """
        run, _ = self.compiled[key or self.cache_key(batch, number)]
        return run(trainable, opt_state, frozen, batch, jnp.int32(number))

    def flops(self, key: tuple) -> float:
        """FLOPs of the compiled step with this `cache_key`, over all devices."""
        return float(self.compiled[key][1])

    def cache_key(self, batch: Mapping[str, jax.Array], number: int) -> tuple:
        """Identifies a compiled step: its loss and the shapes of the batch."""
        shapes = sorted((name, x.shape) for name, x in batch.items())
        return self.task.loss_at(number), *shapes
