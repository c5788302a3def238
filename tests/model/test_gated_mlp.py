"""Spatial maps and gated MLPs: outputs against loops over positions, causality, and decoding against full sequences."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from common.model.block import Context
from common.model.decode_cache import CacheSpec, settle
from common.model.gated_mlp import GatedMlp
from common.model.spatial import Spatial, causal_product
from gmlp_lm.maps import BlockLocal, Toeplitz
from gmlp_lm.tiny_attention import TinyAttention

N, D, F, WINDOW = 13, 8, 12, 4


def spatial(kind: str, heads: int = 1, **options) -> Spatial:
    rngs = nnx.Rngs(1)
    options |= {"rngs": rngs, "heads": heads, "epsilon": 5.0}  # Large weights make errors visible.
    match kind:
        case "toeplitz":
            return Toeplitz(N, **options)
        case "local":
            return BlockLocal(N, WINDOW, **options)
        case _:
            return Spatial(N, **options)


def model(kind: str, heads: int = 1, attention: bool = False) -> GatedMlp:
    window = WINDOW if kind == "local" else 0
    tiny_attention = partial(TinyAttention, D, 3, F // 2, rngs=nnx.Rngs(3), window=window)
    made = GatedMlp(
        D,
        F,
        spatial(kind, heads),
        rngs=nnx.Rngs(2),
        attention=tiny_attention if attention else None,
    )
    generator = np.random.default_rng(0)
    made.spatial.bias[...] = jnp.asarray(generator.normal(size=made.spatial.bias.shape))
    return made


def slow_map(part: Spatial, kind: str, values_BLF: np.ndarray) -> np.ndarray:
    """Computes the spatial map by a loop over weights."""
    weight, bias = np.asarray(part.weight[...]), np.asarray(part.bias[...])
    y = np.zeros_like(values_BLF)
    _, length, channels = values_BLF.shape
    for c in range(channels):
        head = c // (channels // part.heads)
        for m in range(length):
            y[:, m, c] = bias[head, m % part.rows()]
            for n in range(m + 1):
                match kind:
                    case "full":
                        w = weight[head, m, n]
                    case "toeplitz":
                        w = weight[head, m - n]
                    case _:
                        # The first WINDOW columns are the previous window, the other columns the current window.
                        column = n - m // WINDOW * WINDOW + WINDOW
                        w = weight[head, m % WINDOW, column] if column >= 0 else 0
                y[:, m, c] += w * values_BLF[:, n, c]
    return y


KINDS = ["full", "toeplitz", "local"]


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("length", [1, 4, 7, N])
@pytest.mark.parametrize("kind", KINDS)
def test_spatial_maps_match_a_reference_loop(kind, length, heads):
    part = spatial(kind, heads)
    values = np.random.default_rng(length).normal(size=(2, length, 6)).astype(np.float32)
    np.testing.assert_allclose(
        jax.jit(part)(values), slow_map(part, kind, values), rtol=2e-5, atol=1e-5
    )


@pytest.mark.parametrize("block", [1, 3, 5, 8, 100])
def test_causal_product_and_its_gradients(block, monkeypatch):
    monkeypatch.setattr("common.model.spatial.BLOCK", block)
    generator = np.random.default_rng(block)
    matrix = jnp.asarray(generator.normal(size=(8, 8)), jnp.float32)
    values = jnp.asarray(generator.normal(size=(8, 5)), jnp.float32)
    weights = jnp.asarray(generator.normal(size=(8, 5)), jnp.float32)

    def loss(product):
        return lambda m, v: jnp.sum(jnp.sin(product(m, v)) * weights)

    ours = jax.value_and_grad(loss(causal_product), (0, 1))
    dense = jax.value_and_grad(loss(lambda m, v: jnp.tril(m) @ v), (0, 1))
    found, expected = (jax.tree.leaves(jax.jit(f)(matrix, values)) for f in (ours, dense))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_causal_product_needs_little_more_than_half_the_flops():
    """At length 2048, XLA counts less than 0.6 of the dense product's FLOPs, forward and backward."""
    matrix = jax.ShapeDtypeStruct((2048, 2048), jnp.float32)
    values = jax.ShapeDtypeStruct((2048, 64), jnp.float32)

    def flops(product) -> float:
        both = jax.grad(lambda m, v: jnp.sum(product(m, v) ** 2), (0, 1))
        return jax.jit(both).lower(matrix, values).compile().cost_analysis()["flops"]

    assert flops(causal_product) < 0.6 * flops(lambda m, v: jnp.tril(m) @ v)


@pytest.mark.parametrize("attention", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_spatial_maps_and_attention_are_causal(kind, attention):
    """The gradient of the output at position m is 0 at inputs n > m, and not 0 at n = m.

    Without windows, it is not 0 at n < m either.
    """
    made = model(kind, attention=attention)
    x = jnp.asarray(np.random.default_rng(3).normal(size=(1, N, D)), jnp.float32)
    jacobian = jax.jit(jax.jacobian(lambda x: made(x, Context())))(x)[0, :, :, 0]  # (L, D, L, D)
    size = np.abs(np.asarray(jacobian)).sum((1, 3))
    assert (size[np.triu_indices(N, 1)] == 0).all()
    assert (np.diag(size) > 0).all()
    if kind != "local":
        assert (size[np.tril_indices(N)] > 0).all()


@pytest.mark.parametrize("recent", [pytest.param(0, marks=pytest.mark.medium), 3])
@pytest.mark.parametrize("attention", [False, True])
@pytest.mark.parametrize("heads", [pytest.param(1, marks=pytest.mark.medium), 2])
@pytest.mark.parametrize("kind", KINDS)
def test_decoding_steps_equal_the_forward_pass(kind, heads, attention, recent):
    """The cache is one array, or an array of past positions and an array of 3 recent positions."""
    made = model(kind, heads, attention)
    x = jnp.asarray(np.random.default_rng(4).normal(size=(2, N, D)), jnp.float32)
    whole = jax.jit(lambda x: made(x, Context()))(x)
    cache = made.cache(2, CacheSpec(N, jnp.float32, recent), Context())
    step = jax.jit(lambda x, cache, index: made.step(x, cache, index, Context()))
    for index in range(N):
        y, cache = step(x[:, index : index + 1], cache, index)
        np.testing.assert_allclose(y[:, 0], whole[:, index], rtol=1e-4, atol=1e-5)
        if recent and index in (0, 2, 5, 8, 11):
            cache = settle(cache, index - max(i for i in (-1, 0, 2, 5, 8, 11) if i < index))


def test_output_of_a_prefix_is_the_prefix_of_the_output():
    made = model("full", attention=True)
    x = jnp.asarray(np.random.default_rng(5).normal(size=(1, N, D)), jnp.float32)
    call = jax.jit(lambda x: made(x, Context()))
    np.testing.assert_allclose(call(x[:, :6]), call(x)[:, :6], rtol=1e-4, atol=1e-6)


def test_bidirectional_map_ignores_padding():
    made = GatedMlp(D, F, spatial("full", causal=False), rngs=nnx.Rngs(2))
    x = jnp.asarray(np.random.default_rng(6).normal(size=(1, 9, D)), jnp.float32)
    lengths = jnp.array([5])
    alone = made(x[:, :5], Context(lengths_B=lengths))
    changed = made(x.at[:, 5:].set(7.0), Context(lengths_B=lengths))
    np.testing.assert_allclose(made(x, Context(lengths_B=lengths))[:, :5], changed[:, :5])
    np.testing.assert_allclose(alone, changed[:, :5], rtol=1e-4, atol=1e-5)


def test_epsilon_0_starts_as_a_position_wise_feed_forward_layer():
    made = GatedMlp(D, F, Spatial(N, rngs=nnx.Rngs(0), epsilon=0.0), rngs=nnx.Rngs(2))
    x = jnp.asarray(np.random.default_rng(7).normal(size=(1, N, D)), jnp.float32)
    gated, _ = made._halves(x)
    np.testing.assert_allclose(made(x, Context()), made.down(gated), rtol=1e-6)


@pytest.mark.parametrize(
    ("fault", "make"),
    [
        (
            "hidden=14 must be a multiple of 4",
            lambda: GatedMlp(D, 14, spatial("full", 2), rngs=nnx.Rngs(0)),
        ),
        (
            "14 positions, but the spatial map has only 13",
            lambda: model("full")(jnp.zeros((1, 14, D)), Context()),
        ),
        (
            "needs a causal spatial map",
            lambda: GatedMlp(D, F, spatial("full", causal=False), rngs=nnx.Rngs(0)).cache(
                1, CacheSpec(4, jnp.float32), Context()
            ),
        ),
    ],
)
def test_invalid_arguments_raise_value_errors(fault, make):
    with pytest.raises(ValueError, match=fault):
        make()
