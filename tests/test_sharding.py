"""Sharding rules, and equal losses and gradients on every mesh."""

from dataclasses import dataclass
from functools import partial

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from common import sharding, variables
from common.errors import UserError
from common.train import optimizer as optimizers
from common.train.frozen import draw_on_mesh
from common.train.state import Step, abstract_opt_state, initial_params
from reservoir.model import translator
from reservoir.skipping import Backskipping
from reservoir.tasks.translation import teacher_forcing

VOCABULARY = 48
MESHES = {
    "1": {"data": 1},
    "8,1,1": {"data": 8},
    "2,2,2": {"data": 2, "fsdp": 2, "tensor": 2},
    "1,4,2": {"data": 1, "fsdp": 4, "tensor": 2},
}


def mesh_of(name: str) -> Mesh:
    devices = jax.devices()[: 1 if name == "1" else 8]
    return sharding.make_mesh(MESHES[name], devices)


@dataclass(frozen=True)
class Chip:
    """Stand-in for a v5e chip, with the attributes that device placement reads."""

    id: int
    process_index: int
    coords: tuple[int, int, int]
    slice_index: int
    core_on_chip: int = 0
    platform: str = "tpu"
    device_kind: str = "TPU v5 lite"


def slices_of(count: int, side: int) -> list[Chip]:
    """Returns the chips of `count` slices, host by host. A slice has side x side chips, a host 2 x 2 chips."""
    hosts = side // 2
    chips = []
    for number in range(count):
        for host in range(hosts * hosts):
            for chip in range(4):
                x, y = host % hosts * 2 + chip % 2, host // hosts * 2 + chip // 2
                index = number * hosts * hosts + host
                chips.append(Chip(len(chips), index, (x, y, 0), number))
    return chips


def grid_of(sizes: dict[str, int], chips: list[Chip]) -> np.ndarray:
    return sharding.make_mesh(sizes, chips).devices


def test_slices_divide_the_data_axis() -> None:
    """Devices that differ only in their fsdp or tensor coordinates are in one slice."""
    grid = grid_of({"data": -1, "fsdp": 4, "tensor": 2}, slices_of(2, 4))
    assert grid.shape == (4, 4, 2)
    numbers = [{chip.slice_index for chip in part.flat} for part in grid]
    assert numbers == [{0}, {0}, {1}, {1}]
    assert {chip.id for chip in grid.flat} == set(range(32))


@pytest.mark.parametrize("data", [1, 3])
def test_data_axis_must_be_a_multiple_of_the_slices(data: int) -> None:
    with pytest.raises(
        UserError, match=f"data={data} must be a multiple of 2, the number of TPU slices"
    ) as error:
        sharding.make_mesh({"data": data, "fsdp": -1}, slices_of(2, 2 if data == 1 else 6))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("slices", [1, 2])
def test_fsdp_axis_is_a_ring_of_neighbours(slices: int) -> None:
    grid = grid_of({"data": slices, "fsdp": 16}, slices_of(slices, 4))[..., 0]
    for ring in np.concatenate([grid, grid[:, :1]], axis=1):
        places = np.array([chip.coords for chip in ring])
        assert (abs(np.diff(places, axis=0)).sum(axis=1) == 1).all()


@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("tensor", [2, 4])
def test_tensor_axis_of_tpus_stays_within_a_host(slices: int, tensor: int) -> None:
    """`mesh_utils` by itself would place a tensor axis of four chips across two hosts."""
    grid = grid_of({"data": slices, "fsdp": -1, "tensor": tensor}, slices_of(slices, 4))
    assert all(len({chip.process_index for chip in row}) == 1 for part in grid for row in part)
    assert [{chip.slice_index for chip in part.flat} for part in grid] == [
        {number} for number in range(slices)
    ]


def test_tensor_axis_larger_than_a_host_raises_error() -> None:
    with pytest.raises(UserError, match="tensor=8 spans several processes"):
        sharding.make_mesh({"data": -1, "tensor": 8}, slices_of(2, 4))


def test_cpus_keep_their_order() -> None:
    devices = jax.devices()[:8][::-1]
    assert list(grid_of({"data": 2, "fsdp": 4}, devices).flat) == devices


def test_spec_follows_the_rules() -> None:
    mesh = mesh_of("2,2,2")
    assert sharding.spec(("embed", "mlp"), (8, 8), mesh) == PartitionSpec("fsdp", "tensor")
    assert sharding.spec(("vocab", "embed"), (8, 8), mesh) == PartitionSpec("tensor", "fsdp")
    batch = sharding.spec(("batch", "length", "width"), (8, 3, 8), mesh)
    assert batch == PartitionSpec(("data", "fsdp"), None, None)


def test_mesh_may_lack_axes_of_the_rules() -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    expected = PartitionSpec(("data",), None, None)
    assert sharding.spec(("batch", None, "heads"), (4, 3, 2), mesh) == expected


def test_indivisible_dimension_is_replicated() -> None:
    assert sharding.spec(("vocab", "embed"), (7, 8), mesh_of("2,2,2")) == PartitionSpec(
        None, "fsdp"
    )


@pytest.mark.parametrize(
    ("axes", "shape", "what"),
    [
        (("embed",), (8, 8), "axes .*embed.* but the shape"),
        (
            ("embed", "batch"),
            (8, 8),
            "for more than one dimension: of the axes that use fsdp, replace",
        ),
        (("mlp", "heads"), (8, 8), "for more than one dimension"),
        (("nonsense", None), (8, 8), "is unknown: use None or one of"),
    ],
)
def test_invalid_axes_raise_user_errors(axes: tuple, shape: tuple, what: str) -> None:
    with pytest.raises(UserError, match=what):
        sharding.spec(axes, shape, mesh_of("2,2,2"), "w")


def test_mesh_size_minus_one_takes_the_remaining_devices() -> None:
    mesh = sharding.make_mesh({"data": -1, "tensor": 2}, jax.devices()[:8])
    assert dict(mesh.shape) == {"data": 4, "fsdp": 1, "tensor": 2}


@pytest.mark.parametrize(
    "sizes", [{"data": 3}, {"data": -1, "fsdp": -1}, {"data": 0}, {"data": -1, "tensor": 3}]
)
def test_invalid_mesh_sizes_raise_user_errors(sizes: dict) -> None:
    with pytest.raises(UserError, match="mesh"):
        sharding.make_mesh(sizes, jax.devices()[:8])


def _batch() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    batch = {
        name: generator.integers(3, VOCABULARY, (8, 7), dtype=np.int32)
        for name in ("source", "target_inputs", "target_outputs")
    }
    batch["source"][3, 4:] = 0
    batch["target_outputs"][5, 2:] = 0
    return batch


class _Task(Backskipping):
    def __init__(self, config):
        self.config = config

    def build(self, rngs):
        return translator(self.config.model, VOCABULARY, VOCABULARY, rngs=rngs)

    def loss(self, model, batch, key):
        return teacher_forcing(model, batch, key, 0.1)


def _gradients(config, name: str, accumulate: int = 1) -> tuple:
    """Returns (loss, weight, gradients) of step 1 on a mesh, each summed over the batch.

    Asserts that the initial parameters have the shardings of `sharding.spec`.
    """
    mesh, task = mesh_of(name), _Task(config)
    with jax.set_mesh(mesh):
        abstract_model = variables.abstract(task.build)
        update, schedule = optimizers.make(config.optimizer, 10)
        step = Step(task, abstract_model, update, schedule, mesh, config.seed, accumulate)
        trainable = initial_params(task, abstract_model, config.seed, mesh)
        for variable, value in zip(
            abstract_model.trainable.values(), trainable.values(), strict=True
        ):
            spec = sharding.spec(variable.get_metadata("axes"), value.shape, mesh)
            assert value.sharding.spec == spec, "parameters must be sharded at initialization"
        frozen, _ = draw_on_mesh(abstract_model, config.seed, mesh)
        batch = jax.device_put(_batch(), sharding.batch_sharding(mesh))
        gradients = jax.jit(partial(step.gradients, task.loss_at(1)))
        sums = gradients(trainable, frozen, batch, jax.random.key(1))
    return jax.tree.map(np.asarray, sums)


@pytest.fixture(scope="module")
def on_one_device(make_config) -> tuple:
    return _gradients(make_config("ffn", dropout=0.3), "1")


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("8,1,1", "1,4,2")),
        pytest.param("2,2,2", marks=pytest.mark.medium),
    ],
)
def test_loss_and_gradients_are_equal_on_every_mesh(name: str, make_config, on_one_device) -> None:
    loss, weight, gradients = _gradients(make_config("ffn", dropout=0.3), name)
    assert weight == on_one_device[1]
    np.testing.assert_allclose(loss, on_one_device[0], rtol=1e-5)
    for key, expected in on_one_device[2].items():
        np.testing.assert_allclose(gradients[key], expected, rtol=1e-4, atol=1e-4, err_msg=key)


# Slow cases of the next test: a kind of reservoir and, for a model with LayerDrop, ", dropped". The kind "ffn" is
# missing, because test_loss_and_gradients_are_equal_on_every_mesh has it.
SLOW = [
    pytest.param(kind, marks=pytest.mark.slow) for kind in ("bigru", "cnn", "gmlp", "none, dropped")
]


@pytest.mark.parametrize(
    "kind", [pytest.param("transformer, skipped", marks=pytest.mark.medium), *SLOW]
)
def test_reservoir_kinds_are_equal_on_a_mesh(kind: str, make_config) -> None:
    kind, _, how = kind.partition(", ")
    small = {"encoder_layers": 2, "placement": "RL", "decoder_layers": 1, "dropout": 0.3}
    config = make_config(kind, layerdrop=0.3 if how == "dropped" else 0.0, **small)
    if how == "skipped":
        config.model.backskip.update({"estimator": "policy", "warmup_steps": 0})
        config.model.backskip.anneal = 0.0
    found = [_gradients(config, name) for name in ("1", "2,2,2")]
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=1e-5)
    for key, expected in found[0][2].items():
        np.testing.assert_allclose(found[1][2][key], expected, rtol=1e-3, atol=1e-3, err_msg=key)


@pytest.mark.medium
def test_accumulated_gradients_equal_the_whole_batch(make_config) -> None:
    # Dropout is 0, because dropout masks depend on the microbatch. Microbatches have unequal weights, because rows
    # have unequal numbers of tokens.
    config = make_config("ffn", dropout=0.0)
    whole, parts = _gradients(config, "1"), _gradients(config, "1", accumulate=4)
    assert whole[1] == parts[1]
    np.testing.assert_allclose(parts[0], whole[0], rtol=1e-5)
    for key, expected in whole[2].items():
        np.testing.assert_allclose(parts[2][key], expected, rtol=1e-4, atol=1e-5, err_msg=key)


def test_moments_inherit_the_sharding_of_parameters(tiny_config) -> None:
    mesh, task = mesh_of("2,2,2"), _Task(tiny_config)
    abstract_model = variables.abstract(task.build)
    update, _ = optimizers.make(tiny_config.optimizer, 10)
    where = sharding.shardings(abstract_model.trainable, mesh)
    state = abstract_opt_state(update, sharding.abstract(abstract_model.trainable, mesh), mesh)
    places = jax.tree.map(lambda x: x.sharding, state)
    moments = [
        part.mu
        for part in jax.tree.leaves(places, is_leaf=lambda x: hasattr(x, "mu"))
        if hasattr(part, "mu")
    ]
    assert moments == [where]
