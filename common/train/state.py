"""Sharded initialisation of the training state, and the compiled training step."""

import dataclasses
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from common import sharding, variables
from common.errors import check
from common.model.layers import is_stacked, scan_layers, stack_layers
from common.sharding import abstract
from common.train import flops
from common.train import optimizer as optimizers
from common.train.task import Task, check_complete
from common.variables import AbstractModel, Params

_COUNTERS = (jnp.int32, jnp.uint32)
"""Dtypes of the step number and of the seed."""

_MANY_ARRAYS = 256
"""A single device initialises a model with at least this many trainable arrays eagerly (without `jax.jit`), unless at
least half of the parameters are frozen.

The layers of a deep model repeat a few operations, and each operation compiles once. One program for all layers would
take several times as long to compile."""


@dataclasses.dataclass
class TrainState:
    """The values that a training step changes, after `step` steps.

    Arrays of repeating layers may be stacked (`common.model.layers`).
    """

    step: int
    params: Params
    opt_state: Any


def initial_params(task: Task, abstract_model: AbstractModel, seed: int, mesh: Mesh) -> Params:
    """Returns {path: trainable value}, initialised from the seed. Each device initialises only its shards."""

    def make(seed: jax.Array) -> Params:
        model = task.build(variables.ParamKeys(jax.random.key(seed)))
        return {n: v.get_value() for n, v in variables.split(model).trainable.items()}

    shardings, seed = sharding.shardings(abstract_model.trainable, mesh), np.uint32(seed)
    sizes = variables.count(abstract_model)
    # Compiled, `make` allocates only the trainable values. Run eagerly, `make` also allocates the frozen values, so it
    # runs eagerly only for models with fewer frozen than trainable values.
    if mesh.size == 1 and len(shardings) >= _MANY_ARRAYS and sizes["frozen"] < sizes["trainable"]:
        return jax.device_put(make(seed), shardings)
    # The seed is an argument of the compiled function, so that runs with different seeds share the compiled function.
    return jax.jit(make, out_shardings=shardings)(seed)


def abstract_opt_state(
    optimizer: optax.GradientTransformation, trainable: Params, mesh: Mesh
) -> Any:
    """Returns the abstract optimizer state, with its shardings, for the abstract parameters `trainable`.

    A moment with the shape of its parameter has the sharding of the parameter; everything else is replicated.
    """
    replicated = sharding.replicated(mesh)

    def with_sharding(path: tuple, moment: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        keys = (getattr(entry, "key", None) for entry in path)
        own = next((trainable[key] for key in keys if key in trainable), None)
        inherited = own.sharding if own is not None and own.shape == moment.shape else replicated
        return jax.ShapeDtypeStruct(moment.shape, moment.dtype, sharding=inherited)

    return jax.tree.map_with_path(with_sharding, jax.eval_shape(optimizer.init, trainable))


def _shardings(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.sharding, tree)


class CompiledStep(NamedTuple):
    """A training step that is compiled for one batch shape and loss function.

    Attributes:
      run: function (trainable, opt_state, frozen, batch, step, seed) -> (trainable, opt_state, metrics).
      flops: FLOPs of the step over all devices.
    """

    run: jax.stages.Compiled
    flops: float


@dataclasses.dataclass
class Step:
    """The training step, compiled once per batch shape and loss function.

    Attributes:
      accumulate: number of microbatches in a batch. The step divides the sum of their gradients by the sum of the
        weights that `Task.loss` returns, or by 1 if this sum is below 1.
      reduce_dtype: dtype in which devices exchange gradients, "float32" or "bfloat16".
      scanned: abstract model in which repeating layers share stacked arrays (`common.model.layers`). Parameters,
        gradients, optimizer state and frozen values of the step have this form. None: use `abstract_model`, with a
        separate array for each layer.
      compiled: `cache_key` -> compiled step.
      compiling: `cache_key` -> compilation in a thread (`common.train.ahead`).
    """

    task: Task
    abstract_model: AbstractModel
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    mesh: Mesh
    seed: int
    accumulate: int = 1
    reduce_dtype: str = "float32"
    scanned: AbstractModel | None = None
    compiled: dict[tuple, CompiledStep] = dataclasses.field(default_factory=dict)
    compiling: dict[tuple, Future] = dataclasses.field(default_factory=dict, init=False)

    @classmethod
    def of(cls, config: ConfigDict, task: Task, mesh: Mesh) -> "Step":
        """Makes the training step. Raises a UserError if the task is incomplete (`check_complete`)."""
        check_complete(task)
        abstract_model = variables.abstract(task.build)
        steps, overrides = config.train.steps, task.learning_rate_overrides()
        rule = optimizers.make(config.optimizer, steps, overrides, abstract_model.trainable)
        scanned = scan_layers(abstract_model, config.train.scan_layers)
        how = config.train.accumulate, config.train.reduce_dtype, scanned
        return cls(task, abstract_model, *rule, mesh, config.seed, *how)

    def __post_init__(self) -> None:
        self.scanned = self.scanned or self.abstract_model

    def start(self) -> TrainState:
        """Returns the training state at step 0, initialised from the seed. Does not call `Task.start`."""
        params = initial_params(self.task, self.abstract_model, self.seed, self.mesh)
        params = stack_layers(params, self.scanned.trainable)
        shardings = _shardings(self.arguments()[1])
        return TrainState(0, params, jax.jit(self.optimizer.init, out_shardings=shardings)(params))

    def gradients(
        self, loss: Callable, trainable: Params, frozen: Params, batch: Any, key: jax.Array
    ) -> tuple[Any, Any, Any]:
        """Returns (loss, weight, gradients of the loss), each summed over the batch, not averaged.

        Each device sums over its rows of all microbatches; devices exchange each sum once.
        """
        model, mesh = self.scanned, self.mesh
        if sharding.num_batch_shards(mesh) == 1:
            build = partial(model.build, frozen=frozen)
            return self._sums(loss, build, batch, trainable, key)
        from common.train import exchange

        shardings = [sharding.shardings(kind, mesh) for kind in (model.trainable, model.frozen)]
        # A step exchanges gradients once, so with several microbatches the scans over layers must not exchange them.
        stacked = [name for name in model.trainable if self.accumulate == 1 and is_stacked(name)]
        scattered = dict.fromkeys(stacked, self.reduce_dtype)

        def of_shard(batch: Any, trainable: Params, frozen: Params, key: jax.Array) -> tuple:
            stand_ins, build = exchange.gathering(model, trainable, frozen, shardings, scattered)
            return self._sums(loss, build, batch, stand_ins, key)

        arguments, replicated = (trainable, frozen, key), sharding.replicated(mesh)
        sums = exchange.local_sums(of_shard, mesh, batch, *arguments, shardings=shardings)
        with jax.named_scope("exchange"):
            totals = replicated, replicated, shardings[0]
            return exchange.add_up(sums, totals, mesh, self.reduce_dtype, scattered)

    def _sums(
        self, loss: Callable, build: Callable, batch: Any, trainable: Params, key: jax.Array
    ) -> tuple[Any, Any, Any]:
        """Returns (loss, weight, gradients of the loss), each summed over the rows of `batch`.

        `build` maps trainable values to a model.
        """

        def of_values(trainable, batch, key):
            sums = loss(build(trainable), batch, key)
            numbers = jax.Array | np.ndarray | np.generic | float | int
            check(
                isinstance(sums, tuple)
                and [isinstance(x, numbers) and jnp.shape(x) for x in sums] == [(), ()],
                f"Task.loss must return a tuple of two scalars, (loss, weight); it returned {sums!r:.200}",
            )
            return sums

        gradient = jax.value_and_grad(of_values, has_aux=True)
        if self.accumulate == 1:
            (total, weight), grads = gradient(trainable, batch, key)
            return total, weight, grads

        # Microbatch m has the rows m, m + accumulate, ...: the same rows, with the same dropout masks, on every mesh.
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

    def _step(self, loss, trainable, opt_state, frozen, batch, step, seed):
        key = jax.random.fold_in(jax.random.key(seed), step)
        total, weight, grads = self.gradients(loss, trainable, frozen, batch, key)
        weight_or_1 = jnp.maximum(weight, 1.0)
        gradient_norm = optax.global_norm(grads) / weight_or_1
        # Multiply by the reciprocal: XLA fuses the multiplication into the operations that read the gradients. With a
        # division, XLA would first write the divided gradients to memory.
        grads = jax.tree.map(lambda g: g * (1 / weight_or_1), grads)
        with jax.named_scope("optimizer"):
            updates, opt_state = self.optimizer.update(grads, opt_state, trainable)
            trainable = optax.apply_updates(trainable, updates)
        metrics = {
            "loss": total / weight_or_1,
            "weight": weight,
            "gradient_norm": gradient_norm,
            "learning_rate": jnp.asarray(self.schedule(step)),
        }
        return trainable, opt_state, metrics

    def arguments(self, model: AbstractModel | None = None) -> tuple[Params, Any, Params]:
        """Returns the abstract trainable values, optimizer state and frozen values, with their shardings.

        Args:
          model: `abstract_model` to get a separate array for each layer, as in checkpoints; None to get the stacked
            arrays of the step.
        """
        model, mesh = model or self.scanned, self.mesh
        trainable, frozen = abstract(model.trainable, mesh), abstract(model.frozen, mesh)
        return trainable, abstract_opt_state(self.optimizer, trainable, mesh), frozen

    def compile(self, batch: Any, step: int = 0) -> None:
        """Compiles the training step for the shapes of `batch` and the loss function of `step`.

        If a thread already compiles this step (`common.train.ahead`), waits for the thread.
        """
        loss = self.task.loss_at(step)
        key = self.key_of(loss, batch)
        future = self.compiling.pop(key, None)
        if future and not future.cancel():
            future.result()
        if key not in self.compiled:
            self.compile_now(key, *self.lower(loss, batch))

    def compile_now(self, key: tuple, lowered: jax.stages.Lowered, count: int) -> None:
        """Compiles the training step with the `cache_key` `key` in the calling thread, from the result of `lower`."""
        self.compiled[key] = CompiledStep(lowered.compile(), float(count))

    def cancel(self) -> None:
        """Empties `compiling`, and cancels its compilations that have not begun."""
        while self.compiling:
            self.compiling.popitem()[1].cancel()

    def lower(self, loss: Callable, batch: Any) -> tuple[jax.stages.Lowered, int]:
        """Returns the lowered step, which does not depend on the seed, and its FLOPs over all devices.

        `loss` is a result of `Task.loss_at`. The arrays of `batch` may be abstract.
        """
        trainable, opt_state, frozen = self.arguments()
        replicated = sharding.replicated(self.mesh)
        update = partial(self._step, loss)
        counters = [jax.ShapeDtypeStruct((), kind, sharding=replicated) for kind in _COUNTERS]
        shardings = (_shardings(trainable), _shardings(opt_state), replicated)
        jitted = jax.jit(update, donate_argnums=(0, 1), out_shardings=shardings)
        traced = jitted.trace(trainable, opt_state, frozen, batch, *counters)
        return traced.lower(), flops.count(traced.jaxpr)

    def __call__(
        self, state: TrainState, frozen: Params, batch: Any, key: tuple | None = None
    ) -> dict[str, jax.Array]:
        """Runs the step `state.step`, counted from 0. Updates `state`; returns the metrics.

        The step must be compiled (`compile`). Donates the arrays of `state`. `key` is `cache_key(batch, state.step)`;
        None to compute the key.
        """
        compiled = self.compiled[key or self.cache_key(batch, state.step)]
        counters = (kind(x) for kind, x in zip(_COUNTERS, (state.step, self.seed), strict=True))
        state.params, state.opt_state, metrics = compiled.run(
            state.params, state.opt_state, frozen, batch, *counters
        )
        state.step += 1
        return metrics

    def cache_key(self, batch: Mapping[str, jax.Array], step: int) -> tuple:
        """Returns the key of a compiled step: the loss function of `step`, and the batch shapes."""
        return self.key_of(self.task.loss_at(step), batch)

    @staticmethod
    def key_of(loss: Callable, batch: Mapping[str, jax.Array]) -> tuple:
        """Returns the key of the step that is compiled for a loss function and batch shapes."""
        return loss, *sorted((name, x.shape) for name, x in batch.items())
