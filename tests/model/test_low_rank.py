"""LoRA adapters: no change at initialization, low-rank change of the kernel, dropout, and targets."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from common import variables
from common.model.low_rank import Lora, LoraLinear, adapt
from perception.backbones import BACKBONES
from perception.model import backbone

SHAPE = BACKBONES["tiny_qwen2"]


def adapted(lora: Lora) -> nnx.Module:
    model = backbone(SHAPE, rngs=nnx.Rngs(0))
    adapt(model, SHAPE.targets, lora, rngs=nnx.Rngs(1))
    return model


def test_new_adapter_does_not_change_the_output() -> None:
    tokens, lengths = jnp.arange(12).reshape(2, 6), jnp.asarray([6, 4])
    model = adapted(Lora(rank=4, alpha=4))
    plain = jax.jit(backbone(SHAPE, rngs=nnx.Rngs(0)))(tokens, lengths)
    np.testing.assert_array_equal(jax.jit(model)(tokens, lengths), plain)
    abstract_model = variables.split(model)
    assert all(name.endswith(("lora_a", "lora_b")) for name in abstract_model.trainable)
    assert len(abstract_model.trainable) == 2 * 3 * SHAPE.layers
    assert not abstract_model.seed_initialised  # Frozen values are loaded, not drawn from a seed.
    # As in peft, A is uniform in [-1/sqrt(inputs), 1/sqrt(inputs)], and B is 0.
    for name, value in abstract_model.trainable.items():
        most = float(jnp.abs(value[...]).max())
        bound = value.shape[0] ** -0.5 if name.endswith("lora_a") else 0.0
        assert 0.9 * bound <= most <= bound


@pytest.mark.parametrize("stabilized", [False, True])
def test_adapter_equals_a_changed_kernel(stabilized: bool) -> None:
    model = adapted(Lora(rank=4, alpha=6, stabilized=stabilized))
    layer = model.stack.blocks[0].residuals[0].function.query
    assert isinstance(layer, LoraLinear)
    layer.lora_b[...] = jax.random.normal(jax.random.key(3), layer.lora_b.shape)
    layer.bias.set_value(jax.random.normal(jax.random.key(4), layer.bias.shape))
    x = jax.random.normal(jax.random.key(5), (2, 3, SHAPE.width))
    scale = 6 / 2 if stabilized else 6 / 4
    change = scale * np.asarray(layer.lora_a[...], np.float64) @ np.asarray(layer.lora_b[...])
    kernel = np.asarray(layer.kernel[...], np.float64) + change
    wanted = np.asarray(x, np.float64) @ kernel + np.asarray(layer.bias[...])
    np.testing.assert_allclose(layer(x), wanted, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(layer.merged(), kernel, rtol=1e-5, atol=1e-5)


def test_dropout_affects_only_the_adapter() -> None:
    model = adapted(Lora(rank=4, alpha=4, rate=0.5))
    layer = model.stack.blocks[0].residuals[0].function.query
    x, key = jax.random.normal(jax.random.key(5), (2, 3, SHAPE.width)), jax.random.key(6)
    np.testing.assert_array_equal(layer(x, key=key), layer(x))  # B is 0
    layer.lora_b[...] = jax.random.normal(jax.random.key(3), layer.lora_b.shape)
    assert float(jnp.abs(layer(x, key=key) - layer(x)).max()) > 0.01


def test_targets_match_whole_names() -> None:
    model = backbone(SHAPE, rngs=nnx.Rngs(0))
    adapt(model, ("ate", "function/down"), Lora(), rngs=nnx.Rngs(1))
    adapters = [part for _, part in nnx.iter_modules(model) if isinstance(part, LoraLinear)]
    assert len(adapters) == SHAPE.layers
