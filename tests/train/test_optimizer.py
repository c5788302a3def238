"""Optimizers against the published algorithms in NumPy, schedules against their formulas, and invalid settings.

AdamW is also compared with PyTorch, and Adafactor with Hugging Face transformers and on several meshes. Weight decay is
tested for matrices only and for all parameters.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from ml_collections import ConfigDict

from common import sharding, variables
from common.errors import UserError
from common.model.layers import is_stacked, layers_of
from common.model.linear import Linear
from common.sharding import make_mesh
from common.train import optimizer as optimizers
from common.train.prefetch import device_prefetch
from common.train.state import Step, abstract_opt_state
from tests.train import toy

RATE, DECAY, STEPS = 0.05, 0.1, 4
SHAPES = {"matrix": (3, 5), "tall": (6, 1), "vector": (4,), "single": (1,)}
FINITE = "must be a finite number"


def settings(**fields: object) -> ConfigDict:
    """Returns a configuration of Adafactor, with overrides."""
    fields = {
        "name": "adafactor",
        "learning_rate": RATE,
        "schedule": "constant",
        "epsilon": 1e-30,
        "weight_decay": DECAY,
        "decay": "all",
        "warmup_steps": 0,
    } | fields
    return toy.config(**{f"optimizer__{name}": value for name, value in fields.items()}).optimizer


def drawn() -> tuple[dict, list[dict]]:
    """Returns parameters and the gradients of four steps.

    The gradients grow from step 1 to step 3, so that Adafactor clips its updates.
    """
    generator = np.random.default_rng(0)

    def draw(scale: float) -> dict:
        return {
            name: (scale * generator.standard_normal(shape)).astype(np.float32)
            for name, shape in SHAPES.items()
        }

    return draw(1.0), [draw(scale) for scale in (1e-3, 1.0, 5.0, 1e-2)]


def parameters(values: dict, gradients: list[dict], optimizer: ConfigDict, **options) -> list[dict]:
    """Returns the parameters after each step of an optimizer."""
    update, _ = optimizers.make(optimizer, STEPS, **options)
    state, found = update.init(values), []

    @jax.jit
    def step(gradient, state, values):
        updates, state = update.update(gradient, state, values)
        return optax.apply_updates(values, updates), state

    for gradient in gradients:
        values, state = step(gradient, state, values)
        found.append(jax.tree.map(np.asarray, values))
    return found


@pytest.fixture(scope="module")
def ours() -> list[dict]:
    """Returns the parameters after each step of Adafactor."""
    return parameters(*drawn(), settings())


@pytest.mark.parametrize("own", [None, {"head": 1e-3}])
def test_adafactor_updates_layers_of_a_stacked_array_like_separate_arrays(own):
    """The gradients of the layers differ in scale, so Adafactor clips the updates of some layers only."""
    shapes = {"a/[0,1,2]/kernel": (3, 3, 5), "a/[0,1,2]/bias": (3, 4), "b/[1,3]/kernel": (2, 6, 2)}
    shapes |= {"embed/table": (7, 3), "head/kernel": (5, 2)}
    generator = np.random.default_rng(0)

    def draw(scale: float) -> dict:
        drawn = {name: generator.standard_normal(shape) for name, shape in shapes.items()}
        for x in drawn.values():
            x *= scale ** np.arange(len(x)).reshape(-1, *[1] * (x.ndim - 1))
        return {name: x.astype(np.float32) for name, x in drawn.items()}

    def separate(values: dict) -> dict:
        pairs = [(n, x if is_stacked(n) else [x]) for n, x in values.items()]
        return {n: x for name, xs in pairs for n, x in zip(layers_of(name), xs, strict=True)}

    values, gradients = draw(1.0), [draw(scale) for scale in (0.1, 1.0, 5.0)]
    stacked = parameters(values, gradients, settings(), own=own, names=values)
    values, gradients = separate(values), [separate(gradient) for gradient in gradients]
    expected = parameters(values, gradients, settings(), own=own, names=values)
    for found, params in zip(stacked, expected, strict=True):
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), separate(found), params)


def test_adagrad_equals_pytorch_from_the_first_step():
    """PyTorch subtracts rate g / (sqrt(sum of g^2) + epsilon).

    The sum starts at 0, so a tiny first gradient moves the parameter by the rate.
    """
    gradients = np.array([[1e-3, 0, 2, 1e-2], [-2e-3, 0, -1, 0], [1e-3, 0, 3, 5]], np.float32)
    values = np.array([1, 2, 3, 4], np.float32)
    optimizer = settings(name="adagrad", weight_decay=0.0, epsilon=1e-10)
    steps = parameters({"x": values}, [{"x": g} for g in gradients], optimizer)
    sums = np.zeros(4)
    for gradient, found in zip(gradients.astype(float), steps, strict=True):
        sums += gradient**2
        values = values - RATE * gradient / (np.sqrt(sums) + 1e-10)
        np.testing.assert_allclose(found["x"], values, rtol=1e-6)
    first = steps[0]["x"] - np.array([1, 2, 3, 4])
    np.testing.assert_allclose(first, [-RATE, 0, -RATE, -RATE], atol=1e-6)


def test_epsilon_of_adafactor_is_added_to_the_square_of_a_gradient():
    values, gradient = {"x": np.zeros(2, np.float32)}, {"x": np.array([1e-3, 0.0], np.float32)}
    (found,) = parameters(values, [gradient], settings(epsilon=1e-6))
    np.testing.assert_allclose(found["x"], [-RATE / np.sqrt(2), 0.0], rtol=1e-5)


def test_epsilon_of_adagrad_has_the_unit_of_a_gradient():
    """A first gradient equal to epsilon gives a step of rate / sqrt(2). A gradient of 0 gives no step.

    PyTorch adds epsilon after the square root: its first step would be rate / 2.
    """
    optimizer = settings(name="adagrad", weight_decay=0.0, epsilon=1e-3)
    values, gradient = {"x": np.zeros(2, np.float32)}, {"x": np.array([1e-3, 0.0], np.float32)}
    (found,) = parameters(values, [gradient], optimizer)
    np.testing.assert_allclose(found["x"], [-RATE / np.sqrt(2), 0.0], rtol=1e-5)


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("decay", [0.0, DECAY])
def test_adam_equals_the_published_algorithm(decoupled: bool, decay: float):
    """Moments are corrected for bias. Weight decay is added to the gradient ("adam") or to the step ("adamw")."""
    beta1, beta2, epsilon = 0.8, 0.9, 1e-2
    fields = {"name": "adamw" if decoupled else "adam", "weight_decay": decay}
    optimizer = settings(beta1=beta1, beta2=beta2, epsilon=epsilon, **fields)
    values, gradients = drawn()
    value, first, second = values["matrix"].astype(float), 0.0, 0.0
    steps = parameters(values, gradients, optimizer)
    for step, (gradient, found) in enumerate(zip(gradients, steps, strict=True), start=1):
        gradient = gradient["matrix"] + (0 if decoupled else decay * value)
        first = beta1 * first + (1 - beta1) * gradient
        second = beta2 * second + (1 - beta2) * gradient**2
        update = first / (1 - beta1**step) / (np.sqrt(second / (1 - beta2**step)) + epsilon)
        value = value - RATE * (update + (decay * value if decoupled else 0))
        np.testing.assert_allclose(found["matrix"], value, rtol=1e-5, atol=1e-6)


def test_clipping_bounds_the_norm_of_all_gradients_together():
    """Gradients have the norm 13. clip=2 scales the norm to 2, clip=20 has no effect, clip=0 disables clipping."""
    gradients = [{"x": np.float32([3.0, 4.0]), "y": np.float32([12.0])}]
    values = jax.tree.map(np.zeros_like, gradients[0])
    fields = {"name": "adagrad", "weight_decay": 0.0, "epsilon": 1.0}
    # With epsilon = 1 the first step is g / sqrt(g^2 + 1), which shows the norm of the clipped gradient g.
    for clip, scale in ((2.0, 2 / 13), (20.0, 1.0), (0.0, 1.0)):
        (found,) = parameters(values, gradients, settings(clip=clip, **fields))
        for name, gradient in gradients[0].items():
            expected = -RATE * scale * gradient / np.sqrt((scale * gradient) ** 2 + 1)
            np.testing.assert_allclose(found[name], expected, rtol=1e-5)


def test_learning_rate_overrides_use_adam():
    """A name matches a whole component of a path. Other parameters keep the optimizer with its decay and clipping."""
    names = ("encoder/policy/kernel", "encoder/policymaker/kernel", "other")
    values = {name: np.float32([1.0]) for name in names}
    gradients = [{name: np.float32([30.0]) for name in names}]
    optimizer = settings(name="adamw", epsilon=1e-8, clip=1.0)
    (found,) = parameters(values, gradients, optimizer, own={"policy": 0.5}, names=names)
    assert found["encoder/policy/kernel"] == pytest.approx(1 - 0.5, rel=1e-5)
    for name in names[1:]:
        assert found[name] == pytest.approx(1 - RATE * (1 + DECAY), rel=1e-5)
    (without,) = parameters(values, gradients, optimizer, own={"absent": 0.5}, names=names)
    assert all(without[name] == pytest.approx(found["other"]) for name in names)
    plain, absent = (
        jax.eval_shape(optimizers.make(optimizer, STEPS, own, names)[0].init, values)
        for own in (None, {"absent": 0.5})
    )
    assert jax.tree.structure(plain) == jax.tree.structure(absent), (
        "both have the same checkpoint structure"
    )


def rates(steps: int, at: list[int], **fields: object) -> list[float]:
    """Returns the learning rate at the steps `at`."""
    _, schedule = optimizers.make(settings(**fields), steps)
    return [float(schedule(step)) for step in at]


def test_schedules_equal_their_formulas():
    """The warm-up is linear from `warmup_init` to 0.05, over 4 of 20 steps. Then all but "constant" decay."""
    at, rise = [0, 1, 2, 4], [0.01, 0.02, 0.03, 0.05]
    warm = {"warmup_steps": 4, "warmup_init": 0.01}
    late = [8, 12, 16, 20, 30]
    falls = {
        "constant": [RATE] * 5,
        "linear": [0.0375, 0.025, 0.0125, 0.0, 0.0],
        "cosine": [RATE * (1 + np.cos(np.pi * x)) / 2 for x in (0.25, 0.5, 0.75, 1, 1)],
        "inverse_sqrt": [RATE * np.sqrt(4 / step) for step in late],
    }
    assert falls.keys() == optimizers.SCHEDULES.keys()
    for schedule, fall in falls.items():
        found = rates(20, at + late, schedule=schedule, **warm)
        assert found == pytest.approx(rise + fall, abs=1e-8), schedule


def test_schedules_without_warm_up_start_at_the_full_learning_rate():
    """`warmup_init` has no effect, except at step 0 of inverse_sqrt."""
    expected = {"constant": [RATE] * 3, "linear": [RATE, RATE / 2, 0.0]}
    expected["cosine"] = expected["linear"]
    expected["inverse_sqrt"] = [0.01, RATE, RATE / np.sqrt(10), RATE / np.sqrt(20)]
    for schedule, values in expected.items():
        at = [0, 1, 10, 20] if schedule == "inverse_sqrt" else [0, 10, 20]
        found = rates(20, at, schedule=schedule, warmup_steps=0, warmup_init=0.01)
        assert found == pytest.approx(values, abs=1e-8), schedule


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_decay_of_one_step(schedule: str):
    found = rates(5, [4, 5], schedule=schedule, warmup_steps=4, warmup_init=0.0)
    assert found == pytest.approx([RATE, 0.0], abs=1e-8)


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear"])
def test_learning_rate_of_a_run_shorter_than_its_warm_up_only_rises(schedule: str):
    found = rates(4, [0, 2, 4, 8], schedule=schedule, warmup_steps=8, warmup_init=0.0)
    assert found == pytest.approx([0.0, RATE / 4, RATE / 2, RATE], abs=1e-8)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "sgd"}, r"^--config\.optimizer\.name.*sgd.*adam"),
        ({"schedule": "step"}, r"^--config\.optimizer\.schedule.*step.*cosine"),
        ({"learning_rate": 0.0}, rf"^--config.optimizer.learning_rate {FINITE} above 0, got 0\.0$"),
        ({"epsilon": 0.0}, rf"^--config.optimizer.epsilon {FINITE} above 0, got 0\.0$"),
        (
            {"name": "adagrad"},
            r"name=adagrad has no weight decay, but --config.optimizer.weight_decay is 0\.1: set it to 0$",
        ),
        ({"warmup_steps": -2}, r"^--config.optimizer.warmup_steps must be at least 0, or -1 for"),
        ({"warmup_init": -1.0}, rf"^--config.optimizer.warmup_init {FINITE} of at least 0, got -1"),
        ({"clip": -0.5}, rf"^--config.optimizer.clip {FINITE} of at least 0, got -0\.5$"),
        ({"weight_decay": -0.1}, rf"^--config.optimizer.weight_decay {FINITE} of at least 0"),
        ({"beta1": 1.0}, r"^--config.optimizer.beta1 must be at least 0 and below 1, got 1\.0$"),
        ({"beta2": -0.1}, r"^--config.optimizer.beta2 must be at least 0 and below 1, got -0\.1$"),
    ],
)
def test_invalid_optimizer_settings_raise_user_errors(fields: dict, message: str):
    with pytest.raises(UserError, match=message):
        optimizers.validate(settings(**fields))


def test_boundary_settings_are_valid():
    least = {"clip": 0.0, "beta1": 0.0, "beta2": 0.0, "learning_rate": 1e-9, "warmup_init": 0.0}
    optimizers.validate(settings(weight_decay=0.0, warmup_steps=-1, **least))
    optimizers.validate(settings(beta1=0.999999, beta2=0.999999, learning_rate=2.0, epsilon=1.0))
    optimizers.validate(settings(name="adagrad", weight_decay=0.0))


def slow(values: np.ndarray, gradients: list[np.ndarray]) -> list[np.ndarray]:
    """Returns the values of one parameter after each step of the published Adafactor, computed in NumPy."""
    values, moment, found = values.astype(np.float64), np.zeros(values.shape), []
    rows, columns = np.zeros(values.shape[:1]), np.zeros(values.shape[-1:])
    for step, gradient in enumerate(gradients, start=1):
        beta = 1 - step**-0.8
        square = gradient.astype(np.float64) ** 2 + 1e-30
        if values.ndim == 2:
            rows = beta * rows + (1 - beta) * square.mean(axis=1)
            columns = beta * columns + (1 - beta) * square.mean(axis=0)
            second = np.outer(rows, columns) / rows.mean()
        else:
            second = moment = beta * moment + (1 - beta) * square
        update = gradient / np.sqrt(second)
        update /= max(1.0, np.sqrt(np.mean(update**2)))
        values = values - RATE * DECAY * values - RATE * update
        found.append(values)
    return found


@pytest.mark.parametrize("name", SHAPES)
def test_adafactor_equals_a_numpy_implementation(ours, name):
    values, gradients = drawn()
    expected = slow(values[name], [gradient[name] for gradient in gradients])
    for step, value in enumerate(expected):
        np.testing.assert_allclose(ours[step][name], value, rtol=2e-5, err_msg=f"step {step}")


@pytest.mark.parametrize("schedule", optimizers.SCHEDULES)
def test_default_warm_up_is_a_twentieth_of_the_steps(schedule):
    """The warm-up is longer for a run with more steps. The learning rate is highest at the end of the warm-up."""
    asked = settings()
    asked.schedule, asked.warmup_init = schedule, 0.0
    for said, steps, expected in ((-1, 400, 20), (-1, 50, 2), (-1, 4, 0), (7, 400, 7)):
        asked.warmup_steps = said
        optimizers.validate(asked)
        _, rate = optimizers.make(asked, steps)
        if expected:
            assert float(rate(expected)) == pytest.approx(RATE)
            assert float(rate(1)) == pytest.approx(RATE / expected)
        assert optimizers.warmup_steps(asked, steps) == expected
    asked.warmup_steps = -2
    with pytest.raises(UserError, match="warmup_steps must be at least 0, or -1 for a twentieth"):
        optimizers.validate(asked)


MATRICES = ("layer/kernel", "spatial/weight", "embed/table")
VECTORS = ("layer/bias", "norm/scale", "spatial/bias", "embed/positions/table")


def decaying() -> dict:
    """Returns small parameters with names as in real models. A gate bias and position embeddings are 2D."""
    shapes = ((2, 3), (1, 4, 4), (5, 3), (3,), (3,), (1, 4), (4, 3))
    return {n: jnp.ones(s) for n, s in zip(MATRICES + VECTORS, shapes, strict=True)}


@pytest.mark.parametrize("own", [None, {"spatial": 1e-3}])
@pytest.mark.parametrize("name", ["adam", "adamw", "adafactor"])
def test_weight_decay_of_matrices_shrinks_only_matrices(name, own):
    """Gradients are zero, so only weight decay acts. Parameters with a learning-rate override do not decay."""
    asked, values = settings(), decaying()
    asked.update({"name": name, "decay": "matrices", "weight_decay": DECAY})
    zeros = jax.tree.map(jnp.zeros_like, values)
    update, _ = optimizers.make(asked, STEPS, own, values)
    updates, _ = update.update(zeros, update.init(values), values)
    after = optax.apply_updates(values, updates)
    shrunk = {n for n in values if float(jnp.max(after[n])) < 1}
    assert shrunk == {n for n in MATRICES if not (own and n.startswith("spatial"))}
    if name != "adam":  # Adam adds the decay to the gradient
        np.testing.assert_allclose(after["layer/kernel"], 1 - RATE * DECAY, rtol=1e-6)
    for kept in values.keys() - shrunk:
        np.testing.assert_array_equal(after[kept], values[kept])


def test_weight_decay_of_all_shrinks_every_parameter():
    asked, values = settings(), decaying()
    update, _ = optimizers.make(asked, STEPS)
    zeros = jax.tree.map(jnp.zeros_like, values)
    updates, _ = update.update(zeros, update.init(values), values)
    after = optax.apply_updates(values, updates)
    assert all(float(jnp.max(x)) < 1 for x in after.values())
    asked.decay = "kernels"
    with pytest.raises(UserError, match="decay='kernels': choose one of matrices, all"):
        optimizers.validate(asked)


@pytest.mark.peers
def test_adamw_equals_pytorch_with_two_parameter_groups():
    torch = pytest.importorskip("torch")
    asked, values = settings(), decaying()
    asked.update({"name": "adamw", "decay": "matrices", "epsilon": 1e-8})
    parameters = {n: torch.nn.Parameter(torch.tensor(np.asarray(v))) for n, v in values.items()}
    groups = [
        {"params": [parameters[n] for n in names], "weight_decay": decay}
        for names, decay in ((MATRICES, DECAY), (VECTORS, 0.0))
    ]
    theirs = torch.optim.AdamW(groups, lr=RATE, betas=(asked.beta1, asked.beta2), eps=1e-8)
    update, _ = optimizers.make(asked, STEPS)
    state, generator = update.init(values), np.random.default_rng(0)
    for _ in range(STEPS):
        gradients = {
            n: generator.standard_normal(v.shape).astype(np.float32) for n, v in values.items()
        }
        for name, parameter in parameters.items():
            parameter.grad = torch.tensor(gradients[name])
        theirs.step()
        updates, state = update.update(gradients, state, values)
        values = optax.apply_updates(values, updates)
    for name, parameter in parameters.items():
        np.testing.assert_allclose(values[name], parameter.detach().numpy(), rtol=2e-5)


@pytest.mark.peers
def test_adafactor_equals_transformers(ours):
    torch = pytest.importorskip("torch")
    Adafactor = pytest.importorskip("transformers").Adafactor
    values, gradients = drawn()
    parameters = {name: torch.nn.Parameter(torch.tensor(value)) for name, value in values.items()}
    theirs = Adafactor(
        parameters.values(),
        lr=RATE,
        eps=(1e-30, 1e-3),
        clip_threshold=1.0,
        decay_rate=-0.8,
        beta1=None,
        weight_decay=DECAY,
        relative_step=False,
        scale_parameter=False,
        warmup_init=False,
    )
    for gradient, expected in zip(gradients, ours, strict=True):
        for name, parameter in parameters.items():
            parameter.grad = torch.tensor(gradient[name])
        theirs.step()
        for name, parameter in parameters.items():
            value = parameter.detach().numpy()
            np.testing.assert_allclose(expected[name], value, rtol=2e-5, err_msg=name)


class Wide(nnx.Module):
    """A model with two matrices that are sharded over two mesh axes, and a matrix that is sharded over one."""

    def __init__(self, rngs: nnx.Rngs):
        self.up = Linear(2, 8, ("embed", "mlp"), rngs=rngs)
        self.down = Linear(8, 4, ("mlp", "embed"), rngs=rngs)
        self.out = Linear(4, 1, ("embed", None), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(jnp.tanh(self.down(self.up(x))))


class WideToy(toy.Toy):
    def build(self, rngs: nnx.Rngs) -> nnx.Module:
        return Wide(rngs)


def test_factored_moments_are_replicated():
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    abstract_model = variables.abstract(Wide)
    where = sharding.shardings(abstract_model.trainable, mesh)
    update, _ = optimizers.make(settings(), STEPS)
    state = abstract_opt_state(update, sharding.abstract(abstract_model.trainable, mesh), mesh)
    shardings = jax.tree.map(lambda x: x.sharding, state)
    factored = next(part for part in shardings if hasattr(part, "v_row"))
    for shardings in (factored.v_row, factored.v_col):
        assert all(sharding.is_fully_replicated for sharding in shardings.values())
    # The moment of a bias has the shape of the bias.
    assert factored.v["up/bias"] == where["up/bias"]
    assert not where["up/bias"].is_fully_replicated


def trained(sizes: dict[str, int], devices: int) -> dict[str, np.ndarray]:
    """Returns the parameters after several steps on a mesh."""
    mesh, task = make_mesh(sizes, jax.devices()[:devices]), WideToy()
    with jax.set_mesh(mesh):
        abstract_model = variables.abstract(task.build)
        update, schedule = optimizers.make(settings(), STEPS)
        step = Step(task, abstract_model, update, schedule, mesh, seed=1)
        state = step.start()
        batches = device_prefetch(task.batches(None), mesh)
        for number in range(STEPS):
            batch, _ = next(batches)
            if not number:
                step.compile(batch)
            step(state, {}, batch)
        batches.close()
    return {name: np.asarray(value) for name, value in state.params.items()}


@pytest.mark.medium
def test_adafactor_is_equal_on_every_mesh():
    one, eight = trained({}, 1), trained({"data": 2, "fsdp": 2, "tensor": 2}, 8)
    for name, value in one.items():
        np.testing.assert_allclose(eight[name], value, rtol=1e-4, atol=1e-6, err_msg=name)
