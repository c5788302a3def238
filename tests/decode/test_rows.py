"""Decoding on a mesh: the same tokens as on one device, and no communication in the loop over tokens."""

import json
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding

from common import sharding
from common.decode.rows import gather_weights, row_specs
from common.train.task import Decoding, ModelState
from launch.collectives import Collectives, read_collectives
from launch.hlo import parse
from reservoir.tasks.translation import Translation
from tests.decode import programs
from tests.programs import finish, start_several

MESHES = {
    "one": {"data": 1},
    "data": {"data": 8},
    "fsdp": {"fsdp": 8},
    "all": {"data": 2, "fsdp": 2, "tensor": 2},
}
SLOW_MESHES = ["fsdp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("data", "all"))]


def mesh_of(name: str) -> Mesh:
    return sharding.make_mesh(MESHES[name], jax.devices()[: 1 if name == "one" else 8])


def collectives(decoding: Decoding, state: ModelState) -> Collectives:
    """Returns the collectives of the compiled decoding program, which must have a loop."""
    weights = gather_weights(state.abstract_model, state.mesh)(state.trainable, state.frozen)
    inputs = jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(state.mesh, spec)
        ),
        decoding.inputs,
        row_specs(decoding.inputs),
    )
    with jax.set_mesh(state.mesh):
        text = decoding.program.lower(*weights, *inputs).compile().as_text()
    parts = parse(text).computations.values()
    assert any(x.operation == "while" for part in parts for x in part.instructions.values())
    # Counts a collective in the loop over tokens once per iteration. Assumes 1000 iterations if the program does not
    # state their number.
    return read_collectives(text, 8, unknown_trips=1000)


@pytest.fixture(scope="module")
def translations() -> list[list[int]]:
    """Returns translations made on one device, the reference for other meshes. Some translations end early."""
    found = programs.translate(programs.translation_config(), mesh_of("one"))
    assert len({row.index(2) for row in found if 2 in row}) > 3
    return found


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    """Returns texts sampled on one device, the reference for other meshes."""
    found = programs.write(programs.language_config("gmlp_attn"), mesh_of("one"))
    assert len(set(map(tuple, found))) == len(found)
    return found


@pytest.mark.parametrize("name", SLOW_MESHES)
def test_beam_search_on_a_mesh_equals_one_device(name: str, translations) -> None:
    """The rows are split over eight devices. 13 sentences do not divide evenly, so some rows are padding."""
    assert programs.translate(programs.translation_config(), mesh_of(name)) == translations


@pytest.mark.parametrize("name", SLOW_MESHES)
def test_sampling_on_a_mesh_equals_one_device(name: str, texts) -> None:
    """There are three prompts, so padding rows fill the batch. The texts of padding rows are not returned."""
    assert programs.write(programs.language_config("gmlp_attn"), mesh_of(name)) == texts


@pytest.mark.slow
def test_decoding_in_two_processes_equals_one_device(translations, texts) -> None:
    for process in start_several([sys.executable, "-m", "tests.decode.programs"], 2, 4):
        assert json.loads(finish(process).splitlines()[-1]) == [translations, texts]


@pytest.mark.parametrize("name", SLOW_MESHES)
def test_beam_search_has_no_collective_in_its_loop(name: str) -> None:
    """Only example numbers and translations are gathered, after the loop."""
    config, mesh = programs.translation_config("bfloat16"), mesh_of(name)
    state = programs.translation_state(config, mesh)
    decoding = Translation(config, mesh, read_data=False).decoding(state.abstract_model)
    found = collectives(decoding, state)
    (rows,) = decoding.inputs[0]["ids"].shape
    assert found.unknown_loops == 0
    assert found.received == rows * (1 + decoding.steps) * 4 * 7 // 8


@pytest.mark.parametrize("name", SLOW_MESHES)
@pytest.mark.parametrize("kind", ["gmlp_attn", pytest.param("gpt", marks=pytest.mark.slow)])
def test_sampling_has_no_collective_in_its_loop(kind: str, name: str) -> None:
    """Only the tokens are gathered, once for each chunk."""
    config = programs.language_config(kind, "bfloat16")
    state = programs.language_state(config, mesh_of(name))
    decoding = programs.generator(config, state).decoding(16)
    assert collectives(decoding, state).received == 16 * decoding.steps * 4 * 7 // 8


def test_weights_are_gathered_in_the_dtype_of_activations() -> None:
    """Kernels are gathered in bfloat16. Embedding tables, norms and biases stay in float32."""
    mesh = mesh_of("fsdp")
    state = programs.translation_state(programs.translation_config("bfloat16"), mesh)
    before = state.trainable | state.frozen
    trainable, frozen = gather_weights(state.abstract_model, mesh)(state.trainable, state.frozen)
    for name, x in (trainable | frozen).items():
        assert x.sharding.is_fully_replicated
        assert x.dtype == (jnp.bfloat16 if name.endswith("/kernel") else jnp.float32), name
        assert jnp.array_equal(x, before[name].astype(x.dtype)), name
