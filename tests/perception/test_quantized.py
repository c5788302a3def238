"""Quantized kernels: codes against a slow reference, error bounds, gradients, adapters and sharding."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from common import sharding, variables
from common.model.linear import Linear, matmul
from common.model.low_rank import Lora, adapt
from common.train import flops
from common.variables import Frozen
from perception.quantized import (
    BLOCK,
    KINDS,
    NF4,
    QuantizedKernel,
    dequantize,
    quantize,
    quantize_frozen,
)

INPUTS, OUTPUTS = 96, 24  # 96 inputs are a block and a half
LEVELS = {"int8": np.arange(-127, 128) / 127, "4bit": np.asarray(NF4)}


@pytest.fixture(scope="module")
def kernel() -> np.ndarray:
    values = np.random.default_rng(0).standard_normal((INPUTS, OUTPUTS)).astype(np.float32)
    values[:BLOCK, 3] = 0  # a block of zeros
    values[:, 5] *= 1e-6
    return values


def test_nf4_levels_are_normal_quantiles() -> None:
    """As in Dettmers et al., section 3: 0, eight levels above 0 and seven below.

    On each side of 0, the levels are normal quantiles at evenly spaced probabilities.
    """
    from scipy.stats import norm

    end = 1 - (1 / 30 + 1 / 32) / 2
    above, below = (norm.ppf(np.linspace(end, 0.5, count))[:-1] for count in (9, 8))
    levels = np.sort(np.concatenate([above, [0.0], -below]))
    np.testing.assert_allclose(NF4, levels / levels.max(), atol=5e-7)


def slowly(kernel: np.ndarray, kind: str) -> np.ndarray:
    """Rounds each value of a kernel (inputs, outputs) to the nearest level of its block.

    The levels are LEVELS times the block's largest absolute value. For "4bit_minimum", they are 16 evenly spaced levels
    from the block's minimum to its maximum.
    """
    found = np.zeros(kernel.shape)
    for column in range(kernel.shape[1]):
        for start in range(0, len(kernel), BLOCK):
            block = kernel[start : start + BLOCK, column].astype(np.float64)
            most = abs(block).max()
            if kind == "4bit_minimum":
                step = (block.max() - block.min()) / 15 or 1.0
                nearest = np.round((block - block.min()) / step)
                found[start : start + BLOCK, column] = block.min() + step * nearest
            elif most:
                nearest = abs(block[:, None] / most - LEVELS[kind]).argmin(1)
                found[start : start + BLOCK, column] = LEVELS[kind][nearest] * most
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_values_round_to_nearest_level_of_their_block(kernel: np.ndarray, kind: str) -> None:
    codes, scales = quantize(kernel, kind)
    back = dequantize(codes, scales, INPUTS)
    wanted, largest_N = slowly(kernel, kind), abs(kernel).max(0)
    assert (abs(back - wanted) <= 1e-5 * abs(wanted) + 1e-6 * largest_N).all()
    steps = np.asarray(scales) if scales.ndim == 2 else np.asarray(scales)[:, 0]
    most = np.repeat(steps, BLOCK, axis=0)[:INPUTS]
    bound = {"int8": 0.5 / 127, "4bit": max(np.diff(NF4)) / 2, "4bit_minimum": 0.5}[kind]
    assert (abs(back - kernel) <= bound * most * (1 + 1e-5) + 1e-6).all()
    # Quantization is idempotent.
    again, _ = quantize(back, kind)
    np.testing.assert_array_equal(again, codes)


def test_4bit_packs_two_values_per_byte() -> None:
    """A byte has value k of a block in its low bits, and value k + 32 in its high bits."""
    numbers = np.arange(BLOCK) % 16
    codes, scales = quantize(np.asarray(NF4, np.float32)[numbers][:, None], "4bit")
    assert codes.shape == (1, BLOCK // 2, 1) and codes.dtype == jnp.uint8 and scales[0, 0] == 1
    np.testing.assert_array_equal(codes[0, :, 0], numbers[:32] + 16 * numbers[32:])


@pytest.mark.parametrize(("kind", "bits"), [("int8", 8.5), ("4bit", 4.5), ("4bit_minimum", 5)])
def test_bits_per_weight(kind: str, bits: float) -> None:
    """Each block of 64 values has a scale of 32 bits and, in the format 4bit_minimum, a minimum of 32 bits."""
    found = quantize(jnp.zeros((2 * BLOCK, OUTPUTS)), kind)
    assert 8 * sum(x.nbytes for x in found) == bits * 2 * BLOCK * OUTPUTS


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_product_and_gradient_match_dequantized_kernel(
    kernel: np.ndarray, kind: str, dtype: jnp.dtype
) -> None:
    quantized = QuantizedKernel(nnx.Param(jnp.asarray(kernel), axes=("embed", "mlp")), kind)
    x = jax.random.normal(jax.random.key(0), (2, 3, INPUTS)).astype(dtype)

    def of(product) -> tuple:
        return jax.jit(jax.value_and_grad(lambda x: jnp.sum(jnp.sin(product(x)))))(x)

    wanted = of(lambda x: matmul(x, quantized[...]))
    for ours, theirs in zip(of(quantized), wanted, strict=True):
        rounding = 1e-2 if dtype == jnp.bfloat16 else 1e-5
        np.testing.assert_allclose(np.float32(ours), np.float32(theirs), rounding, rounding)


def test_backward_pass_stores_codes_not_kernel(kernel: np.ndarray) -> None:
    """The forward pass stores the input, the codes and the scales for the backward pass."""
    quantized = QuantizedKernel(nnx.Param(jnp.asarray(kernel), axes=("embed", "mlp")), "4bit")
    _, backward = jax.vjp(quantized, jnp.ones((8, INPUTS)))
    kept = [x for x in jax.tree.leaves(backward) if x.shape != (8, INPUTS)]
    assert quantized.codes.nbytes <= sum(x.nbytes for x in kept) <= kernel.nbytes / 4


def layers(kind: str | None) -> nnx.Module:
    """Returns a model of two frozen linear layers, the first with adapters, and a trained head.

    `kind` is the format of the frozen kernels; None means that they are not quantized.
    """
    model = nnx.Module()
    model.first = Linear(INPUTS, OUTPUTS, ("embed", "mlp"), rngs=nnx.Rngs(0))
    model.second = Linear(OUTPUTS, INPUTS, ("mlp", "embed"), rngs=nnx.Rngs(1))
    adapt(model, ("first",), Lora(rank=2, alpha=4), rngs=nnx.Rngs(2))
    model.head = Linear(INPUTS, 2, ("embed", None), rngs=nnx.Rngs(3))
    if kind:
        assert quantize_frozen(model, kind) == 2
    return model


def loss(model: nnx.Module, x: jax.Array) -> jax.Array:
    logits = model.head(model.second(jnp.tanh(model.first(x))))
    return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.int32(x[:, 0] > 0)).mean()


def arrays(some: dict) -> dict:
    return {name: v.get_value() for name, v in some.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_train_while_codes_stay_frozen(kind: str) -> None:
    abstract_model = variables.split(layers(kind))
    assert {n for n in abstract_model.frozen if n.startswith("first/")} == {
        *("first/bias", "first/kernel/codes", "first/kernel/scales")
    }
    assert {n.split("/")[0] for n in abstract_model.trainable} == {"first", "head"}
    trainable, frozen = arrays(abstract_model.trainable), arrays(abstract_model.frozen)
    before = {n: np.asarray(x).copy() for n, x in frozen.items()}
    x = jax.random.normal(jax.random.key(0), (64, INPUTS))
    of = jax.jit(jax.value_and_grad(lambda t, f: loss(abstract_model.build(t, f), x)))
    first, _ = of(trainable, frozen)
    for _ in range(20):
        _, gradients = of(trainable, frozen)
        trainable = jax.tree.map(lambda p, g: p - 0.3 * g, trainable, gradients)
    assert of(trainable, frozen)[0] < 0.8 * first
    for name, value in frozen.items():
        np.testing.assert_array_equal(value, before[name])


def test_quantization_adds_no_matrix_products() -> None:
    """The gradient has as many FLOPs with quantized kernels as with frozen float32 kernels."""
    x = jnp.ones((8, INPUTS))

    def operations(kind: str | None) -> int:
        abstract_model = variables.split(layers(kind))
        frozen = arrays(abstract_model.frozen)
        gradient = jax.grad(lambda t: loss(abstract_model.build(t, frozen), x))
        return flops.count(jax.make_jaxpr(gradient)(arrays(abstract_model.trainable)))

    assert operations("4bit") == operations("int8") == operations(None)


def test_quantized_parameters_are_counted_unpacked() -> None:
    plain, packed = (variables.split(layers(kind)) for kind in (None, "4bit"))
    assert variables.count(packed) == variables.count(plain)
    assert (
        sum(row[-1] for row in variables.count_by_group(packed)) == variables.count(plain)["total"]
    )


def test_merged_layer_uses_dequantized_kernel() -> None:
    first = layers("4bit").first
    first.lora_b[...] = jnp.ones_like(first.lora_b[...])
    wanted = np.asarray(first.kernel[...]) + 2 * np.asarray(first.lora_a[...]).sum(1)[:, None]
    np.testing.assert_allclose(first.merged(), wanted, rtol=1e-5, atol=1e-6)


def test_blocks_and_outputs_are_sharded() -> None:
    """An even number of blocks is sharded over two fsdp devices. An odd number is replicated over fsdp.

    Outputs are sharded over two tensor devices.
    """
    mesh = sharding.make_mesh({"fsdp": 2, "tensor": 2}, jax.devices()[:4])
    shapes = {}
    for blocks in (4, 3, 2):
        kernel = nnx.Param(jnp.ones((blocks * BLOCK - 32, OUTPUTS)), axes=("embed", "mlp"))
        quantized = QuantizedKernel(kernel, "4bit")
        assert isinstance(quantized.codes, Frozen)
        where = sharding.shardings({"c": quantized.codes, "s": quantized.scales}, mesh)
        placed = jax.device_put(quantized.codes[...], where["c"])
        shapes[blocks] = placed.addressable_shards[0].data.shape
        assert tuple(where["s"].spec) == (where["c"].spec[0], where["c"].spec[2])
    assert shapes == {4: (2, 32, 12), 3: (3, 32, 12), 2: (1, 32, 12)}
