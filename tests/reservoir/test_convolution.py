"""Our dynamic convolution: outputs against explicit loops, decoding with a cache, and the receptive field."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from common.model.block import Context
from common.model.decode_cache import CacheSpec
from reservoir.convolution import DynamicConvolution

BATCH, LENGTH, WIDTH, HEADS = 2, 6, 8, 2


def made(taps: int, causal: bool) -> DynamicConvolution:
    return DynamicConvolution(WIDTH, HEADS, taps, rngs=nnx.Rngs(0), causal=causal)


def given() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((BATCH, LENGTH, WIDTH)).astype(np.float32)


def slowly(layer: DynamicConvolution, x_LD: np.ndarray, taps: int, causal: bool) -> np.ndarray:
    """Computes the convolution in float64 by loops over positions, heads and taps."""
    kernels = {
        name: (np.asarray(part.kernel[...], np.float64), part.bias)
        for name, part in (("enter", layer.enter), ("kernel", layer.kernel), ("leave", layer.leave))
    }

    def affine(name, x):
        kernel, bias = kernels[name]
        return x @ kernel + (0 if bias is None else np.asarray(bias[...], np.float64))

    entered = affine("enter", x_LD.astype(np.float64))
    v = entered[:, :WIDTH] / (1 + np.exp(-entered[:, WIDTH:]))
    y, size = np.zeros_like(v), WIDTH // HEADS
    before = taps - 1 if causal else taps // 2
    for t in range(len(v)):
        logits = affine("kernel", v[t]).reshape(HEADS, taps)
        for head in range(HEADS):
            weights = np.exp(logits[head]) / np.exp(logits[head]).sum()
            channels = slice(head * size, (head + 1) * size)
            for k in range(taps):
                if 0 <= t + k - before < len(v):
                    y[t, channels] += weights[k] * v[t + k - before, channels]
    return affine("leave", y)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("taps", [1, 3, 4, 9])
def test_convolution_equals_explicit_loops_and_ignores_padding(taps: int, causal: bool):
    layer, x = made(taps, causal), given()
    lengths = np.array([LENGTH, 4])
    found = layer(jnp.asarray(x), Context(lengths_B=jnp.asarray(lengths)))
    for row, length in enumerate(lengths):
        expected = slowly(layer, x[row, :length], taps, causal)
        np.testing.assert_allclose(found[row, :length], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("recent", [0, 2])
def test_decoding_matches_the_full_forward_pass(recent: int):
    """Holds for a cache of one array and a cache of two arrays (`recent` > 0), with and without prefill."""
    layer, x = made(3, causal=True), jnp.asarray(given())
    whole = layer(x, Context())
    room = CacheSpec(LENGTH, jnp.float32, recent)
    for read in (0, 2):
        cache = layer.cache(BATCH, room, Context())
        if read:
            cache = layer.prefill(x[:, :read], cache, Context())
        for index in range(read, LENGTH):
            y, cache = layer.step(x[:, index : index + 1], cache, jnp.int32(index), Context())
            np.testing.assert_allclose(y[:, 0], whole[:, index], rtol=1e-4, atol=1e-5)
            if recent and (index + 1 - read) % recent == 0:
                cache = cache.settled(recent)


@pytest.mark.parametrize("causal", [pytest.param(False, marks=pytest.mark.medium), True])
def test_receptive_field(causal: bool):
    layer, x = made(3, causal), jnp.asarray(given())
    seen = jax.jacobian(lambda x: layer(x, Context())[0, 3].sum())(x)
    reached = {int(n) for n in np.flatnonzero(np.abs(seen[0]).sum(-1))}
    assert reached == ({1, 2, 3} if causal else {2, 3, 4})


def test_invalid_arguments_are_rejected():
    with pytest.raises(ValueError, match="not divisible by 3 heads"):
        DynamicConvolution(WIDTH, 3, 7, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="decoding needs a causal convolution"):
        made(3, causal=False).cache(1, CacheSpec(4, jnp.float32), Context())
