"""Trainable and frozen parameters of a model, their values and dtypes, without training."""

from dataclasses import replace
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from ml_collections import ConfigDict

from common import variables
from common.freezing import draw_frozen
from common.sharding import place, shardings
from configs import perception as recipes
from perception.backbones import BACKBONES
from perception.finetuning import (
    make_model,
    make_shape,
    reinitialized,
    resolve,
)
from perception.hugging_face import open_model
from perception.model import PooledClassifier, backbone
from perception.pretrained import pretrained_weights, start
from tests.perception.conftest import LORA
from tests.perception.helpers import SHAPE


def abstract_model(config: ConfigDict, shape=SHAPE) -> variables.AbstractModel:
    return variables.abstract(lambda rngs: make_model(config, shape, 6, rngs=rngs))


def test_frozen_matrices_are_cast_to_compute_dtype(make, mesh, pretrained, weights):
    """Frozen matrices are cast to bfloat16. Norms, biases and seed-initialised tables stay float32."""
    config = make(**LORA, reinitialize="embed/positions/table", **{"model.dtype": "bfloat16"})
    found = abstract_model(config)
    values = pretrained_weights(open_model(pretrained), mesh)(found).values
    assert set(values) == {n for n in found.frozen if "positions" not in n}
    for name, value in values.items():
        wanted = weights[name.removeprefix("encoder/")]
        assert value.dtype == (jnp.bfloat16 if wanted.ndim == 2 else jnp.float32)
        np.testing.assert_array_equal(value, wanted.astype(value.dtype))
    assert found.frozen["encoder/embed/positions/table"].dtype == jnp.float32
    assert all(variable.dtype == jnp.float32 for variable in found.trainable.values())


@pytest.mark.parametrize(
    ("backbone", "expected"),
    [
        *(("qwen2_1.5b", "bfloat16"), ("openelm_3b", "bfloat16")),
        *(("qwen2_0.5b", "float32"), ("arctic_l", "float32"), ("auto", "auto")),
    ],
)
def test_paper_recipe_uses_authors_dtypes(backbone, expected):
    config = recipes.get_config("paper")
    config.backbone = backbone
    assert resolve(config).model.dtype == expected
    assert resolve(recipes.get_config()).model.dtype == "auto"
    config.model.dtype = "float32"
    assert resolve(config).model.dtype == "float32"


def test_head_run_trains_only_the_head(make):
    found = abstract_model(make(finetune="head"))
    assert set(found.trainable) == {"head/kernel", "head/bias"}
    assert found.frozen and not found.seed_initialised


def test_paper_recipe_freezes_head_and_reinitialises_positions(make):
    """LoRA freezes the random head and reinitialises the position table, which gets max_length rows, here 1024.

    Full training freezes nothing.
    """
    config = make("paper,tiny", finetune="lora", **{"data.max_length": 1024})
    shape = make_shape(config, SimpleNamespace(shape=SHAPE), 300)
    assert shape.learned == 1024
    found = abstract_model(config, shape)
    assert all("lora_" in name for name in found.trainable)
    drawn = draw_frozen(found, 1)
    assert set(drawn) == {"head/kernel", "head/bias", "encoder/embed/positions/table"}
    table, kernel = drawn["encoder/embed/positions/table"], drawn["head/kernel"]
    assert table.shape == (1024, 16) and table.std() == pytest.approx(0.02, rel=0.05)
    assert 0.9 / 32**0.5 < np.abs(kernel).max() <= 1 / 32**0.5
    config.finetune = "full"
    assert not abstract_model(config, shape).frozen
    config.finetune = "full_pretrained"
    assert not abstract_model(config, shape).frozen


def test_full_pretrained_reinitialises_and_trains_authors_tables(make, mesh, pretrained):
    config = make(finetune="full_pretrained", reinitialize="authors")
    kinds = abstract_model(config).trainable
    drawn = place(
        {n: np.zeros(v.shape, np.float32) for n, v in kinds.items()}, shardings(kinds, mesh)
    )
    found = start(config, open_model(pretrained), drawn)
    assert {n for n, x in found.items() if x is drawn[n]} == {
        *("encoder/embed/positions/table", "head/kernel", "head/bias")
    }


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tiny_qwen2", ("embed/table",)),
        ("tiny_phi", ("embed/table",)),
        ("tiny_bert", ("embed/positions/table",)),
        ("tiny_openelm", ()),
        ("tiny_mistral", ()),
    ],
)
def test_reinitialised_tables_by_family(make, name, expected):
    config = make(finetune="lora", reinitialize="authors")
    family = BACKBONES[name].family
    assert reinitialized(config, family) == expected
    config.reinitialize = "embed/table authors"
    assert reinitialized(config, family)[0] == "embed/table"


class States(nnx.Module):
    """An encoder that always returns the hidden states STATES_BLD, also at padding."""

    def __call__(self, tokens_BL, lengths_B, key=None, types_BL=None):
        return STATES_BLD.astype(jnp.bfloat16)


STATES_BLD = np.arange(2 * 4 * 3, dtype=np.float32).reshape(2, 4, 3)


@pytest.mark.parametrize("pool", ["masked", "authors"])
def test_pooled_features_are_mean_and_last_state(pool):
    """The texts have 3 tokens and 1 token. The pool "masked" averages over these tokens and appends the last state.

    The pool "authors" does the same with all 4 positions, including the padding.
    """
    model = PooledClassifier(States(), 3, 5, pool, rngs=nnx.Rngs(0))
    lengths = (3, 1) if pool == "masked" else (4, 4)
    wanted_BE = np.stack(
        [
            np.concatenate([x_LD[:n].mean(0), x_LD[n - 1]])
            for x_LD, n in zip(STATES_BLD, lengths, strict=True)
        ]
    )
    given = jnp.zeros((2, 4), jnp.int32), jnp.asarray([3, 1])
    np.testing.assert_allclose(model.pooled(*given), wanted_BE, rtol=1e-6)
    logits_BN = wanted_BE @ model.head.kernel[...] + model.head.bias[...]
    np.testing.assert_allclose(model(*given), logits_BN, rtol=1e-5)
    assert model(*given).dtype == jnp.float32


def test_dropout_rate_override(make):
    config, own = make(), replace(SHAPE, dropout=(0.1, 0.2, 0.3))
    pretrained = SimpleNamespace(shape=own)
    assert make_shape(config, pretrained, 300).dropout == own.dropout
    config.model.dropout = 0.25
    assert make_shape(config, pretrained, 300).dropout == (0.25, 0.25, 0.25)


def std(values: dict, end: str) -> float:
    """Returns the standard deviation of all parameters whose path ends with `end`."""
    found = [np.asarray(x[...]).ravel() for n, x in values.items() if n.endswith(end)]
    return np.concatenate(found).std()


@pytest.mark.medium
@pytest.mark.parametrize("name", ["tiny_bert", "tiny_openelm"])
def test_initialization_matches_published_models(name):
    """BERT's weights have the standard deviation 0.02, and the row of the padding token is 0.

    In OpenELM, the standard deviation is M ** -0.5 for a matrix with M inputs, width ** -0.5 for the embedding table,
    and (2 * layers * width) ** -0.5 for output projections, whatever their number of inputs.
    """
    shape = BACKBONES[name]
    values = variables.split(backbone(shape, rngs=nnx.Rngs(0))).trainable
    wanted = {"embed/table": 0.02, "function/up/kernel": 0.02, "function/out/kernel": 0.02}
    if name == "tiny_openelm":
        residual = (2 * shape.layers * shape.width) ** -0.5
        wanted = {"embed/table": shape.width**-0.5, "function/up/kernel": shape.width**-0.5}
        wanted |= {"function/out/kernel": residual, "function/down/kernel": residual}
    for end, deviation in wanted.items():
        assert std(values, end) == pytest.approx(deviation, rel=0.05), end
    for path, value in values.items():
        if path.endswith(("bias", "scale")):
            assert (value[...] == path.endswith("scale")).all()
    if name == "tiny_bert":
        assert not values["embed/table"][0].any() and values["embed/table"][1].any()
        assert std(values, "embed/positions/table") == pytest.approx(0.02, rel=0.05)
