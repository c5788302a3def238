"""Devices exchange gradients once per step, and draw the random numbers of their own rows."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from common import sharding, variables
from common.model.dropout import dropout, row_bits
from common.model.linear import Linear, matmul
from common.train.exchange import local_sums
from common.train.prefetch import put
from common.train.state import Step
from launch import topology
from launch.collectives import read_collectives
from reservoir.row_random import row_keys, row_normal
from tests.train import toy

ROWS, LENGTH, WORDS, WIDTH = 32, 4, 48, 16
MESHES = {
    "1": {"data": 1},
    "data": {"data": 8},
    "fsdp": {"data": 1, "fsdp": 8},
    "tensor": {"data": 4, "tensor": 2},
    "all": {"data": 2, "fsdp": 2, "tensor": 2},
}


class Tied(nnx.Module):
    """A word embedding, a layer with dropout, and an output layer that is tied to the embedding."""

    def __init__(self, words: int, width: int, rngs: nnx.Rngs):
        draw = jax.random.normal(rngs.params(), (words, width))
        self.table = nnx.Param(draw, axes=("vocab", "embed"))
        self.hidden = Linear(width, width, ("embed", "mlp"), rngs=rngs)

    def __call__(self, words_BL: jax.Array, key: jax.Array) -> jax.Array:
        x_BLD = dropout(jnp.tanh(self.hidden(self.table[...][words_BL])), 0.5, key)
        return matmul(sharding.constrain(x_BLD, "batch", "length", "width"), self.table[...], True)


class Copying(toy.Toy):
    """Predicts the words of the input. The weight of the loss is the number of words."""

    def __init__(self, words: int = WORDS, width: int = WIDTH):
        self.words, self.width = words, width

    def build(self, rngs: nnx.Rngs) -> nnx.Module:
        return Tied(self.words, self.width, rngs)

    def loss(self, model, batch, key) -> tuple[jax.Array, jax.Array]:
        logs_BLV = jax.nn.log_softmax(model(batch["words"], key))
        losses_BL1 = -jnp.take_along_axis(logs_BLV, batch["words"][..., None], axis=2)
        return losses_BL1.sum(), jnp.float32(batch["words"].size)


def mesh_of(name: str) -> Mesh:
    return sharding.make_mesh(MESHES[name], jax.devices()[: 1 if name == "1" else 8])


def step_on(mesh: Mesh, task: Copying | None = None, **fields) -> Step:
    task, rate = task or Copying(), optax.constant_schedule(0.1)
    abstract_model = variables.abstract(task.build)
    return Step(task, abstract_model, optax.sgd(rate), rate, mesh, 1, **fields)


def batch_on(mesh: Mesh) -> dict[str, jax.Array]:
    words = np.random.default_rng(0).integers(0, WORDS, (ROWS, LENGTH), dtype=np.int32)
    return put({"words": words}, mesh)


def gradients(name: str, **fields) -> tuple:
    """Returns (loss, weight, gradients) with dropout, each summed over the batch."""
    mesh = mesh_of(name)
    with jax.set_mesh(mesh):
        step = step_on(mesh, **fields)
        compute = jax.jit(partial(step.gradients, step.task.loss))
        found = compute(step.start().params, {}, batch_on(mesh), jax.random.key(5))
    return jax.tree.map(np.asarray, found)


@pytest.fixture(scope="module")
def on_one_device() -> dict[int, tuple]:
    """Returns {number of microbatches: (loss, weight, gradients)}."""
    return {accumulate: gradients("1", accumulate=accumulate) for accumulate in (1, 4)}


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.medium), 4])
@pytest.mark.parametrize("name", ["data", "fsdp", "tensor", "all"])
def test_gradients_with_dropout_match_one_device(
    name: str, accumulate: int, on_one_device: dict[int, tuple]
) -> None:
    expected = on_one_device[accumulate]
    found = gradients(name, accumulate=accumulate)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), found, expected)
    assert found[1] == ROWS * LENGTH


def received(mesh: Mesh, **fields) -> dict[str, tuple[int, int]]:
    """Returns {kind of collective: (number, bytes received by each device)} of a compiled step."""
    step = step_on(mesh, **fields)
    rows = jax.ShapeDtypeStruct((ROWS, LENGTH), np.int32, sharding=sharding.batch_sharding(mesh))
    with jax.set_mesh(mesh):
        lowered, _ = step.lower(step.task.loss, {"words": rows})
    collectives = read_collectives(lowered.compile().as_text(), mesh.size)
    assert collectives.unknown_loops == 0
    return {kind: (count, size) for kind, count, size in collectives.rows}


PARAMETERS = WORDS * WIDTH + WIDTH * WIDTH + WIDTH


def test_data_parallel_step_receives_each_gradient_once() -> None:
    """The step all-reduces the gradients, the loss and the weight. The tied table is exchanged once."""
    mesh = mesh_of("data")
    found = {accumulate: received(mesh, accumulate=accumulate) for accumulate in (1, 4)}
    for kinds in found.values():
        assert kinds.keys() == {"all-reduce"}
        assert kinds["all-reduce"][1] == 2 * 7 * (PARAMETERS + 2) * 4 // 8
    assert found[4] == found[1]


@pytest.mark.parametrize("accumulate", [1, 4])
def test_fsdp_step_reduce_scatters_each_gradient_once(accumulate: int) -> None:
    """Devices all-reduce the gradient of the bias, which is not split over fsdp, and scalars."""
    kinds = received(mesh_of("fsdp"), accumulate=accumulate)
    assert kinds.keys() == {"all-gather", "reduce-scatter", "all-reduce"}
    assert kinds["reduce-scatter"][1] == 7 * (PARAMETERS - WIDTH) * 4 // 8
    assert kinds["all-reduce"][1] <= 2 * 7 * (WIDTH + 8) * 4 // 8


def test_parameters_are_gathered_over_fsdp_only() -> None:
    """The table and the kernel stay split over tensor. The activations of the hidden layer are gathered over tensor."""
    kinds = received(mesh_of("all"))
    parameters, activations = (PARAMETERS - WIDTH) * 4 // 4, ROWS // 4 * LENGTH * WIDTH * 4 // 2
    assert kinds["all-gather"] == (3, parameters + activations)
    assert kinds["reduce-scatter"] == (2, parameters)


@pytest.mark.skipif(not topology.has_compiler(), reason="needs the TPU compiler")
@pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")
def test_tpu_compiler_keeps_the_reduce_scatter() -> None:
    """The table is split along its last dimension. Without a layout constraint, its gradient would be all-reduced."""
    words, width = 4096, 512
    mesh = sharding.make_mesh(MESHES["fsdp"], topology.find("v5e:2x4").devices)
    kinds = received(mesh, task=Copying(words, width))
    assert kinds["reduce-scatter"][1] == 7 * (words * width + width * width) * 4 // 8
    assert kinds["all-reduce"][1] <= 2 * 7 * (width + 8) * 4 // 8


@pytest.mark.parametrize("name", ["data", "fsdp"])
def test_reduce_dtype_is_the_dtype_of_the_exchange(name: str, on_one_device: dict) -> None:
    """The uncompiled step shows the dtype of the exchange, because the CPU compiler replaces bfloat16 by float32."""
    mesh = mesh_of(name)
    step = step_on(mesh, reduce_dtype="bfloat16")
    with jax.set_mesh(mesh):
        lowered, _ = step.lower(step.task.loss, batch_on(mesh))
    operation = {"data": "all_reduce", "fsdp": "reduce_scatter"}[name]
    _, _, exchange = lowered.as_text().partition(f"stablehlo.{operation}")
    assert "bf16" in exchange[:2000]
    loss, weight, found = gradients(name, reduce_dtype="bfloat16")
    assert (weight, loss) == (ROWS * LENGTH, pytest.approx(on_one_device[1][0], rel=1e-5))
    for path, expected in on_one_device[1][2].items():
        assert found[path].dtype == np.float32
        assert abs(found[path] - expected).max() <= 0.02 * abs(expected).max()
        assert (found[path] != expected).any()


def test_shards_draw_their_rows_of_the_global_random_numbers() -> None:
    shape, key = (ROWS, 3, 5), jax.random.key(7)
    draws = {
        "bits": (row_bits(key, shape), lambda x: row_bits(key, x.shape)),
        "keys": (
            jax.random.key_data(jax.random.split(key, ROWS)),
            lambda x: jax.random.key_data(row_keys(key, len(x))),
        ),
    }
    for dtype in (jnp.float32, jnp.bfloat16):
        draws[dtype.__name__] = (
            jax.random.normal(key, shape, dtype),
            lambda x, dtype=dtype: row_normal(key, x.shape, dtype),
        )
    mesh = mesh_of("tensor")
    with jax.set_mesh(mesh):
        for name, (expected, draw) in draws.items():
            rows = put({"x": np.zeros(shape, np.float32)}, mesh)["x"]
            shards = jax.jit(partial(local_sums, draw, mesh))(rows)
            found = np.asarray(shards).reshape(expected.shape)
            np.testing.assert_array_equal(found, expected, err_msg=name)
    np.testing.assert_array_equal(draws["bits"][0], jax.random.bits(key, shape))


@pytest.mark.medium
def test_dropout_without_rows_is_equal_on_all_devices() -> None:
    mesh, x = mesh_of("data"), jnp.ones((6, 64))
    expected = dropout(x, 0.5, jax.random.key(3))
    drop = partial(dropout, rate=0.5, key=jax.random.key(3), batched=False)
    found = jax.shard_map(drop, mesh=mesh, in_specs=P(), out_specs=P("data"), check_vma=False)(x)
    np.testing.assert_array_equal(found, np.tile(expected, (8, 1)))
