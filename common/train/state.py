"""What training changes, born sharded; and the compiled step that changes it."""

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


def initial_values(task: Task, abstract_model: AbstractModel, seed: int, mesh: Mesh) -> Params:
    """The trainable values at step 0; no device ever holds more than its part."""

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
    """Moments lie where their parameters lie; counters, and sums over rows or columns of a parameter, everywhere."""
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
      accumulate: into how many microbatches a batch is cut; gradients and weights are summed, then divided.
      compiled: by `kind`, what runs, and its floating-point operations over all devices.
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

        # Every device cuts its own rows: neighbouring rows go to different microbatches.
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
        # Before the division, which would be written out to memory for it.
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
        """What stands for trainable values, optimizer state and frozen values on the mesh; none is allocated."""
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
        kind = self.kind(batch, number)
        step = partial(self._step, self.task.loss_at(number))
        counter = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)
        arguments = (trainable, opt_state, frozen, batch, counter)
        lowered = jax.jit(
            step,
            donate_argnums=(0, 1),
            out_shardings=(where(trainable), where(opt_state), whole),
        ).lower(*arguments)
        heap.trim()
        self.compiled[kind] = lowered.compile(), flops.count(step, *arguments)
        heap.trim()

    def __call__(
        self,
        trainable: Params,
        opt_state: Any,
        frozen: Params,
        batch: Any,
        number: int,
        kind: tuple | None = None,
    ) -> tuple:
        """(trainable, opt_state, metrics) after one update; the first two arguments are given away.

        Args:
          kind: of this batch and number, where it is known.
        """
        run, _ = self.compiled[kind or self.kind(batch, number)]
        return run(trainable, opt_state, frozen, batch, jnp.int32(number))

    def kind(self, batch: Mapping[str, jax.Array], number: int) -> tuple:
        """What a compiled step serves: one loss, one shape."""
        shapes = sorted((name, x.shape) for name, x in batch.items())
        return self.task.loss_at(number), *shapes
