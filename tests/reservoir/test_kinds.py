"""Every kind of reservoir in every stack that can have it, and LayerDrop, the baseline."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from common import variables
from common.model.block import Context
from common.model.encoder_decoder import Stack
from common.sharding import make_mesh
from reservoir import run
from reservoir.backskip import skips
from reservoir.kinds import BOTH_WAYS, RESERVOIRS
from reservoir.model import validate
from tests.model import helpers

SOURCE = np.array([[3, 4, 5, 6, 7, 2], [8, 9, 2, 0, 0, 0]])
TARGET = np.array([[1, 3, 4, 5, 6], [1, 7, 8, 2, 0]])


def built(model):
    """A model with reservoirs as training draws them, and the names of what is frozen."""
    validate(model)
    structure = helpers.structure_of(model)
    frozen = variables.draw_frozen(structure, 1)
    return structure.build(helpers.random_values(structure.trainable, 0), frozen), frozen


def drawn_kernels(frozen: dict) -> list[np.ndarray]:
    return [value for name, value in frozen.items() if name.endswith("kernel")]


@pytest.mark.parametrize("kind", RESERVOIRS)
def test_an_encoder_layer_is_frozen_whole_and_drawn_orthogonal(make_config, kind: str):
    model, frozen = built(make_config(kind, max_length=8).model)
    assert {name.split("/")[2] for name in frozen} == {"1"}
    for value in drawn_kernels(frozen):
        tall = value if value.shape[0] >= value.shape[1] else value.T
        np.testing.assert_allclose(tall.T @ tall, np.eye(tall.shape[1]), atol=1e-6)
    assert np.all(np.isfinite(model(SOURCE, TARGET)))


@pytest.mark.parametrize("kind", RESERVOIRS)
def test_padding_changes_nothing(make_config, kind: str):
    model, _ = built(make_config(kind, max_length=12).model)
    wide = np.pad(SOURCE, ((0, 0), (0, 3)))
    np.testing.assert_allclose(model(SOURCE, TARGET), model(wide, TARGET), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [kind for kind in RESERVOIRS if kind not in BOTH_WAYS])
def test_in_a_decoder_a_step_at_a_time_gives_the_whole_pass(make_config, kind: str):
    model, frozen = built(
        make_config(kind, reservoirs=0, decoder_reservoirs=1, max_length=8, kernel=3).model
    )
    assert all(name.startswith("decoder/blocks/0/") for name in frozen)
    whole = model(SOURCE, TARGET)
    context = model.encode(jnp.asarray(SOURCE))
    cache = model.cache(len(TARGET), TARGET.shape[1], context)
    for index in range(TARGET.shape[1]):
        logits, cache = model.step(jnp.asarray(TARGET[:, index]), cache, jnp.int32(index), context)
        np.testing.assert_allclose(logits, whole[:, index], rtol=1e-4, atol=1e-4)


def test_placement_is_a_field_of_the_configuration(make_config):
    for placement, layers in (("bottom", {"0"}), ("top", {"2"}), ("RRL", {"0", "1"})):
        _, frozen = built(make_config("ffn", placement=placement).model)
        assert {name.split("/")[2] for name in frozen} == layers


# LayerDrop.


class Counting(nnx.Module):
    """A block that adds one."""

    def __call__(self, x_BLD, context, key=None):
        return x_BLD + 1


def depth_of(drop: float, key: jax.Array | None, layers: int = 8) -> jax.Array:
    blocks = [Counting() for _ in range(layers)]
    stack = Stack(blocks, 4, rngs=nnx.Rngs(0), final_norm=False, drop=drop)
    return stack(jnp.zeros((1, 1, 4)), Context(), key)[0, 0, 0]


def test_layerdrop_leaves_out_its_share_of_layers_in_training_and_none_elsewhere():
    """(1 - p) N layers on average, each draw on its own: binomial in the mean and in the spread."""
    depths = jax.vmap(lambda key: depth_of(0.25, key))(jax.random.split(jax.random.key(0), 4000))
    deviation = (8 * 0.25 * 0.75) ** 0.5
    assert abs(float(depths.mean()) - 6) < 4 * deviation / 4000**0.5
    assert abs(float(depths.std()) - deviation) < 0.06
    assert depth_of(0.25, None) == 8
    assert depth_of(0.0, jax.random.key(1)) == 8


def test_a_dropped_layer_is_left_out_of_the_arithmetic_and_of_the_gradient(make_config):
    structure = helpers.structure_of(make_config(layerdrop=0.5).model)
    values = helpers.random_values(structure.trainable, 0)

    def loss(trainable, key):
        return jnp.sum(jnp.square(structure.build(trainable, {})(SOURCE, TARGET, key)))

    gradient = jax.jit(jax.grad(loss))
    patterns = set()
    for seed in range(8):
        found = gradient(values, jax.random.key(seed))
        kernels = [f"encoder/blocks/{n}/residuals/1/function/up/kernel" for n in range(3)]
        patterns.add(tuple(bool(np.any(found[name])) for name in kernels))
        assert np.any(found["source_embed/table"])
    assert len(patterns) > 2
    assert "conditional" in gradient.lower(values, jax.random.key(0)).compile().as_text()


# What changes with the step.


@pytest.mark.slow
def test_layerdrop_and_backskipping_go_on_bit_for_bit(make_config, tmp_path):
    """Stopped after 3 of 6 steps and gone on with: the same checkpoint in the end as without a stop."""
    config = make_config("cnn", layerdrop=0.3)
    config.model.backskip.update({"estimator": "policy", "warmup_steps": 2})
    config.model.backskip.anneal = 0.5
    config.optimizer.update({"schedule": "constant", "warmup_steps": 0})
    config.update_from_flattened_dict(
        {
            "data.vocab_size": 300,
            "data.cache_dir": str(tmp_path / "cache"),
            "data.tokens_per_batch": 256,
            "eval.sentences": 4,
            "eval.steps": 3,
            "checkpoint.steps": 3,
            "decode.beams": 1,
            "wandb.mode": "disabled",
        }
    )
    assert len({skips(config, step) for step in range(6)}) == 2
    mesh, sums = make_mesh({"data": 1}, jax.devices()[:1]), []
    for name, ends in (("whole", (6,)), ("stopped", (3, 6))):
        for end in ends:
            config.train.steps = end
            run.fit(config, tmp_path / name, mesh)
        meta = tmp_path / name / "checkpoints" / "latest" / "6" / "meta" / "metadata"
        sums.append(json.loads(meta.read_text())["checksum"])
    assert sums[0] == sums[1]
