"""Grouped attention against a slow reference, and decoding token by token against the full sequence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from common.model.attend import attend
from common.model.block import Context
from common.model.decode_cache import CacheSpec
from perception.grouped_attention import GroupedAttention
from perception.layers import RMSNorm, Rotary

WIDTH, HEADS, SIZE, LENGTH = 12, 4, 6, 7

KINDS = {
    "grouped": {"kv_heads": 2},
    "one for all, partly rotary": {"kv_heads": 1, "rotary": Rotary(4, 100.0)},
    "fused, normed, rotary": {
        "kv_heads": 2,
        "fused": True,
        "head_norm": 1e-6,
        "rotary": Rotary(6, 100.0),
    },
    "window, biases": {"kv_heads": 4, "window": 3, "biases": (True, True)},
    "both directions": {"kv_heads": 4, "causal": False},
}


def make(kind: str) -> GroupedAttention:
    options = {"kv_heads": HEADS, **KINDS[kind]}
    layer = GroupedAttention(WIDTH, HEADS, size=SIZE, rngs=nnx.Rngs(0), **options)
    generator = np.random.default_rng(0)
    for _, part in nnx.iter_modules(layer):
        for variable in vars(part).values():
            if isinstance(variable, nnx.Param):  # randomize biases and scales as well
                variable[...] = jnp.asarray(generator.normal(size=variable.shape), jnp.float32)
    return layer


def read(layer: GroupedAttention, x_LD: np.ndarray, length: int) -> np.ndarray:
    """Computes the attention output (L, D) head by head and query by query. Keys from `length` on are masked."""

    def affine(linear, x):
        bias = 0 if linear.bias is None else np.asarray(linear.bias[...], np.float64)
        return x @ np.asarray(linear.kernel[...], np.float64) + bias

    def norm(module, x):
        return x / np.sqrt(np.mean(x**2) + 1e-6) * np.asarray(module.scale[...], np.float64)

    def turn(x, position):
        x, rotary = x.copy(), layer.rotary
        half = rotary.rotated // 2
        for k in range(half):
            angle = position * rotary.theta ** (-2 * k / rotary.rotated)
            a, b = x[k], x[k + half]
            x[k] = a * np.cos(angle) - b * np.sin(angle)
            x[k + half] = a * np.sin(angle) + b * np.cos(angle)
        return x

    heads, kv = layer.heads, layer.kv_heads
    if layer.fused:
        all_ = affine(layer.qkv, x_LD).reshape(len(x_LD), -1, SIZE)
        query, keys, values = all_[:, :heads], all_[:, heads : heads + kv], all_[:, heads + kv :]
    else:
        parts = (layer.query, layer.key, layer.value)
        query, keys, values = (affine(p, x_LD).reshape(len(x_LD), -1, SIZE) for p in parts)
    out = np.zeros((len(x_LD), heads, SIZE))
    for h in range(heads):
        shared = h // (heads // kv)
        for t in range(len(x_LD)):
            q, seen, scores = query[t, h], [], []
            q = norm(layer.query_norm, q) if layer.head_norm else q
            q = turn(q, t) if layer.rotary else q
            for s in range(length):
                if (layer.causal and s > t) or (layer.window and s <= t - layer.window):
                    continue
                k = keys[s, shared]
                k = norm(layer.key_norm, k) if layer.head_norm else k
                k = turn(k, s) if layer.rotary else k
                seen.append(s)
                scores.append(q @ k / np.sqrt(SIZE))
            weights = np.exp(scores - np.max(scores))
            out[t, h] = weights @ values[seen, shared] / weights.sum()
    return affine(layer.out, out.reshape(len(x_LD), -1))


@pytest.mark.parametrize("kind", KINDS)
def test_attention_matches_slow_reference(kind: str) -> None:
    layer, length = make(kind), 5
    x_1LD = np.random.default_rng(1).normal(size=(1, LENGTH, WIDTH)).astype(np.float32)
    context = Context(lengths_B=jnp.asarray([length]))
    found = jax.jit(lambda x_1LD: layer(x_1LD, context))(x_1LD)[0]
    wanted = read(layer, x_1LD[0].astype(np.float64), length)
    np.testing.assert_allclose(found[:length], wanted[:length], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    "kind", [kind for kind, options in KINDS.items() if "causal" not in options]
)
def test_one_token_decoding_matches_full_sequence(kind: str) -> None:
    layer = make(kind)
    x_BLD = jax.random.normal(jax.random.key(2), (2, LENGTH, WIDTH))
    whole = jax.jit(lambda x_BLD: layer(x_BLD, Context()))(x_BLD)
    cache = layer.cache(2, CacheSpec(LENGTH, jnp.float32), Context())
    assert cache[0].recent.shape == (2, layer.kv_heads, SIZE, LENGTH)
    step = jax.jit(lambda x_B1D, cache, index: layer.step(x_B1D, cache, index, Context()))
    for index in range(LENGTH):
        y_B1D, cache = step(x_BLD[:, index : index + 1], cache, index)
        np.testing.assert_allclose(y_B1D[:, 0], whole[:, index], rtol=1e-4, atol=1e-4)


def test_rms_norm_divides_by_root_mean_square() -> None:
    layer = RMSNorm(4, rngs=nnx.Rngs(0), epsilon=0.0)
    layer.scale[...] = jnp.asarray([1.0, 2.0, 3.0, 4.0])
    y = layer(jnp.asarray([[[1.0, -1.0, 7.0, 7.0]]]))
    np.testing.assert_allclose(y[0, 0], np.asarray([1, -2, 21, 28]) / 5, rtol=1e-6)


def test_rotary_products_depend_only_on_distance() -> None:
    rotary = Rotary(8)
    q, k = np.random.default_rng(0).normal(size=(2, 1, 1, 1, 8)).astype(np.float32)

    def product(i: int, j: int) -> float:
        turned = rotary(jnp.asarray(q), jnp.asarray([i])), rotary(jnp.asarray(k), jnp.asarray([j]))
        return float(jnp.sum(turned[0] * turned[1]))

    assert product(3, 1) == pytest.approx(product(103, 101), rel=1e-3)
    assert product(3, 1) != pytest.approx(product(3, 2), rel=1e-2)


def test_attention_dropout_preserves_expectation() -> None:
    """The mean over many dropout masks equals the output without dropout."""
    x = jax.random.normal(jax.random.key(0), (1, 4, 2, 8))
    plain = attend(x, x, x)
    keys = jax.random.split(jax.random.key(1), 4000)
    drawn = jax.jit(jax.vmap(lambda key: attend(x, x, x, dropout_rate=0.25, key=key)))(keys)
    assert float(jnp.abs(drawn[0] - plain).max()) > 0.05
    np.testing.assert_allclose(drawn.mean(0), plain, atol=0.05)
    np.testing.assert_array_equal(attend(x, x, x, dropout_rate=0.25), plain)
