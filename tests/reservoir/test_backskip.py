"""Backskipping: the gradient estimate, the schedule of skipping steps, and the saved compute."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from common import freezing
from common.errors import UserError
from common.model.block import Context
from common.model.loss import cross_entropy
from common.sharding import make_mesh, place, shardings
from common.train import flops, optimizer
from common.train.state import Step, TrainState, abstract_opt_state
from reservoir.backskip import Rule, observe, rewards, skip, skips, validate_steps
from reservoir.model import validate
from reservoir.skipping import Backskipping
from tests.model import helpers

SOURCE = np.array([[3, 4, 5, 6, 7, 2], [8, 9, 2, 0, 0, 0]])
TARGET = np.array([[1, 3, 4, 5, 6], [1, 7, 8, 2, 0]])
BATCH = {"source": jnp.asarray(SOURCE), "target": jnp.asarray(TARGET)}
BELOW = "encoder/blocks/0/residuals/1/function/up/kernel"
VALUE = "encoder/blocks/1/baseline/down/bias"


def rule(**fields) -> Rule:
    return Rule(**{"reward": "signed", "sigma": 1.0, "scale": 1.0, **fields})


# Estimator.


def quadratic(mu, noise, value, given: Rule):
    """Returns the loss |y|^2 / 2 for a reservoir that is the identity, so that the reservoir's output y is the action.

    The loss has the gradient g = y at y, so the reward before scaling is -mean(action).
    """
    action = jax.lax.stop_gradient(mu + given.sigma * noise)
    y = skip(given, action, mu, noise, value)
    return jnp.sum(jnp.square(y)) / 2


@pytest.mark.parametrize("sigma", [0.5, 1.0])
def test_expected_gradient_is_minus_the_gradient_of_the_expected_reward(sigma: float):
    """E[reward] = -mean(mu). Minus its gradient is 1 / D in every component, for any mu, sigma and baseline."""
    count, width = 200_000, 4
    mu = jnp.broadcast_to(jnp.array([0.3, -1.0, 2.0, 0.5]), (1, count, width))
    noise = jax.random.normal(jax.random.key(0), mu.shape)
    for baseline in (0.0, -0.45):
        value = jnp.full((1, count), baseline)
        given = rule(sigma=sigma)
        of_mu = jax.jit(jax.grad(lambda *parts, given=given: quadratic(*parts, given)))
        gradient = of_mu(mu, noise, value)[0]
        error = gradient.std(0) / count**0.5
        assert np.all(np.abs(gradient.mean(0) - 1 / width) < 4 * error)
        assert np.all(error < 0.02)


def test_baseline_near_the_mean_reward_lowers_the_variance():
    mu = jnp.full((1, 20_000, 2), 3.0)
    noise = jax.random.normal(jax.random.key(0), mu.shape)

    def spread(baseline):
        value = jnp.full(mu.shape[:2], baseline)
        return jax.jit(jax.grad(lambda *parts: quadratic(*parts, rule())))(mu, noise, value).std()

    # Each component of g has the mean 3 and the standard deviation 1, so its root mean square is sqrt(3^2 + 1). This
    # root mean square is the unit of the baseline.
    assert spread(-3.0 / 10**0.5) < 0.5 * spread(0.0)


def test_gradient_of_one_position_by_hand():
    """g = (1, 3) has the root mean square r = sqrt(5) and the reward -mean(g) / r = -2 / r.

    With the value V = 0.5, the gradient of mu is scale r (V + 2 / r) noise / sigma.
    """
    g, noise = jnp.array([[[1.0, 3.0]]]), jnp.array([[[0.2, -0.4]]])
    value, r = jnp.full((1, 1), 0.5), 5**0.5

    def loss(y, mu, value):
        return jnp.sum(g * skip(rule(sigma=0.5, scale=3.0), y, mu, noise, value))

    of_y, of_mu, of_value = jax.grad(loss, argnums=(0, 1, 2))(jnp.zeros((1, 1, 2)), noise, value)
    assert not np.any(of_y)
    expected = 3.0 * (0.5 * r + 2) * np.array([0.2, -0.4]) / 0.5
    np.testing.assert_allclose(of_mu[0, 0], expected, rtol=1e-6)
    np.testing.assert_allclose(of_value, 2 * (0.5 + 2 / r), rtol=1e-6)


@pytest.mark.parametrize("reward", ["signed", "own_rms"])
def test_estimate_is_linear_in_the_gradient_above(reward: str):
    """A loss summed over tokens and a mean loss give proportional gradients of mu, and equal gradients of the value."""
    keys = jax.random.split(jax.random.key(0), 3)
    g, noise = (jax.random.normal(key, (2, 5, 8)) for key in keys[:2])
    value = jax.random.normal(keys[2], (2, 5))

    def gradients(factor):
        def loss(mu, value):
            y = skip(rule(reward=reward), jnp.zeros_like(mu), mu, noise, value)
            return jnp.sum(factor * g * y)

        return jax.jit(jax.grad(loss, argnums=(0, 1)))(noise, value)

    (mu, of_value), (small_mu, small_value) = gradients(1.0), gradients(1e-3)
    np.testing.assert_allclose(mu, 1000 * small_mu, rtol=1e-5)
    np.testing.assert_allclose(of_value, small_value, rtol=1e-5)
    # With scale = 1, the gradient of mu has the order of magnitude of g.
    assert 0.2 < jnp.std(small_mu) / jnp.std(1e-3 * g) < 5
    np.testing.assert_allclose(gradients(1e-24)[0], 1e-24 * mu, rtol=1e-5)


def test_ordinary_step_passes_the_gradient_and_trains_the_value_network():
    g = jnp.array([[[1.0, 3.0], [0.0, 0.0]]])  # the second position is padding
    value = jnp.array([[0.0, 7.0]])
    loss = lambda y, value: jnp.sum(g * observe(rule(), y, value))  # noqa: E731
    of_y, of_value = jax.grad(loss, argnums=(0, 1))(jnp.zeros_like(g), value)
    np.testing.assert_array_equal(of_y, g)
    np.testing.assert_allclose(of_value, [[4 / 5**0.5, 0.0]], rtol=1e-6)


def test_rewards_by_hand():
    g = jnp.array([[[1.0, 3.0], [-2.0, 0.0], [0.0, 0.0]]])
    found = rewards(g, rule())
    r = (14 / 4) ** 0.5
    np.testing.assert_allclose(found.size, r, rtol=1e-6)
    # The reward "signed" is minus the mean of g over the width, divided by r, the root mean square of g over all
    # positions that are not padding.
    np.testing.assert_allclose(found.reward_BL, [[-2 / r, 1 / r, 0]], rtol=1e-6)
    np.testing.assert_array_equal(found.valid_BL, [[True, True, False]])
    # The reward "own_rms" of a position is minus the root mean square of g there. These rewards are divided by their
    # standard deviation over positions.
    found = rewards(g, rule(reward="own_rms"))
    own = np.array([-(5**0.5), -(2**0.5)])
    np.testing.assert_allclose(found.reward_BL[0, :2], own / own.std(), rtol=1e-5)
    nothing = rewards(jnp.zeros_like(g), rule())
    assert not np.any(nothing.reward_BL) and nothing.size > 0


# Schedule.


def test_skipping_schedule(make_config):
    """No warm-up step skips. t steps after the warm-up, a step skips with probability 1 - 0.99^t.

    From t = 459 on, all steps skip.
    """
    config = make_config("ffn")
    settings = config.model.backskip
    settings.update({"estimator": "policy", "warmup_steps": 100})
    skipped = np.array([skips(config, step) for step in range(1000)])
    assert not skipped[:101].any() and skipped[100 + 459 :].all()
    expected = sum(0.99**since for since in range(459))
    assert abs((~skipped[100:]).sum() - expected) < 4 * expected**0.5
    assert [skips(config, step) for step in range(300)] == skipped[:300].tolist()
    # backskip.warmup_steps=-1 means the warm-up of the learning rate.
    settings.warmup_steps, config.optimizer.warmup_steps = -1, 100
    assert [skips(config, step) for step in range(300)] == skipped[:300].tolist()
    config.seed = 2
    assert [skips(config, step) for step in range(300)] != skipped[:300].tolist()
    for estimator in ("none", "noise"):
        settings.estimator = estimator
        assert not any(skips(config, step) for step in range(0, 1000, 50))


# Backskipping in a whole model.


class Task(Backskipping):
    """A task with teacher forcing and no data."""

    def __init__(self, config):
        self.config = config

    def loss(self, model, batch, key):
        logits = model(batch["source"], batch["target"][:, :-1], key)
        weights = (batch["target"][:, 1:] != 0).astype(jnp.float32)
        return jnp.sum(cross_entropy(logits, batch["target"][:, 1:]) * weights), jnp.sum(weights)


def prepared(make_config, kind: str, estimator: str, **fields):
    config = make_config(kind, dropout=0.0, **fields)
    config.model.backskip.update({"estimator": estimator, "warmup_steps": 2})
    # The first step after the warm-up is ordinary, all later steps skip.
    config.model.backskip.anneal = 0.0
    validate(config.model)
    abstract_model = helpers.structure_of(config.model)
    frozen = freezing.draw_frozen(abstract_model, 1)
    return Task(config), abstract_model, helpers.random_values(abstract_model.trainable, 0), frozen


def gradients(task: Task, abstract_model, trainable, frozen, step: int, factor: float = 1.0):
    """Returns loss, gradients and counted FLOPs of one step. `factor` multiplies the loss."""

    def loss(trainable):
        model = abstract_model.build(trainable, frozen)
        return factor * task.loss_at(step)(model, BATCH, jax.random.key(7))[0]

    function = jax.value_and_grad(loss)
    return *jax.jit(function)(trainable), flops.count(jax.make_jaxpr(function)(trainable))


@pytest.mark.medium
@pytest.mark.parametrize("kind", ["ffn", "transformer"])
def test_skipping_step_compiles_without_the_reservoirs_backward_pass(make_config, kind: str):
    """A skipping step lacks only the matrix products of the reservoir's backward pass."""
    given = prepared(make_config, kind, "policy")
    ordinary, skipping = (gradients(*given, step) for step in (0, 3))
    np.testing.assert_allclose(ordinary[0], skipping[0], rtol=1e-6)
    assert given[0].loss_at(0) == given[0].loss_at(1) != given[0].loss_at(3)
    (batch, length), d, f, heads = SOURCE.shape, 16, 24, 2
    products = 2 * batch * length * 2 * d * f
    if kind == "transformer":
        products += 2 * batch * length * 4 * d * d
        products += 4 * 2 * batch * heads * length * length * (d // heads)
    assert ordinary[2] - skipping[2] == products
    # The gradients of layers above the reservoir do not change. The gradients of all layers below it change.
    for name in ordinary[1]:
        same = np.allclose(ordinary[1][name], skipping[1][name], rtol=1e-4, atol=1e-6)
        below = name.startswith(("encoder/blocks/0/", "source_embed"))
        # Biases of keys do not affect attention, so their gradients are rounding errors.
        assert same != below or name.endswith("key/bias"), name


@pytest.mark.medium
def test_identity_and_zero_gradients(make_config):
    """In a skipping step, "identity" passes the gradient of the reservoir's output to the layer below. "zero" passes 0.

    Neither model has a value network or noise.
    """
    for estimator in ("identity", "zero"):
        task, abstract_model, trainable, frozen = prepared(make_config, "ffn", estimator)
        assert not any("baseline" in name for name in trainable)
        ordinary, skipping = (
            gradients(task, abstract_model, trainable, frozen, step) for step in (0, 3)
        )
        plain = prepared(make_config, "ffn", "none")
        expected = gradients(*plain[:2], trainable, frozen, 3)
        np.testing.assert_allclose([ordinary[0], skipping[0]], expected[0], rtol=1e-5)
        np.testing.assert_allclose(ordinary[1][BELOW], expected[1][BELOW], rtol=1e-4, atol=1e-6)
        assert skipping[2] < ordinary[2] == expected[2]
        assert np.any(skipping[1][BELOW]) == (estimator == "identity")
        if estimator == "identity":
            # An FFN reservoir with zero weights is a residual connection.
            empty = {name: np.zeros_like(value) for name, value in frozen.items()}
            exact = gradients(*plain[:2], trainable, empty, 0)
            found = gradients(task, abstract_model, trainable, empty, 3)
            np.testing.assert_allclose(found[1][BELOW], exact[1][BELOW], rtol=1e-4, atol=1e-6)


@pytest.mark.medium
def test_noise_control_has_the_policys_noise_and_exact_gradients(make_config):
    """With the estimator "noise", all steps have the gradients of an ordinary step of "policy".

    The model has no value network.
    """
    task, abstract_model, trainable, frozen = prepared(make_config, "ffn", "noise")
    assert not any("baseline" in name for name in trainable)
    assert task.loss_at(3) == task.loss_at(0)
    loss, found, _ = gradients(task, abstract_model, trainable, frozen, 3)
    given = prepared(make_config, "ffn", "policy")
    ordinary = gradients(given[0], given[1], {**given[2], **trainable}, frozen, 0)
    np.testing.assert_allclose(loss, ordinary[0], rtol=1e-6)
    for name, gradient in found.items():
        np.testing.assert_allclose(gradient, ordinary[1][name], rtol=1e-4, atol=1e-5)
    plain = prepared(make_config, "ffn", "none")
    still = gradients(*plain[:2], trainable, frozen, 0)
    assert not np.allclose(found[BELOW], still[1][BELOW], rtol=1e-2)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_printed_reward_is_zero_with_pre_norm(make_config, norm: str):
    """The printed reward is minus the mean over the width of the gradient at the reservoir's output.

    With pre-norm, this mean is 0, because LayerNorm removes the mean of its input. With post-norm, it is not 0.
    """
    _, abstract_model, trainable, frozen = prepared(make_config, "ffn", "none", norm=norm)
    model = abstract_model.build(trainable, frozen)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 6, 16)), jnp.float32)
    context = Context(lengths_B=jnp.array([6, 6]))

    def loss_above(y):
        y = model.encoder.blocks[2](y, context)
        return jnp.sum(jnp.sin(y if norm == "post" else model.encoder.norm(y)))

    g = jax.jit(jax.grad(loss_above))(x)
    assert (jnp.abs(g.mean(-1)).max() < 1e-5 * jnp.abs(g).max()) == (norm == "pre")


def test_evaluation_adds_no_noise_and_needs_no_value_network(make_config):
    _, abstract_model, trainable, frozen = prepared(make_config, "ffn", "policy")
    plain = prepared(make_config, "ffn", "none")[1]
    trainable, frozen = jax.tree.map(jnp.asarray, (trainable, frozen))
    kept = {name: trainable[name] for name in plain.trainable}
    np.testing.assert_allclose(
        jax.jit(abstract_model.build(trainable, frozen))(SOURCE, TARGET),
        jax.jit(plain.build(kept, frozen))(SOURCE, TARGET),
        rtol=1e-6,
    )


def test_adjacent_reservoirs_are_skipped_as_one_block(make_config):
    """Two adjacent reservoirs become one block with one value network."""
    _, abstract_model, trainable, _ = prepared(make_config, "ffn", "policy", placement="LRR")
    assert {name.rsplit("/", 3)[0] for name in trainable if "baseline" in name} == {
        "encoder/blocks/1"
    }
    assert not any(name.startswith("encoder/blocks/2/") for name in abstract_model.paths)


@pytest.mark.medium
@pytest.mark.parametrize("estimator", ["policy", "identity"])
def test_separate_reservoirs_have_separate_value_networks(make_config, estimator: str):
    """In LRLRL, each reservoir has its own value network if the estimator is "policy".

    A skipping step changes the gradients of both layers below reservoirs.
    """
    given = prepared(make_config, "ffn", estimator, encoder_layers=5, reservoirs=2)
    values = {name.split("/")[2] for name in given[2] if "baseline" in name}
    assert values == ({"1", "3"} if estimator == "policy" else set())
    ordinary, skipping = (gradients(*given, step) for step in (0, 3))
    for layer in (0, 2):
        name = BELOW.replace("/0/", f"/{layer}/", 1)
        assert np.any(skipping[1][name]), layer
        assert not np.allclose(skipping[1][name], ordinary[1][name], rtol=1e-3), layer
    above = BELOW.replace("/0/", "/4/", 1)
    np.testing.assert_allclose(skipping[1][above], ordinary[1][above], rtol=1e-4, atol=1e-6)
    for name in (n for n in ordinary[1] if "baseline" in n and "/3/" in n):
        # The gradient above the upper reservoir is exact, so its value network has the gradient of an ordinary step.
        np.testing.assert_allclose(skipping[1][name], ordinary[1][name], rtol=1e-4, atol=1e-6)
    if estimator == "policy":
        # The estimate at the lower reservoir has the order of magnitude of the gradient, and is linear in the gradient.
        scaled = gradients(*given, 3, 1000.0)[1]
        for layer in (0, 2, 4):
            name = BELOW.replace("/0/", f"/{layer}/", 1)
            np.testing.assert_allclose(scaled[name], 1000 * skipping[1][name], rtol=1e-3, atol=1e-3)
            assert np.std(skipping[1][name]) < 10 * np.std(ordinary[1][above])


@pytest.mark.parametrize("estimator", ["policy", "identity", "zero"])
def test_skipping_step_has_the_same_loss_to_the_bit(make_config, estimator):
    """In bfloat16, the reservoir's block has the same output in a skipping step as in an ordinary step."""
    given = prepared(make_config, "ffn", estimator, dtype="bfloat16")
    model = given[1].build(*given[2:])
    # Many numbers are needed: x + (y - x), as in a straight-through estimator, differs from y in about one of 1,000.
    x = jnp.asarray(np.random.default_rng(0).standard_normal((256, 64, 16)), jnp.bfloat16)
    found, block = [], model.encoder.blocks[1]
    for skipping in (False, True):
        block.skipping = skipping
        found.append(np.asarray(block(x, Context(), jax.random.key(5)), np.float32))
    np.testing.assert_array_equal(*found)


@pytest.mark.medium
def test_two_steps_are_compiled_and_the_value_network_has_its_own_adam(make_config):
    """On two devices, the value network trains with its own constant learning rate, 1e-3.

    The learning rate of all other parameters is 1e-9.
    """
    task, abstract_model, trainable, frozen = prepared(make_config, "ffn", "policy")
    settings = task.config.optimizer
    settings.update({"learning_rate": 1e-9, "schedule": "constant", "warmup_steps": 0})
    mesh = make_mesh({"data": 2}, jax.devices()[:2])
    update, schedule = optimizer.make(
        settings, 10, task.learning_rate_overrides(), abstract_model.trainable
    )
    step = Step(task, abstract_model, update, schedule, mesh, seed=0)
    values = place(trainable, shardings(abstract_model.trainable, mesh))
    frozen = place(frozen, shardings(abstract_model.frozen, mesh))
    where = jax.tree.map(lambda x: x.sharding, abstract_opt_state(update, values, mesh))
    state = TrainState(0, values, jax.jit(update.init, out_shardings=where)(values))
    for number in range(4):
        if step.cache_key(BATCH, number) not in step.compiled:
            step.compile(BATCH, number)
        metrics = step(state, frozen, BATCH)
        assert np.isfinite(metrics["loss"])
    values = state.params
    assert len(step.compiled) == 2
    operations = {number: step.compiled[step.cache_key(BATCH, number)].flops for number in (0, 3)}
    assert operations[3] < operations[0]
    # Four Adam steps move the bias by nearly 1e-3 each, because its gradient keeps the sign.
    assert 1e-3 < abs(float(values[VALUE][0] - trainable[VALUE][0])) < 4.1e-3
    assert np.max(np.abs(values[BELOW] - trainable[BELOW])) < 1e-7


def test_invalid_fields_are_rejected(make_config):
    for reservoir, fields, message in (
        ("none", {"estimator": "policy"}, "needs a model with reservoirs"),
        ("ffn", {"estimator": "polcy"}, "did you mean policy"),
        ("ffn", {"reward": "sum"}, "reward"),
        ("ffn", {"sigma": 0.0}, "sigma must be above 0"),
        ("ffn", {"value_rate": 0.0}, "value_rate must be above 0"),
        ("ffn", {"anneal": 1.5}, "anneal must be at least 0 and below 1"),
        ("ffn", {"least": 1.5}, "least must be from 0 to 1"),
        ("ffn", {"warmup_steps": -2}, "warmup_steps must be at least 0, or -1"),
    ):
        model = make_config(reservoir).model
        model.backskip.update(fields)
        with pytest.raises(UserError, match=message):
            validate(model)


def test_runs_that_never_skip_are_rejected_and_zero_rewards_warn(make_config, capsys):
    config = make_config("ffn")
    config.model.backskip.update({"estimator": "policy", "reward": "signed"})
    config.train.steps, config.optimizer.warmup_steps = 100, 98
    validate_steps(config)
    assert "reward=signed, the paper's reward, is 0 up to rounding" in capsys.readouterr().err
    config.model.norm, config.optimizer.warmup_steps = "post", 99
    assert not skips(config, 99)  # the only step after the warm-up
    with pytest.raises(
        UserError, match=r"optimizer.warmup_steps\) ends at step 99: .* at least 101$"
    ):
        validate_steps(config)
    assert not capsys.readouterr().err


def test_optimizer_is_unchanged_without_learning_rate_overrides(make_config):
    config = make_config("ffn").optimizer
    values = {"encoder/kernel": jnp.ones(3)}
    own = optimizer.make(config, 10, {"baseline": 1e-3}, values)[0].init(values)
    plain = optimizer.make(config, 10)[0].init(values)
    assert jax.tree.structure(own) == jax.tree.structure(plain)
