"""Kinds of reservoirs in the encoder and, if possible, in the decoder. Also initial values, LayerDrop and resuming."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from ml_collections import ConfigDict

from common import freezing, variables
from common.errors import UserError
from common.model.block import Context
from common.model.stack import Stack
from common.sharding import make_mesh
from common.train.command import fit
from configs import masked
from reservoir.backskip import skips
from reservoir.encoder import masked_lm
from reservoir.kinds import RESERVOIRS, find
from reservoir.model import translator, validate
from reservoir.saved import with_defaults
from tests.model import helpers

SOURCE = np.array([[3, 4, 5, 6, 7, 2], [8, 9, 2, 0, 0, 0]])
TARGET = np.array([[1, 3, 4, 5, 6], [1, 7, 8, 2, 0]])


def built(model):
    """Returns a model with random trainable values and with reservoirs drawn from seed 1, and its frozen values."""
    validate(model)
    abstract_model = helpers.structure_of(model)
    frozen = freezing.draw_frozen(abstract_model, 1)
    values = jax.tree.map(jnp.asarray, helpers.random_values(abstract_model.trainable, 0))
    return abstract_model.build(values, jax.tree.map(jnp.asarray, frozen)), frozen


def drawn_kernels(frozen: dict) -> list[np.ndarray]:
    return [value for name, value in frozen.items() if name.endswith("kernel")]


@pytest.mark.parametrize("kind", RESERVOIRS)
def test_encoder_reservoir_is_frozen_and_orthogonal(make_config, kind: str):
    model, frozen = built(make_config(kind, max_length=8).model)
    assert {name.split("/")[2] for name in frozen} == {"1"}
    for value in drawn_kernels(frozen):
        tall = value if value.shape[0] >= value.shape[1] else value.T
        np.testing.assert_allclose(tall.T @ tall, np.eye(tall.shape[1]), atol=1e-6)
    assert np.all(np.isfinite(jax.jit(model)(SOURCE, TARGET)))


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(name, marks=[] if name == "transformer" else pytest.mark.medium)
        for name in RESERVOIRS
    ],
)
def test_output_is_independent_of_padding(make_config, kind: str):
    model, _ = built(make_config(kind, max_length=12).model)
    wide = np.pad(SOURCE, ((0, 0), (0, 3)))
    model = jax.jit(model)
    np.testing.assert_allclose(model(SOURCE, TARGET), model(wide, TARGET), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "kind", [name for name, kind in RESERVOIRS.items() if not kind.bidirectional_only]
)
def test_decoding_with_reservoirs_matches_the_full_forward_pass(make_config, kind: str):
    model, frozen = built(
        make_config(kind, reservoirs=0, decoder_reservoirs=1, max_length=8, kernel=3).model
    )
    assert all(name.startswith("decoder/blocks/0/") for name in frozen)
    whole = jax.jit(model)(SOURCE, TARGET)
    context = jax.jit(model.encode)(SOURCE)
    cache, step = model.cache(len(TARGET), TARGET.shape[1], context), jax.jit(model.step)
    for index in range(TARGET.shape[1]):
        logits, cache = step(TARGET[:, index], cache, index, context)
        np.testing.assert_allclose(logits, whole[:, index], rtol=1e-4, atol=1e-4)


def test_placement_is_a_field_of_the_configuration(make_config):
    for placement, layers in (("bottom", {"0"}), ("top", {"2"}), ("RRL", {"0", "1"})):
        _, frozen = built(make_config("ffn", placement=placement).model)
        assert {name.split("/")[2] for name in frozen} == layers


# The ablations: frozen layers without orthogonal initialization, and trained layers with orthogonal initialization.

LAYER = "encoder/blocks/1/residuals/0/function"


def started(model) -> dict:
    """Returns {path: initial value} of the trainable variables."""
    made = translator(model, 13, 11, rngs=variables.ParamKeys(0))
    return {name: v.get_value() for name, v in variables.split(made).trainable.items()}


@pytest.mark.medium
def test_reservoir_trained_keeps_the_initialization(make_config):
    """The reservoir layer is trained from an orthogonal initialization. Other layers have the usual initialization."""
    for kind, kernel in (("ffn", "up"), ("transformer", "query")):
        model = make_config(kind, reservoir_trained=True, reservoir_gain=0.5).model
        validate(model)
        abstract_model = helpers.structure_of(model)
        assert not abstract_model.frozen
        frozen = helpers.structure_of(make_config(kind).model)
        assert abstract_model.paths.keys() == frozen.paths.keys()
        values = started(model)
        value = np.asarray(values[f"{LAYER}/{kernel}/kernel"])
        np.testing.assert_allclose(value @ value.T, 0.25 * np.eye(16), atol=1e-5)
        assert np.any(values[f"{LAYER}/{kernel}/bias"])
        assert not np.any(values[f"encoder/blocks/0/residuals/0/function/{'query'}/bias"])


def test_reservoir_init_and_gain(make_config):
    for init, gain in (("xavier", 1.0), ("normal", 2.0), ("orthogonal", 2.0)):
        model = make_config("ffn", reservoir_init=init, reservoir_gain=gain).model
        _, frozen = built(model)
        kernel = frozen[f"{LAYER}/up/kernel"]
        gram = kernel @ kernel.T
        assert np.allclose(gram, gain**2 * np.eye(16), atol=1e-5) == (init == "orthogonal")
        expected = {"xavier": (2 / (16 + 24)) ** 0.5, "normal": 2 / 4, "orthogonal": 2 / 24**0.5}
        assert kernel.std() == pytest.approx(expected[init], rel=0.1)


def test_init_orthogonal_applies_to_all_trained_layers(make_config):
    values = started(make_config("ffn", init="orthogonal").model)
    for stack, layer in (("encoder", 0), ("encoder", 2), ("decoder", 1)):
        kernel = np.asarray(values[f"{stack}/blocks/{layer}/residuals/0/function/out/kernel"])
        np.testing.assert_allclose(kernel @ kernel.T, np.eye(16), atol=1e-5)


def test_roberta_respects_init_and_reservoir_init():
    """By default, layers start with RoBERTa's normal distribution, whose standard deviation is 0.02.

    `model.init` replaces this distribution. Reservoirs, even if trained, have the distribution `model.reservoir_init`.
    """
    config = masked.tiny(masked.roberta("ffn"))
    config.model.update({"width": 16, "hidden": 24, "heads": 2, "max_length": 8})

    def kernels(**fields) -> list[np.ndarray]:
        model = ConfigDict({**config.model.to_dict(), **fields})
        validate(model)
        made = masked_lm(model, 13, rngs=variables.ParamKeys(0))
        values = variables.split(made).trainable
        names = [f"encoder/stack/blocks/{n}/residuals/{i}/function/up" for n, i in ((0, 1), (1, 0))]
        return [
            np.asarray(values[f"{n}/kernel"].get_value()) for n in names if f"{n}/kernel" in values
        ]

    (first,) = kernels()
    first_too, second = kernels(reservoir_trained=True)
    assert first.std() == pytest.approx(0.02, rel=0.1) == first_too.std()
    np.testing.assert_allclose(second @ second.T, np.eye(16), atol=1e-5)
    (first,) = kernels(init="orthogonal")
    np.testing.assert_allclose(first @ first.T, np.eye(16), atol=1e-5)


def test_invalid_initialization_fields_are_rejected(make_config):
    for reservoir, fields, message in (
        ("ffn", {"reservoir_init": "orthogonl"}, "did you mean orthogonal"),
        ("ffn", {"init": "xavier"}, "init='xavier': choose one of recipe"),
        ("ffn", {"reservoir_gain": 0.0}, "reservoir_gain must be above 0"),
        ("none", {"reservoir_trained": True}, "reservoir_trained=true needs reservoirs"),
    ):
        with pytest.raises(UserError, match=message):
            validate(make_config(reservoir, **fields).model)
    model = make_config("ffn", reservoir_trained=True).model
    model.backskip.estimator = "zero"
    with pytest.raises(UserError, match=r"needs frozen reservoirs, .*reservoir_trained=true"):
        validate(model)


def test_older_configurations_get_defaults(make_config):
    """An older configuration lacks newer fields, and calls the reward "own_rms" by its old name "norm"."""
    old = make_config("ffn").model
    with old.unlocked():
        for name in ("reservoir_init", "reservoir_gain", "reservoir_trained", "init"):
            del old[name]
    old.backskip.reward = "norm"
    filled = with_defaults(old)
    validate(filled)
    assert filled.reservoir_init == "orthogonal" and filled.backskip.reward == "own_rms"


@pytest.mark.parametrize("kind", RESERVOIRS)
def test_reservoir_hidden(make_config, kind: str):
    """`reservoir_hidden` sets the hidden size of every kind of reservoir: for a bigru, both directions together.

    Trained layers keep the model's hidden size.
    """
    model, frozen = built(make_config(kind, max_length=8, reservoir_hidden=40).model)
    shapes = {name.partition("function/")[2]: value.shape for name, value in frozen.items()}
    if kind == "bigru":
        assert shapes["forward/inputs/reset/kernel"] == (16, 20)
        assert shapes["backward/states/new/kernel"] == (20, 20)
        assert shapes["out/kernel"] == (40, 16)
    else:
        assert shapes["up/kernel"] == (16, 40)
    assert model.encoder.blocks[0].residuals[1].function.up.kernel.shape == (16, 24)
    assert np.all(np.isfinite(jax.jit(model)(SOURCE, TARGET)))


# LayerDrop.


class Counting(nnx.Module):
    """A block that adds 1 to its input."""

    def __call__(self, x_BLD, context, key=None):
        return x_BLD + 1


def depth_of(drop: float, key: jax.Array | None, layers: int = 8) -> jax.Array:
    blocks = [Counting() for _ in range(layers)]
    stack = Stack(blocks, None, skip_rate=drop)
    return stack(jnp.zeros((1, 1, 4)), Context(), key)[0, 0, 0]


def test_layerdrop_drops_at_its_rate_in_training_and_never_in_evaluation():
    """Over random keys, the number of kept layers has the mean and standard deviation of a binomial distribution."""
    depths = jax.jit(jax.vmap(lambda key: depth_of(0.25, key)))(
        jax.random.split(jax.random.key(0), 4000)
    )
    deviation = (8 * 0.25 * 0.75) ** 0.5
    assert abs(float(depths.mean()) - 6) < 4 * deviation / 4000**0.5
    assert abs(float(depths.std()) - deviation) < 0.06
    assert depth_of(0.25, None) == 8
    assert depth_of(0.0, jax.random.key(1)) == 8


@pytest.mark.medium
def test_dropped_layer_is_not_computed_and_gets_no_gradient(make_config):
    abstract_model = helpers.structure_of(make_config(layerdrop=0.5).model)
    values = helpers.random_values(abstract_model.trainable, 0)

    def loss(trainable, key):
        return jnp.sum(jnp.square(abstract_model.build(trainable, {})(SOURCE, TARGET, key)))

    gradient = jax.jit(jax.grad(loss))
    patterns = set()
    for seed in range(8):
        found = gradient(values, jax.random.key(seed))
        kernels = [f"encoder/blocks/{n}/residuals/1/function/up/kernel" for n in range(3)]
        patterns.add(tuple(bool(np.any(found[name])) for name in kernels))
        assert np.any(found["source_embed/table"])
    assert len(patterns) > 2
    assert "conditional" in gradient.lower(values, jax.random.key(0)).compile().as_text()


# Resume.


@pytest.mark.slow
def test_layerdrop_and_backskipping_resume_is_bit_exact(make_config, tmp_path):
    """A run that stops after 4 of 6 steps and resumes has the last checkpoint of an uninterrupted run."""
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
    for name, ends in (("whole", (6,)), ("stopped", (4, 6))):
        for end in ends:
            config.train.steps = end
            fit(config, tmp_path / name, mesh)
        meta = tmp_path / name / "checkpoints" / "latest" / "6" / "meta" / "metadata"
        sums.append(json.loads(meta.read_text())["checksum"])
    assert sums[0] == sums[1]


def test_reservoir_none_has_no_kind_and_misspelled_kinds_get_a_suggestion(make_config):
    assert find("none") is None
    with pytest.raises(UserError, match=r"choose one of none, transformer, .* did you mean ffn"):
        find("fnn")
