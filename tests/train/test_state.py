"""The compiled step equals the same step in NumPy, for a loss whose gradient shows the dropout mask.

Shape letters of this module: B rows, F features.
"""

import threading
from collections.abc import Callable
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh

from common import sharding, variables
from common.freezing import freeze, thaw
from common.model.dropout import dropout
from common.model.linear import Linear
from common.runtime.signals import Signals
from common.sharding import make_mesh
from common.train import ahead
from common.train.clock import Clock
from common.train.frozen import draw_on_mesh
from common.train.prefetch import put
from common.train.state import Step, TrainState, abstract_opt_state, initial_params
from tests.train import toy

FEATURES = 64
SEED, DECAY, MOMENTUM = 3, 0.1, 0.9
SCALE = 2.0
"""Factor of kept features under dropout at rate 0.5."""


class Model(nnx.Module):
    """A frozen layer, dropout, and a trained layer with one output."""

    def __init__(self, rngs: nnx.Rngs):
        self.features = Linear(4, FEATURES, ("embed", "mlp"), rngs=rngs)
        freeze(self.features)
        self.trained = Linear(FEATURES, 1, ("mlp", "embed"), rngs=rngs)

    def __call__(self, x_BD: jax.Array, key: jax.Array) -> jax.Array:
        return self.trained(dropout(self.features(x_BD), 0.5, key))[:, 0]


class Weighted(toy.Toy):
    """A toy task: the loss of a row is the model's output times the row's weight, and is doubled at odd steps."""

    def build(self, rngs: nnx.Rngs) -> nnx.Module:
        return Model(rngs)

    def loss(self, model, batch, key) -> tuple[jax.Array, jax.Array]:
        return jnp.sum(batch["weight"] * model(batch["x"], key)), batch["weight"].sum()

    def doubled(self, model, batch, key) -> tuple[jax.Array, jax.Array]:
        loss, weight = self.loss(model, batch, key)
        return 2 * loss, weight

    def loss_at(self, step: int) -> Callable:
        return self.doubled if step % 2 else self.loss

    def learning_rate_overrides(self) -> dict[str, float]:
        return {"bias": 0.25}


def rows(count: int, weights: list[float], same: bool = False) -> dict[str, np.ndarray]:
    x = np.random.default_rng(0).standard_normal((count, 4)).astype(np.float32)
    return {"weight": np.asarray(weights, np.float32), "x": x[:1].repeat(count, 0) if same else x}


def schedule(number: int) -> jax.Array:
    return 0.5 / (1 + number)


def momentum() -> optax.GradientTransformation:
    """Returns SGD with weight decay and momentum, whose update depends on gradients, parameters and state."""
    return optax.chain(
        optax.add_decayed_weights(DECAY),
        optax.trace(MOMENTUM),
        optax.scale_by_learning_rate(schedule),
    )


def one_device() -> Mesh:
    return make_mesh({"data": 1}, jax.devices()[:1])


class Run:
    """A training step that is compiled on demand, and the state that the step changes."""

    def __init__(self, mesh: Mesh | None = None, **fields):
        self.mesh, self.task = mesh or one_device(), Weighted()
        abstract_model = variables.abstract(self.task.build)
        options = {"seed": SEED} | fields
        self.step = Step(self.task, abstract_model, momentum(), schedule, self.mesh, **options)
        start = self.step.start()
        self.values, self.state = start.params, start.opt_state
        self.frozen, _ = draw_on_mesh(abstract_model, SEED, self.mesh)

    def __call__(self, batch: dict[str, np.ndarray], number: int = 0) -> dict[str, float]:
        """Takes one step; returns its metrics."""
        batch = put(batch, self.mesh)
        if self.step.cache_key(batch, number) not in self.step.compiled:
            self.step.compile(batch, number)
        state = TrainState(number, self.values, self.state)
        metrics = self.step(state, self.frozen, batch)
        self.values, self.state = state.params, state.opt_state
        return jax.tree.map(float, metrics)

    def numpy(self) -> dict[str, np.ndarray]:
        return {name: np.array(value) for name, value in self.values.items()}

    def gradients(self, batch: dict[str, np.ndarray], key: jax.Array) -> tuple:
        """Returns `Step.gradients`: the sums of losses and weights, and the gradient of the trained kernel, (F,)."""
        gradients = jax.jit(self.step.gradients, static_argnums=0)
        loss, weight, grads = gradients(self.task.loss, self.values, self.frozen, batch, key)
        return float(loss), float(weight), np.asarray(grads["trained/kernel"])[:, 0]

    def features(self, batch: dict[str, np.ndarray]) -> np.ndarray:
        frozen = {name: np.asarray(value) for name, value in self.frozen.items()}
        return batch["x"] @ frozen["features/kernel"] + frozen["features/bias"]


@pytest.fixture(scope="module")
def plain() -> Run:
    return Run()


@pytest.fixture(scope="module")
def accumulating() -> Run:
    """Returns a step with two microbatches per batch."""
    return Run(accumulate=2)


def test_microbatches_have_different_dropout_masks(accumulating: Run) -> None:
    """Each microbatch has the same row. Dropout keeps a feature in none, one or both of the microbatches."""
    batch = rows(2, [1.0, 1.0], same=True)
    _, _, gradient_F = accumulating.gradients(batch, jax.random.key(5))
    kept_F = gradient_F / (SCALE * accumulating.features(batch)[0])
    assert np.allclose(kept_F, kept_F.round(), atol=1e-4)
    times = np.bincount(kept_F.round().astype(int), minlength=3)
    # The tolerance of 16 is four standard deviations.
    assert len(times) == 3 and times[1] == pytest.approx(FEATURES / 2, abs=16)
    assert times[0] > 0 and times[2] > 0


def test_microbatches_add_up_to_the_batch(accumulating: Run) -> None:
    """Each microbatch has its own dropout mask. Losses, weights and gradients are sums over the microbatches."""
    batch = rows(6, [1.0, 0.0, 2.0, 0.5, 3.0, 1.5])
    key = jax.random.key(5)
    loss, weight, gradient_F = accumulating.gradients(batch, key)
    masked_BF = np.zeros((6, FEATURES), np.float32)
    for number in range(2):
        part_BF = accumulating.features(batch)[number::2]
        masked_BF[number::2] = dropout(part_BF, 0.5, jax.random.fold_in(key, number))
    expected_F = batch["weight"] @ masked_BF
    values = accumulating.numpy()
    assert weight == 8.0
    np.testing.assert_allclose(gradient_F, expected_F, rtol=1e-4, atol=1e-5)
    total = expected_F @ values["trained/kernel"][:, 0] + 8.0 * values["trained/bias"][0]
    assert loss == pytest.approx(total, rel=1e-4)


def test_two_steps_equal_numpy() -> None:
    """An update applies weight decay, momentum and the schedule to the gradient of the weighted mean."""
    run, batch = Run(), rows(4, [0.5, 1.0, 0.0, 2.0])
    total_weight, trace_F = 3.5, np.zeros(FEATURES)
    for number in range(2):
        kernel_F = run.numpy()["trained/kernel"][:, 0]
        bias = run.numpy()["trained/bias"][0]
        key = jax.random.fold_in(jax.random.key(SEED), number)
        masked_BF = np.asarray(dropout(run.features(batch), 0.5, key))
        times = 1 + number  # step 1 doubles the loss
        gradient_F = times * batch["weight"] @ masked_BF / total_weight
        metrics = run(batch, number)
        # The gradient of the bias is 1, doubled at step 1.
        norm = np.sqrt(np.sum(gradient_F**2) + times**2)
        assert metrics["gradient_norm"] == pytest.approx(norm, rel=1e-4)
        assert metrics["loss"] == pytest.approx(gradient_F @ kernel_F + times * bias, abs=1e-4)
        assert metrics["weight"] == total_weight
        assert metrics["learning_rate"] == pytest.approx(0.5 / (1 + number))
        trace_F = MOMENTUM * trace_F + gradient_F + DECAY * kernel_F
        expected_F = kernel_F - 0.5 / (1 + number) * trace_F
        found_F = run.numpy()["trained/kernel"][:, 0]
        np.testing.assert_allclose(found_F, expected_F, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("weight", [0.0, 0.5, 1.0])
def test_batch_weight_below_one_counts_as_one(plain: Run, weight: float) -> None:
    """A batch with only padding has zero gradients and finite metrics."""
    batch = rows(4, [0.0, weight, 0.0, 0.0])
    metrics = plain(batch, 8)
    key = jax.random.fold_in(jax.random.key(SEED), 8)
    masked_BF = np.asarray(dropout(plain.features(batch), 0.5, key))
    norm = np.sqrt(np.sum((weight * masked_BF[1]) ** 2) + weight**2)
    assert metrics["weight"] == weight
    assert metrics["gradient_norm"] == pytest.approx(norm, rel=1e-4)
    assert np.isfinite(metrics["loss"]) and (weight or metrics["loss"] == 0)


def test_dropout_masks_follow_from_seed_and_step(plain: Run) -> None:
    """A resumed run therefore has the dropout masks of an uninterrupted run."""
    batch = rows(4, [1.0] * 4)
    first, second, again = (plain(batch, number)["gradient_norm"] for number in (0, 2, 0))
    assert first == again != second
    assert Run(seed=SEED + 1)(batch, 0)["gradient_norm"] not in (first, second)


def test_one_program_per_shape_and_loss(plain: Run) -> None:
    plain.step.compiled.clear()
    small, large = rows(4, [1.0] * 4), rows(8, [1.0] * 8)
    for batch, number in ((small, 8), (large, 8), (small, 9), (small, 10), (large, 10)):
        plain(batch, number)
    assert len(plain.step.compiled) == 3
    reordered = dict(reversed(small.items()))
    assert plain.step.cache_key(small, 0) == plain.step.cache_key(reordered, 98)
    assert len({plain.step.cache_key(b, n) for b in (small, large) for n in (0, 1, 2, 3)}) == 4
    with pytest.raises(KeyError):
        state = TrainState(9, plain.values, plain.state)
        plain.step(state, plain.frozen, put(large, plain.mesh))

    # Per row: the products of both layers, and the gradient of the trained kernel.
    products = 2 * 4 * FEATURES + 2 * 2 * FEATURES
    for batch, count in ((small, 4), (large, 8)):
        flops = plain.step.compiled[plain.step.cache_key(batch, 8)].flops
        assert isinstance(flops, float) and flops == count * products


def test_cache_key_selects_the_program(plain: Run) -> None:
    """The program of odd steps doubles the gradient. Both programs get step number 8, so dropout masks are equal."""
    batch = put(rows(4, [1.0] * 4), plain.mesh)
    norms = {}
    for number in (8, 9):
        plain(rows(4, [1.0] * 4), number)
    for number in (8, 9):
        program = plain.step.compiled[plain.step.cache_key(batch, number)].run
        arguments = plain.values, plain.state, plain.frozen, batch, jnp.int32(8), jnp.uint32(SEED)
        plain.values, plain.state, metrics = program(*arguments)
        norms[number] = float(metrics["gradient_norm"])
    assert norms[9] == pytest.approx(2 * norms[8])


def test_cancelled_compilations_do_not_begin(plain: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process can use only one core. The compilation of the second shape waits for the first, and is cancelled."""
    begun, end, compiled = threading.Event(), threading.Event(), []

    def compile_slowly(key, *_):
        begun.set()
        assert end.wait(60)
        compiled.append(key)

    plain.step.compiled.clear()
    monkeypatch.setattr(plain.step, "compile_now", compile_slowly)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0}, raising=False)
    monkeypatch.setattr(ahead, "_wait", lambda *_: None)
    parts = {"train_step": plain.step, "task": plain.task, "mesh": plain.mesh}
    run = SimpleNamespace(**parts, clock=Clock())
    batches = [rows(count, [1.0] * count) for count in (4, 8)]
    ahead.compile_ahead(run, put(batches[0], plain.mesh), batches[1:], Signals())
    assert begun.wait(60)
    plain.step.cancel()
    end.set()
    for thread in threading.enumerate():
        if thread.name.startswith("compile"):
            thread.join()
    assert compiled == [plain.step.cache_key(put(batches[0], plain.mesh), 8)]


def test_state_is_donated_to_the_step(plain: Run) -> None:
    """Without donation, a device would need memory for two copies of parameters and moments."""
    before = jax.tree.leaves((plain.values, plain.state))
    plain(rows(4, [1.0] * 4), 8)
    assert all(array.is_deleted() for array in before if array.size >= FEATURES)
    assert not any(array.is_deleted() for array in plain.frozen.values())


@pytest.fixture(scope="module")
def sharded() -> Run:
    return Run(make_mesh({"data": 2, "fsdp": 2, "tensor": 2}, jax.devices()[:8]))


def test_step_keeps_all_shardings(sharded: Run) -> None:
    with jax.set_mesh(sharded.mesh):
        before = jax.tree.map(lambda x: x.sharding, (sharded.values, sharded.state))
        batch = put(rows(8, [1.0] * 8), sharded.mesh)
        sharded.step.compile(batch)
        state = TrainState(0, sharded.values, sharded.state)
        metrics = sharded.step(state, sharded.frozen, batch)
        sharded.values, sharded.state = state.params, state.opt_state
    after = jax.tree.map(lambda x: x.sharding, (sharded.values, sharded.state))
    assert before == after
    assert not sharded.values["trained/kernel"].sharding.is_fully_replicated
    assert all(metric.sharding.is_fully_replicated for metric in metrics.values())


def test_abstract_arguments_match_the_arrays_of_a_run(sharded: Run) -> None:
    """The shapes, dtypes and shardings are equal. `launch.plan` compiles the step for the abstract arguments."""

    def described(tree):
        return jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), tree)

    found = sharded.step.arguments()
    assert described(found) == described((sharded.values, sharded.state, sharded.frozen))
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(found))


def test_moments_have_the_sharding_of_their_parameters(sharded: Run) -> None:
    """Adafactor's factored moments, and counters, are replicated."""
    where = sharding.shardings(sharded.step.abstract_model.trainable, sharded.mesh)
    sums = optax.scale_by_factored_rms(min_dim_size_to_factor=1)
    update = optax.chain(optax.scale_by_adam(), sums)
    state = abstract_opt_state(update, sharded.values, sharded.mesh)
    adam, factored = jax.tree.map(lambda x: x.sharding, state)
    assert adam.mu == adam.nu == where
    assert factored.v["trained/bias"] == where["trained/bias"]
    replicated = [adam.count, factored.count, *factored.v_row.values(), *factored.v_col.values()]
    assert all(place.is_fully_replicated for place in replicated)


def test_initial_params_follow_from_the_seed_on_every_mesh(plain: Run, sharded: Run) -> None:
    abstract_model = sharded.step.abstract_model
    for seed in (SEED, SEED + 1):
        model = Weighted().build(variables.ParamKeys(seed))
        expected = np.asarray(model.trained.kernel.get_value())
        for run in (plain, sharded):
            values = initial_params(run.task, abstract_model, seed, run.mesh)
            assert values.keys() == {"trained/kernel", "trained/bias"}
            where = sharding.shardings(abstract_model.trainable, run.mesh)
            assert {name: value.sharding for name, value in values.items()} == where
            np.testing.assert_allclose(values["trained/kernel"], expected, rtol=1e-6)


class Noted(Weighted):
    """Records whether the model is built while a compiled function is traced.

    Args:
      frozen: True for a model with more frozen than trainable parameters, False for a model without frozen parameters.
    """

    def __init__(self, frozen: bool):
        super().__init__()
        self.frozen = frozen

    def build(self, rngs: nnx.Rngs) -> nnx.Module:
        model = Model(rngs)
        if not self.frozen:
            thaw(model)
        self.compiled = isinstance(model.trained.kernel.get_value(), jax.core.Tracer)
        return model


@pytest.mark.parametrize("frozen", [False, True])
def test_models_with_many_arrays_have_the_same_initial_params(
    frozen: bool, plain: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one device, a model with many arrays is initialised without jit, unless at least half of it is frozen.

    With many frozen parameters, jit is used because the compiled function, unlike eager code, does not allocate them.
    """
    task = Noted(frozen)
    abstract_model = variables.abstract(task.build)
    expected = initial_params(task, abstract_model, SEED, plain.mesh)
    assert task.compiled
    monkeypatch.setattr("common.train.state._MANY_ARRAYS", 0)
    found = initial_params(task, abstract_model, SEED, plain.mesh)
    assert task.compiled == frozen
    for name, value in found.items():
        assert value.sharding == expected[name].sharding
        np.testing.assert_allclose(value, expected[name], rtol=1e-6)


def test_run_starts_at_step_0_with_the_values_of_its_seed(plain: Run) -> None:
    start = plain.step.start()
    expected = initial_params(plain.task, plain.step.abstract_model, SEED, plain.mesh)
    assert start.step == 0
    for name, value in expected.items():
        np.testing.assert_array_equal(start.params[name], value)


def test_step_has_the_seed_schedule_and_learning_rate_overrides_of_the_run() -> None:
    fields = {"optimizer__schedule": "linear", "train__steps": 10, "train__accumulate": 2}
    config, mesh = toy.config(seed=9, **fields), one_device()
    step = Step.of(config, task := Weighted(), mesh)
    assert (step.task, step.mesh, step.seed, step.accumulate) == (task, mesh, 9, 2)
    assert step.abstract_model.trainable.keys() == {"trained/kernel", "trained/bias"}
    assert step.abstract_model.frozen.keys() == {"features/kernel", "features/bias"}
    rates = [float(step.schedule(number)) for number in (0, 5, 10)]
    assert rates == pytest.approx([0.05, 0.025, 0.0])
    values = {name: jnp.ones(v.shape) for name, v in step.abstract_model.trainable.items()}
    updates, _ = jax.jit(step.optimizer.update)(values, step.optimizer.init(values), values)
    assert updates["trained/bias"] == pytest.approx(-0.25, rel=1e-4)
    assert updates["trained/kernel"] == pytest.approx(-0.05, rel=1e-4)


def test_seeds_share_the_compiled_step(plain):
    """The compiled step does not depend on the seed, so runs with other seeds find it in the compilation cache."""
    batch = put(rows(4, [1.0] * 4), plain.mesh)
    other = Run(seed=SEED + 1)
    texts = [run.step.lower(run.task.loss, batch)[0].as_text() for run in (plain, other)]
    assert texts[0] == texts[1]
    assert plain(rows(4, [1.0] * 4))["loss"] != other(rows(4, [1.0] * 4))["loss"]
