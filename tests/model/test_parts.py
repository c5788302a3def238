"""Layer normalization, positions, embeddings and activations against loops, and attention against JAX's attention."""

import math
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax._src import xla_bridge
from jax._src.cudnn import fused_attention_stablehlo as stablehlo

from common.model import attend as attend_module
from common.model.block import Context
from common.model.dropout import dropout, fold
from common.model.embed import Embed
from common.model.feed_forward import ACTIVATIONS, FeedForward
from common.model.norm import LayerNorm
from common.model.position import Learned, Sinusoidal
from tests.model import helpers


def test_layer_norm_matches_numpy():
    generator = np.random.default_rng(0)
    # With a large mean, the variance must not be a difference of large numbers.
    x = (100 + generator.standard_normal((5, 16))).astype(np.float32)
    layer = LayerNorm(16, rngs=nnx.Rngs(0))
    weights = {"scale": generator.standard_normal(16), "bias": generator.standard_normal(16)}
    layer.scale[...], layer.bias[...] = map(jnp.float32, (weights["scale"], weights["bias"]))
    np.testing.assert_allclose(
        layer(x), helpers.layer_norm(weights, x.astype(np.float64)), rtol=1e-3, atol=1e-4
    )


def test_layer_norm_initialisation_and_dtype():
    layer = LayerNorm(4, rngs=nnx.Rngs(0))
    y = layer(jnp.array([[1.0, 2.0, 3.0, 4.0]], jnp.bfloat16))
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        y.astype(jnp.float32), np.array([[-3, -1, 1, 3]]) / 5**0.5, rtol=0.01
    )
    # A constant row has variance 0; epsilon keeps the output finite.
    np.testing.assert_array_equal(layer(jnp.ones((1, 4))), np.zeros((1, 4)))


def test_sinusoidal_positions_match_a_loop():
    expected = helpers.positions(50, 12)
    np.testing.assert_allclose(Sinusoidal(12)(jnp.arange(50)), expected, atol=1e-5)
    np.testing.assert_allclose(Sinusoidal(12)(7 + jnp.arange(3)), expected[7:10], atol=1e-5)


def test_sinusoidal_positions_need_an_even_width():
    with pytest.raises(ValueError, match="even"):
        Sinusoidal(7)


def test_learned_positions_are_rows_of_a_trained_table():
    layer = Learned(100, 64, rngs=nnx.Rngs(0))
    table = np.asarray(layer.table[...])
    assert len(table) == 100
    assert table.std() == pytest.approx(64**-0.5, rel=0.05)
    np.testing.assert_array_equal(layer(jnp.array([3, 9])), table[[3, 9]])


@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "none"])
def test_embedding_scales_and_adds_positions(positions: str):
    layer = Embed(50, 16, rngs=nnx.Rngs(0), positions=positions, maximum=20)
    tokens = np.array([[3, 0, 4]])
    table = np.asarray(layer.table[...])
    assert np.all(table[0] == 0) and np.all(np.any(table[1:] != 0, axis=1))
    assert table[1:].std() == pytest.approx(1 / 4, rel=0.1)
    added = {
        "sinusoidal": lambda: helpers.positions(8, 16)[5:],
        "learned": lambda: np.asarray(layer.positions.table[...])[5:8],
        "none": lambda: 0.0,
    }[positions]()
    y = layer(tokens, jnp.float32, start=5)
    np.testing.assert_allclose(y, 4 * table[tokens] + added, atol=1e-5)
    assert layer(tokens, jnp.bfloat16).dtype == jnp.bfloat16
    np.testing.assert_allclose(layer.logits(y), y @ table.T, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("relu", lambda x: max(x, 0.0)),
        ("gelu", lambda x: x * 0.5 * (1 + math.erf(x / 2**0.5))),
        ("silu", lambda x: x / (1 + math.exp(-x))),
    ],
)
def test_activations(name: str, expected):
    x = np.linspace(-4, 4, 33)
    np.testing.assert_allclose(
        ACTIVATIONS[name](jnp.float32(x)), [expected(v) for v in x], atol=1e-6
    )
    layer = FeedForward(4, 8, rngs=nnx.Rngs(0), activation=name)
    inner = np.asarray(layer.up(jnp.ones((1, 1, 4))))
    hidden = np.vectorize(expected)(inner)
    np.testing.assert_allclose(
        layer(jnp.ones((1, 1, 4)), Context()), hidden @ layer.down.kernel[...], atol=1e-5
    )


@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 3), (True, 6)])
@pytest.mark.parametrize("padded", [False, True])
def test_blockwise_attention_equals_attention(monkeypatch, causal, window, padded):
    """Values and gradients equal JAX's attention for 11 queries. Causal attention computes blocks of 4.

    Windows are shorter or longer than a block.
    """
    monkeypatch.setattr(attend_module, "BLOCK", 4)
    random = np.random.default_rng(8)
    query, key, value, weight = (
        jnp.asarray(random.normal(size=(2, 11, 3, 5)), jnp.float32) for _ in range(4)
    )
    lengths = jnp.array([9, 11]) if padded else None  # Every window has a key that is no padding.

    def ours(query, key, value):
        y = attend_module.attend(
            query, key, value, causal=causal, key_lengths_B=lengths, window=window
        )
        return (y * weight).sum(), y

    def theirs(query, key, value):
        y = jax.nn.dot_product_attention(
            query,
            key,
            value,
            is_causal=causal,
            key_value_seq_lengths=lengths,
            local_window_size=window and (window - 1, 0),
        )
        return (y * weight).sum(), y

    found, expected = (
        jax.jit(jax.grad(f, argnums=(0, 1, 2), has_aux=True))(query, key, value)
        for f in (ours, theirs)
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected
    )


def test_window_masks_keys_beyond_the_queries():
    """With 4 queries, 10 keys and a window of 5, query 0 attends to keys 0 to 4 only."""
    random = np.random.default_rng(8)
    query = jnp.asarray(random.normal(size=(1, 4, 1, 5)), jnp.float32)
    key, value = (jnp.asarray(random.normal(size=(1, 10, 1, 5)), jnp.float32) for _ in range(2))
    found, expected = (
        attend_module.attend(query[:, :1], key[:, :n], value[:, :n], window=window)
        for n, window in ((10, 5), (5, None))
    )
    whole = attend_module.attend(query, key, value, window=5)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    np.testing.assert_allclose(whole[:, :1], expected, rtol=1e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_dropout_equals_the_formula_with_the_same_mask(
    monkeypatch, causal, dtype, tolerance
):
    """Values and gradients equal (softmax(q k) * mask) v in float32, where each block of queries draws its own mask."""
    monkeypatch.setattr(attend_module, "BLOCK", 4)
    random = np.random.default_rng(8)
    arrays = (random.normal(size=(2, 11, 3, 8)) for _ in range(4))
    query, key, value, weight = (jnp.asarray(x, dtype) for x in arrays)
    drawn, rate = jax.random.key(3), 0.25
    mask_BHTS = np.zeros((2, 3, 11, 11), np.float32)
    for start, end, seen in attend_module.spans(11, 11, causal):
        ones = jnp.ones((2, 3, end - start, seen))
        mask_BHTS[:, :, start:end, :seen] = dropout(ones, rate, fold(drawn, start))

    def ours(query, key, value):
        y = attend_module.attend(query, key, value, causal=causal, dropout_rate=rate, key=drawn)
        return (y * weight).astype(jnp.float32).sum(), y

    def formula(query, key, value):
        logits_BHTS = jnp.einsum("bthk,bshk->bhts", query, key) * 8**-0.5
        if causal:
            logits_BHTS = jnp.where(jnp.tri(11), logits_BHTS, -jnp.inf)
        y = jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(logits_BHTS) * mask_BHTS, value)
        return (y * weight).sum(), y

    exact = (x.astype(jnp.float32) for x in (query, key, value))
    found = jax.jit(jax.grad(ours, argnums=(0, 1, 2), has_aux=True))(query, key, value)
    expected = jax.jit(jax.grad(formula, argnums=(0, 1, 2), has_aux=True))(*exact)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == dtype
        np.testing.assert_allclose(a.astype(jnp.float32), b, rtol=0, atol=tolerance * abs(b).max())


def test_backward_pass_of_softmax_keeps_only_the_rounded_weights():
    """Weights in float32 would raise the memory traffic of attention by half."""
    x = jax.ShapeDtypeStruct((2, 3, 11, 11), jnp.float32)
    backward = jax.eval_shape(
        lambda x: jax.vjp(lambda x: attend_module.softmax(x, jnp.bfloat16), x)[1], x
    )
    kept = [(array.shape, array.dtype) for array in jax.tree.leaves(backward)]
    assert kept == [(x.shape, jnp.bfloat16)]


@pytest.mark.parametrize("capability", ["8.6", "9.0", "10.0"])
@pytest.mark.parametrize(
    ("size", "queries", "keys"),
    [*((size, 4, 6) for size in (12, 16, 128, 132, 136, 256, 264)), (16, 3, 6), (16, 4, 5)],
)
def test_fused_kernel_is_used_for_the_shapes_that_jax_can_train(
    monkeypatch, size, queries, keys, capability
):
    """`attend` uses the kernel exactly where JAX can trace its gradient, on fake GPUs of three generations."""
    gpu = SimpleNamespace(compute_capability=capability)
    cuda = SimpleNamespace(platform_version="cuda")
    query, other = (jnp.ones((1, length, 1, size), jnp.bfloat16) for length in (queries, keys))
    kernel, asked = partial(jax.nn.dot_product_attention, implementation="cudnn"), []

    def trace(attention):
        gradient = jax.grad(lambda *heads: attention(*heads).astype(jnp.float32).sum())
        return jax.make_jaxpr(gradient)(query, other, other)

    with monkeypatch.context() as patch:
        patch.setattr(xla_bridge, "local_devices", lambda **_: [gpu])
        patch.setattr(xla_bridge, "get_backend", lambda: cuda)
        patch.setattr(stablehlo, "check_cudnn_version", lambda: 91100)
        try:
            trace(kernel)
            supported = True
        except NotImplementedError:
            supported = False
    monkeypatch.setattr(attend_module, "backend", lambda: "gpu")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda **_: [gpu])
    monkeypatch.setattr(
        jax.nn, "dot_product_attention", lambda q, k, v, **_: asked.append(q.shape) or q
    )
    trace(attend_module.attend)
    assert bool(asked) == supported


def test_large_heads_need_a_gpu_for_the_fused_kernel(monkeypatch):
    """`launch.plan` may compile for GPUs on a machine without a GPU. JAX then cannot look up whether the GPU supports
    large heads.
    """
    monkeypatch.setattr(attend_module, "backend", lambda: "gpu")
    x = jax.ShapeDtypeStruct((1, 4, 1, 136), jnp.bfloat16)
    assert "dot_general" in str(jax.make_jaxpr(attend_module.attend)(x, x, x))


@pytest.mark.parametrize("causal", [False, True])
def test_shared_keys_equal_repeated_keys(monkeypatch, causal):
    """Values and gradients do not change if keys and values are repeated for every query head."""
    monkeypatch.setattr(attend_module, "BLOCK", 4)
    random = np.random.default_rng(8)
    query, key, value = (
        jnp.asarray(random.normal(size=(2, 7, heads, 5)), jnp.float32) for heads in (6, 2, 2)
    )

    def loss(query, key, value, times):
        key, value = jnp.repeat(key, times, axis=2), jnp.repeat(value, times, axis=2)
        y = attend_module.attend(
            query, key, value, causal=causal, dropout_rate=0.25, key=jax.random.key(0)
        )
        return (y**2).sum()

    gradient = jax.jit(jax.value_and_grad(loss, (0, 1, 2)), static_argnums=3)
    found, expected = (gradient(query, key, value, times) for times in (1, 3))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected
    )


def test_shared_keys_are_not_repeated():
    """No operation of attention, forward or backward, has a result with keys or values for every query head."""
    query = jax.ShapeDtypeStruct((2, 7, 6, 5), jnp.float32)
    shared = jax.ShapeDtypeStruct((2, 13, 2, 5), jnp.float32)
    gradient = jax.grad(lambda *heads: attend_module.attend(*heads).sum(), (1, 2))
    program = str(jax.make_jaxpr(gradient)(query, shared, shared))
    assert "f32[2,2,13,5]" in program
    assert not any(shape in program for shape in ("[2,6,13,5]", "[2,6,5,13]", "[2,13,6,5]"))


def test_attention_over_padding_only_is_finite():
    x = jnp.ones((1, 3, 1, 2))
    y = attend_module.attend(x, x, x, key_lengths_B=jnp.array([0]))
    assert np.isfinite(np.asarray(y)).all()
