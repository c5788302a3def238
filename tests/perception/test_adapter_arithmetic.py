"""Adapter arithmetic: weighted sums, merging and unmerging, and quantized base weights."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from common import sharding, variables
from common.errors import UserError
from common.model.low_rank import Lora, adapt
from perception import quantized as quantization
from perception.adapter_arithmetic import Adapter, combine, merge, of_values
from perception.backbones import bert
from perception.model import backbone
from perception.quantized import dequantize, quantize, quantize_frozen

SHAPE = replace(bert(1, 16, 32, 2), vocabulary=50, learned=16, longest=16)
LORA = Lora(rank=2, alpha=6)
TOKENS, LENGTHS = jnp.arange(12).reshape(2, 6), jnp.asarray([6, 4])


def drawn(some: dict, seed: int) -> dict:
    generator = np.random.default_rng(seed)
    return {n: jnp.asarray(generator.normal(0, 0.2, v.shape), jnp.float32) for n, v in some.items()}


def adapted(lora: Lora, rngs: variables.ParamKeys) -> nnx.Module:
    model = backbone(SHAPE, rngs=rngs)
    adapt(model, SHAPE.targets, lora, rngs=rngs)
    return model


def adapter(seed: int, lora: Lora = LORA, base: str = "base") -> Adapter:
    """Returns a random adapter whose B is not 0."""
    trained = drawn(variables.abstract(partial(adapted, lora)).trainable, seed)
    return of_values({f"encoder/{n}": x for n, x in trained.items()}, lora, base)


@pytest.fixture(scope="module")
def abstract_model() -> variables.AbstractModel:
    return variables.abstract(lambda rngs: backbone(SHAPE, rngs=rngs))


@pytest.fixture(scope="module")
def base(abstract_model) -> dict:
    return drawn(abstract_model.trainable, 0)


def states(abstract_model: variables.AbstractModel, trainable: dict, frozen: dict) -> np.ndarray:
    run = jax.jit(lambda t, f: abstract_model.build(t, f)(TOKENS, LENGTHS))
    return np.asarray(run(trainable, frozen))


def changes(adapter: Adapter) -> dict[str, np.ndarray]:
    return {n: np.float64(a) @ np.float64(b) for n, (a, b) in adapter.layers.items()}


def test_merged_weights_match_base_plus_adapter(base, abstract_model) -> None:
    merged = merge(base, adapter(1))
    changed = {name for name in base if (merged[name] != base[name]).any()}
    assert len(changed) == 3 and all(name.endswith("/kernel") for name in changed)
    found = states(abstract_model, merged, {})
    with_adapter = variables.abstract(partial(adapted, LORA))
    wanted = states(with_adapter, drawn(with_adapter.trainable, 1), base)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    assert abs(found - states(abstract_model, base, {})).max() > 0.01


def test_unmerge_restores_base_weights(base) -> None:
    merged = merge(base, adapter(1))
    back = merge(merged, adapter(1), -1)
    assert any(abs(merged[name] - value).max() > 0.1 for name, value in base.items())
    for name, value in base.items():
        np.testing.assert_allclose(back[name], value, atol=1e-6)


def test_weighted_sum_of_adapters_is_exact() -> None:
    """The adapters have ranks 2 and 3 and scales (alpha / rank) 3 and 2. The sum has rank 5."""
    one, other = adapter(1), adapter(2, Lora(rank=3, alpha=6))
    both = combine([(one, 0.5), (other, -2.0)])
    assert (one.rank, other.rank, both.rank) == (2, 3, 5)
    first, second = changes(one), changes(other)
    for name, change in changes(both).items():
        np.testing.assert_allclose(change, 0.5 * first[name] - 2 * second[name], atol=1e-6)


def test_adapter_plus_its_negative_restores_the_base(base) -> None:
    nothing = combine([(adapter(1), 1.0), (adapter(1), -1.0)])
    for name, value in merge(base, nothing).items():
        np.testing.assert_allclose(value, base[name], atol=1e-6)


def test_combine_keeps_layers_of_only_one_adapter() -> None:
    one, other = adapter(1), adapter(2)
    name = next(iter(one.layers))
    part = Adapter("base", {name: other.layers[name]})
    both = combine([(one, 1.0), (part, 1.0)])
    assert both.layers.keys() == one.layers.keys()
    assert [a.shape[1] for a, _ in both.layers.values()] == [4, 2, 2]


def test_incompatible_adapters_and_weights_raise_errors(base) -> None:
    with pytest.raises(
        UserError,
        match=r"^--adapters: adapter 1 and adapter 2 were trained on different base weights",
    ):
        combine([(adapter(1), 1.0), (adapter(1, base="another"), 1.0)], "--adapters")
    fewer = {n: x for n, x in base.items() if "up" not in n}
    with pytest.raises(
        UserError, match=r"^--adapter=A changes .*up, which is missing in --pretrained=B"
    ):
        merge(fewer, adapter(1), names=("--adapter=A", "--pretrained=B"))
    wider = {n: jnp.ones((99, 3)) for n in base}
    with pytest.raises(UserError, match=r"fits a kernel of shape \(16, 16\), but .*99"):
        merge(wider, adapter(1))


def test_load_frozen_quantizes_one_kernel_at_a_time(base) -> None:
    def build(rngs: variables.ParamKeys) -> nnx.Module:
        model = adapted(LORA, rngs)
        quantize_frozen(model, "4bit")
        return model

    mesh, asked = sharding.make_mesh({"fsdp": 2, "tensor": 2}, jax.devices()[:4]), []

    def read(wanted: dict) -> dict:
        asked.append(list(wanted))
        assert all(v.shape == base[n].shape and v.dtype == jnp.float32 for n, v in wanted.items())
        return {n: jax.device_put(base[n], v.sharding) for n, v in wanted.items()}

    frozen = variables.abstract(build).frozen
    values = quantization.load_frozen(read, frozen, mesh)
    where = sharding.shardings(frozen, mesh)
    assert {n: (x.shape, x.dtype, x.sharding) for n, x in values.items()} == {
        n: (v.shape, v.dtype, where[n]) for n, v in frozen.items()
    }
    kernels = [name for name in base if name.endswith("/kernel")]
    assert sorted(map(tuple, asked[1:])) == sorted((name,) for name in kernels)
    for name in kernels:
        wanted = quantize(base[name], "4bit")
        np.testing.assert_array_equal(values[f"{name}/codes"], wanted[0])
        np.testing.assert_array_equal(values[f"{name}/scales"], wanted[1])


def test_quantization_cost_in_bytes_and_relative_error(base) -> None:
    read = lambda wanted: {name: base[name] for name in wanted}  # noqa: E731
    found = {cost.name: cost for cost in quantization.costs(read, base, "4bit")}
    assert found.keys() == {name for name in base if name.endswith("/kernel")}
    for name, cost in found.items():
        kernel = base[name]
        error = np.asarray(dequantize(*quantize(kernel, "4bit"), len(kernel))) - kernel
        wanted = np.linalg.norm(error) / np.linalg.norm(kernel)
        assert cost.error == pytest.approx(wanted, rel=1e-4) and 0.01 < cost.error < 0.15
        # Each output has 16 or 32 inputs, padded to one block of 64: 32 bytes of codes and 4 bytes of scale.
        assert (cost.before, cost.after) == (kernel.nbytes, (32 + 4) * kernel.shape[1])
