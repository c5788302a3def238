"""Trainable and frozen variables, and the initial values of frozen variables."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from common import freezing, variables
from common.errors import UserError
from common.freezing import draw, fingerprint
from common.model.block import Context
from common.model.embed import Embed
from common.model.feed_forward import FeedForward
from common.model.linear import Linear
from common.variables import Frozen
from perception.layers import RMSNorm
from reservoir.redraw import redraw

ORTHOGONAL = ("orthogonal", 1.0)
# Initial values for seed 1 and the path encoder/blocks/2/residuals/0/function/up: kernel (3, 2) and bias (4,).
KERNEL = [[-0.23727761, -0.69970351], [-0.53883386, 0.67199385], [-0.80830526, -0.24256806]]
BIAS = [0.26186057925224304, -0.3121289610862732, -0.1320468783378601, -0.21589592099189758]
FINGERPRINT = "614cf99170ad4d9d029c5047507679491de1504d78b60d848da8bbbe9ac74561"


class Pair(nnx.Module):
    """A trainable layer and a frozen layer."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = Linear(4, 6, ("embed", "mlp"), rngs=rngs)
        self.second = FeedForward(6, 8, rngs=rngs)
        freezing.freeze(self.second)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(self.first(x), Context())


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair(nnx.Rngs(0))


@pytest.mark.parametrize("shape", [(32, 16), (16, 32), (16, 16), (5, 1)])
def test_orthogonal_initializer(shape: tuple[int, int]):
    q = draw(ORTHOGONAL, 1, "a/kernel", shape)
    assert q.shape == shape and q.dtype == np.float32
    gram = q.T @ q if shape[0] >= shape[1] else q @ q.T
    np.testing.assert_allclose(gram, np.eye(min(shape)), atol=1e-6)


def test_orthogonal_initializer_has_no_preferred_sign():
    """Without the correction of signs in `draw`, LAPACK's algorithm would determine the signs of the matrix."""
    corners = [draw(ORTHOGONAL, 0, str(i), (4, 4))[0, 0] for i in range(200)]
    assert abs(np.mean(corners)) < 5 * 0.5 / 200**0.5
    diagonals = [np.trace(draw(ORTHOGONAL, 0, str(i), (4, 4))) for i in range(200)]
    assert abs(np.mean(diagonals)) < 5 / 200**0.5


def test_other_initializers():
    uniform = draw(("uniform", 0.25), 1, "a/bias", (4000,))
    assert -0.25 <= uniform.min() < -0.249 and 0.249 < uniform.max() <= 0.25
    assert uniform.std() == pytest.approx(0.25 / 3**0.5, rel=0.05)
    normal = draw(("normal", 0.02), 1, "a/table", (4000,))
    assert normal.std() == pytest.approx(0.02, rel=0.05) and abs(normal.mean()) < 0.002
    np.testing.assert_array_equal(draw(("ones",), 1, "a", (3,)), np.ones(3, np.float32))
    np.testing.assert_array_equal(draw(("zeros",), 1, "a", (3,)), np.zeros(3, np.float32))


@pytest.mark.parametrize(
    ("spec", "shape"), [(("normal",), (3,)), ("zeros", (3,)), (ORTHOGONAL, (2, 3, 4))]
)
def test_invalid_initializer_raises_user_error(spec: tuple | str, shape: tuple[int, ...]):
    told = f"a/kernel: {spec!r} is not an initializer for the shape {shape}; use an initializer of"
    with pytest.raises(UserError, match=re.escape(told)):
        draw(spec, 1, "a/kernel", shape)


@pytest.mark.parametrize("spec", [ORTHOGONAL, ("uniform", 1.0)])
def test_initial_value_depends_on_seed_and_path_only(spec: tuple):
    first = draw(spec, 1, "a", (6, 4))
    others = [draw(spec, 2, "a", (6, 4)), draw(spec, 1, "b", (6, 4))]
    np.testing.assert_array_equal(first, draw(spec, 1, "a", (6, 4)))
    assert all(np.abs(first - other).max() > 0.01 for other in others)


def test_initial_values_equal_golden_values():
    """Stored runs identify their reservoirs by a seed, so the initial values for a seed must never change."""
    path = "encoder/blocks/2/residuals/0/function/up"
    kernel = draw(ORTHOGONAL, 1, f"{path}/kernel", (3, 2))
    bias = draw(("uniform", 0.5), 1, f"{path}/bias", (4,))
    np.testing.assert_allclose(kernel, KERNEL, atol=1e-6)
    np.testing.assert_array_equal(bias, np.float32(BIAS))
    assert fingerprint({"kernel": kernel, "bias": bias}) == FINGERPRINT


def test_fingerprint_depends_on_names_and_values_only():
    a, b = np.arange(3, dtype=np.float32), np.ones(2, np.float32)
    whole = fingerprint({"a": a, "b": b})
    assert whole == fingerprint({"b": b, "a": a})
    changed = a.copy()
    changed[1] = np.nextafter(changed[1], 2, dtype=np.float32)
    others = [{"a": changed, "b": b}, {"a": a}, {"a": b, "b": a}, {"c": a, "b": b}]
    assert len({whole, *map(fingerprint, others)}) == 5


def test_freeze_makes_every_parameter_frozen(pair: Pair):
    abstract_model = variables.split(pair)
    assert set(abstract_model.trainable) == {"first/kernel", "first/bias"}
    assert set(abstract_model.frozen) == {
        f"second/{layer}/{name}" for layer in ("up", "down") for name in ("kernel", "bias")
    }
    assert abstract_model.seed_initialised.keys() == abstract_model.frozen.keys()
    up = abstract_model.frozen["second/up/kernel"]
    assert up.get_metadata("axes") == ("embed", "mlp")
    assert up.get_metadata("draw") == ORTHOGONAL
    assert abstract_model.frozen["second/up/bias"].get_metadata("draw") == (
        "uniform",
        1 / math.sqrt(6),
    )
    assert abstract_model.frozen["second/down/bias"].get_metadata("draw") == (
        "uniform",
        1 / math.sqrt(8),
    )


def test_initial_values_are_in_bounds_and_keyed_by_path(pair: Pair):
    abstract_model = variables.split(pair)
    values = freezing.draw_frozen(abstract_model, 7)
    assert values.keys() == abstract_model.frozen.keys()
    for name, value in values.items():
        assert value.shape == abstract_model.frozen[name].shape
    assert np.abs(values["second/up/bias"]).max() <= 6**-0.5
    assert np.abs(values["second/down/bias"]).max() <= 8**-0.5
    expected = draw(ORTHOGONAL, 7, "second/up/kernel", (6, 8))
    np.testing.assert_array_equal(values["second/up/kernel"], expected)


def test_freezing_a_parameter_without_initializer_names_it():
    class Outer(nnx.Module):
        def __init__(self):
            self.linear = Linear(4, 4, ("embed", "mlp"), rngs=nnx.Rngs(0))
            self.norm = RMSNorm(4, rngs=nnx.Rngs(0))

    outer = Outer()
    with pytest.raises(
        ValueError,
        match=r"norm/scale cannot be initialised .*give RMSNorm a method frozen_init\(\)",
    ):
        freezing.freeze(outer)
    assert isinstance(outer.linear.kernel, nnx.Param), "an error must leave the module unchanged"


@pytest.mark.parametrize(
    ("matrix", "deviation"),
    [(("orthogonal", 2.0), 2 / 8), (("xavier", 2.0), 2 / 7), (("fan_in", 2.0), 2 / 8)],
)
def test_frozen_and_trained_matrices_have_the_configured_distribution(
    matrix: tuple, deviation: float
):
    """The matrices have 64 inputs and 34 outputs. Biases are uniform for every distribution of the matrices."""
    shape, bound = (64, 34), 1 / 8
    frozen = Linear(*shape, ("embed", "mlp"), rngs=nnx.Rngs(0))
    freezing.freeze(frozen, matrix)
    values = freezing.draw_frozen(variables.split(frozen), 1)
    trained = Linear(*shape, ("embed", "mlp"), rngs=nnx.Rngs(0))
    redraw(trained, matrix, rngs=nnx.Rngs(1))
    assert isinstance(trained.kernel, nnx.Param)
    for kernel, bias in (
        (values["kernel"], values["bias"]),
        (trained.kernel[...], trained.bias[...]),
    ):
        assert np.std(kernel) == pytest.approx(deviation, rel=0.05)
        assert 0.8 * bound < np.abs(bias).max() <= bound
        gram = kernel.T @ kernel
        orthogonal = np.allclose(gram, 4 * np.eye(34), atol=1e-4)
        assert orthogonal == (matrix[0] == "orthogonal")
        if matrix[0] == "xavier":
            assert np.abs(kernel).max() <= 2 * (6 / 98) ** 0.5


def test_loaded_frozen_value_is_kept():
    """A table that `freeze_loaded` marks as loaded is never initialised from a seed."""
    table = Embed(5, 4, rngs=nnx.Rngs(0), positions="none")
    before = np.asarray(table.table[...])
    freezing.freeze_loaded(table)
    abstract_model = variables.split(table)
    assert not abstract_model.trainable and not abstract_model.seed_initialised
    assert isinstance(table.table, Frozen)
    np.testing.assert_array_equal(abstract_model.frozen["table"].get_value(), before)


def test_built_model_has_the_given_values(pair: Pair):
    abstract_model = variables.abstract(Pair)
    for some in (abstract_model.trainable, abstract_model.frozen):
        assert all(isinstance(v.get_value(), jax.ShapeDtypeStruct) for v in some.values())
    full = variables.split(pair)
    trainable, frozen = (
        {name: variable.get_value() for name, variable in some.items()}
        for some in (full.trainable, full.frozen)
    )
    x = jnp.ones((1, 2, 4))
    np.testing.assert_array_equal(abstract_model.build(trainable, frozen)(x), pair(x))
    zero = abstract_model.build(jax.tree.map(jnp.zeros_like, trainable), frozen)
    np.testing.assert_array_equal(zero(x), zero(0 * x))


def test_parameters_are_counted_by_kind_and_by_group(pair: Pair):
    abstract_model = variables.split(pair)
    assert variables.count(abstract_model) == {"trainable": 30, "frozen": 110, "total": 140}
    assert variables.count_by_group(abstract_model) == [
        ("first", 30, 0, 30),
        ("second/down", 0, 54, 54),
        ("second/up", 0, 56, 56),
    ]


@pytest.mark.parametrize("seed", [7, jax.random.key(3)])
def test_param_keys_equal_nnx_paths(seed):
    ours, theirs = variables.ParamKeys(seed), nnx.Rngs(seed)
    for _ in range(3):
        assert (ours.params() == theirs.params()).all()
