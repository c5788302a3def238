"""Warm start of a transformer's output layer with the explicit solution."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from common import variables
from common.config import load
from common.data.batches import in_order
from common.errors import UserError
from common.model import transformer
from common.model.block import Context
from common.model.embed import Embed
from common.model.linear import Linear
from common.model.loss import cross_entropy
from common.sharding import make_mesh
from common.train.state import initial_params
from common.train.task import ModelState
from configs import explicit
from explicit_opt.digits import Digits
from explicit_opt.output import warm_start
from explicit_opt.solution import explicit_solution
from reservoir.attention_blocks import encoder_block

CLASSES, LENGTH, EXAMPLES = 5, 6, 240


class Classifier(nnx.Module):
    """Two transformer encoder blocks, the mean over positions, and a linear output layer."""

    def __init__(self, bias: bool, *, rngs: nnx.Rngs):
        model = load("configs/wmt_transformer.py:tiny").model
        model.dropout, model.dtype = 0.0, "float32"
        self.embed = Embed(30, model.width, rngs=rngs)
        blocks = [encoder_block(model, rngs=rngs) for _ in range(2)]
        self.encoder = transformer.stack(model, blocks, rngs=rngs)
        axes = ("embed", "vocab")
        options = {} if bias else {"bias_init": None}
        self.output = Linear(model.width, CLASSES, axes, rngs=rngs, **options)

    def features(self, tokens_BL: jax.Array) -> jax.Array:
        x_BLD = self.embed(tokens_BL, jnp.float32)
        return self.encoder(x_BLD, Context()).mean(1)

    def __call__(self, tokens_BL: jax.Array) -> jax.Array:
        return self.output(self.features(tokens_BL))


class Topics:
    """A task: classifies texts. A text of class c draws each token from 6 c to 6 c + 5 with probability 0.7, and
    otherwise from all 30 tokens.
    """

    def __init__(self, bias: bool = True):
        self.bias = bias
        generator = np.random.default_rng(0)
        self.targets = generator.integers(0, CLASSES, EXAMPLES).astype(np.int32)
        own = self.targets[:, None] * 6 + generator.integers(0, 6, (EXAMPLES, LENGTH))
        other = generator.integers(0, 30, (EXAMPLES, LENGTH))
        chosen = np.where(generator.uniform(size=other.shape) < 0.7, own, other)
        self.tokens = chosen.astype(np.int32)

    def build(self, rngs):
        return Classifier(self.bias, rngs=rngs)

    def loss(self, model, batch, key):
        loss_B = cross_entropy(model(batch["tokens"]), batch["targets"]) * batch["weights"]
        return loss_B.sum(), batch["weights"].sum()

    def gather(self, ids_B):
        at_B = np.maximum(ids_B, 0)
        weights = (ids_B >= 0).astype(np.float32)
        return {"tokens": self.tokens[at_B], "targets": self.targets[at_B], "weights": weights}

    def batches(self, rows=32):
        return in_order(self.gather, EXAMPLES, rows)


def values_of(task, devices=1) -> ModelState:
    mesh = make_mesh({"data": devices}, jax.devices()[:devices])
    abstract_model = variables.abstract(task.build)
    return ModelState(abstract_model, initial_params(task, abstract_model, 1, mesh), {}, mesh)


def loss_of(task, values, trainable) -> float:
    batch = task.gather(np.arange(EXAMPLES))
    total, weight = task.loss(values.abstract_model.build(trainable, values.frozen), batch, None)
    return float(total / weight)


@pytest.mark.medium
@pytest.mark.parametrize("devices", [1, 8])
def test_warm_start_sets_output_layer_to_explicit_solution(devices):
    task = Topics()
    values = values_of(task, devices)
    started = warm_start(task, values, "output", task.batches(40))

    h_EM = np.asarray(values.abstract_model.build(values.trainable, {}).features(task.tokens))
    low_M = np.minimum(h_EM.min(0), 0)
    assert low_M.min() < 0
    expected = explicit_solution(h_EM - low_M, task.targets)
    np.testing.assert_allclose(started["output/kernel"], expected, atol=2e-5)
    np.testing.assert_allclose(started["output/bias"], -low_M @ np.asarray(expected), rtol=1e-4)
    changed = {n for n in started if not np.array_equal(started[n], values.trainable[n])}
    assert changed == {"output/kernel", "output/bias"}


@pytest.mark.medium
def test_warm_start_has_lower_loss_than_random_start():
    task = Topics()
    values = values_of(task)
    started = warm_start(task, values, "output", task.batches())
    assert loss_of(task, values, started) < 0.8 * loss_of(task, values, values.trainable)


def test_warm_start_handles_short_last_batch():
    task = Topics()
    values = values_of(task)
    whole = warm_start(task, values, "output", task.batches(EXAMPLES))
    parts = warm_start(task, values, "output", task.batches(100))
    np.testing.assert_allclose(whole["output/kernel"], parts["output/kernel"], atol=1e-5)


def test_nonnegative_features_need_no_bias():
    config = explicit.tiny_digits(explicit.mnist())
    config.model.layers = 2
    task = Digits(config, make_mesh({"data": 1}, jax.devices()[:1]))
    values = values_of(task)
    first, second = task.solution()
    below = ModelState(
        values.abstract_model, {**values.trainable, "layers/0/kernel": first}, {}, values.mesh
    )
    batches = in_order(task._gather("train"), len(task.splits["train"][1]), 256)
    started = warm_start(task, below, "layers/1", batches)
    np.testing.assert_allclose(started["layers/1/kernel"], second, atol=1e-4)


@pytest.mark.parametrize(
    ("layer", "bias", "batches", "message"),
    [
        ("head", True, 1, "no trainable layer 'head' with a kernel: choose one of encoder/"),
        ("output", False, 1, "layer output has negative input features, so the explicit"),
        ("output", True, 0, "no example has a weight above 0"),
    ],
)
def test_warm_start_errors_name_the_cause(layer, bias, batches, message):
    task = Topics(bias)
    values = values_of(task)
    with pytest.raises(UserError, match=message):
        warm_start(task, values, layer, list(task.batches())[:batches])


def test_layer_that_the_loss_never_calls_raises_error():
    class Unused(Topics):
        def build(self, rngs):
            model = super().build(rngs)
            model.unused = Linear(LENGTH, CLASSES, ("embed", "mlp"), rngs=rngs)
            return model

    task = Unused()
    with pytest.raises(UserError, match="the task's loss never calls the layer 'unused': choose"):
        warm_start(task, values_of(task), "unused", task.batches())


def test_nan_feature_raises_error():
    task = Topics()
    task.tokens[-1] = 0
    values = values_of(task)
    table = values.trainable["embed/table"].at[0].set(np.nan)
    values = dataclasses.replace(values, trainable={**values.trainable, "embed/table": table})
    with pytest.raises(UserError, match="NaN or infinite"):
        warm_start(task, values, "output", task.batches())
