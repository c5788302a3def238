"""The spatial gating unit and the gMLP block for other models: outputs, padding, decoding, training, errors."""

import ast
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from scipy.special import erf

from common.errors import UserError
from gmlp_lm import GatedMLP, SpatialGating
from tests.tiny_runs import write_tiny_run

D, F, L = 6, 16, 7

X_BLD = np.random.default_rng(0).standard_normal((2, L, D)).astype(np.float32)
HIDDEN_BLF = np.random.default_rng(1).standard_normal((2, L, F)).astype(np.float32)


def randomize(module: nnx.Module) -> nnx.Module:
    """Draws every parameter at random, so that each parameter affects the output."""
    state, generator = nnx.state(module, nnx.Param), np.random.default_rng(2)
    nnx.update(module, jax.tree.map(lambda x: jnp.float32(generator.normal(size=x.shape)), state))
    return module


@pytest.fixture(scope="module")
def block() -> GatedMLP:
    return randomize(GatedMLP(D, F, L, heads=2, rngs=nnx.Rngs(0)))


def norm(x: np.ndarray, part: nnx.Module) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + 1e-5)
    return scaled * np.asarray(part.scale[...]) + np.asarray(part.bias[...])


def unit(x_BLF: np.ndarray, part: nnx.Module, spatial: nnx.Module, causal: bool) -> np.ndarray:
    """Computes the output (B, L, F / 2) of the spatial gating unit by loops (Liu et al., section 2.1)."""
    u, v = np.split(x_BLF, 2, axis=-1)
    v, gate = norm(v, part), np.zeros_like(u)
    weight, bias = np.asarray(spatial.weight[...]), np.asarray(spatial.bias[...])
    for channel in range(v.shape[-1]):
        head = channel * len(weight) // v.shape[-1]
        for m in range(v.shape[1]):
            seen = range(m + 1 if causal else v.shape[1])
            mixed = sum(weight[head, m, n] * v[:, n, channel] for n in seen)
            gate[:, m, channel] = mixed + bias[head, m]
    return u * gate


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [L, 4])
def test_spatial_gating_unit_matches_a_loop(causal: bool, length: int):
    made = randomize(SpatialGating(F, L, heads=2, causal=causal, rngs=nnx.Rngs(0)))
    x_BLF = HIDDEN_BLF[:, :length]
    expected = unit(x_BLF, made.norm, made.spatial, causal)
    np.testing.assert_allclose(made(x_BLF), expected, rtol=1e-4, atol=1e-4)


def test_gmlp_block_matches_a_loop(block):
    gated = block.gated
    hidden = norm(X_BLD, block.norm) @ np.asarray(gated.up.kernel[...]) + np.asarray(
        gated.up.bias[...]
    )
    hidden = hidden * (1 + erf(hidden / np.sqrt(2))) / 2
    y = unit(hidden, gated.norm, gated.spatial, causal=True)
    expected = X_BLD + y @ np.asarray(gated.down.kernel[...]) + np.asarray(gated.down.bias[...])
    np.testing.assert_allclose(block(X_BLD), expected, rtol=1e-4, atol=1e-3)


def test_new_unit_returns_the_first_half_of_its_input():
    made = SpatialGating(F, L, epsilon=0.0, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(made(HIDDEN_BLF), HIDDEN_BLF[..., : F // 2], rtol=1e-6)
    half = made(HIDDEN_BLF.astype(jnp.bfloat16))
    assert half.dtype == jnp.bfloat16


def test_a_bidirectional_block_ignores_padding():
    made = randomize(GatedMLP(D, F, L, causal=False, rngs=nnx.Rngs(0)))
    lengths_B = jnp.array([4, 4])
    changed_BLD = X_BLD.copy()
    changed_BLD[:, 4:] = 9.0
    found, expected = made(changed_BLD, lengths_B), made(X_BLD[:, :4])
    np.testing.assert_allclose(found[:, :4], expected, rtol=1e-4, atol=1e-4)
    assert not np.allclose(made(changed_BLD)[:, :4], expected, rtol=1e-2)


def test_decoding_equals_the_forward_pass(block):
    whole_BLD = block(X_BLD)
    first_BLD, cache = jax.jit(block.prefill)(X_BLD[:, :3], block.cache(batch=2))
    np.testing.assert_allclose(first_BLD, whole_BLD[:, :3], rtol=1e-4, atol=1e-3)
    step = jax.jit(block.step)
    for index in range(3, L):
        y_B1D, cache = step(X_BLD[:, index : index + 1], cache, index)
        np.testing.assert_allclose(y_B1D[:, 0], whole_BLD[:, index], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("cache", [None, 3, (), (None, ())])
def test_missing_cache_raises_error(cache, block):
    message = "the cache must come from the block's method cache, prefill or step, got .* batch=2"
    with pytest.raises(UserError, match=message):
        block.prefill(X_BLD, cache)
    with pytest.raises(UserError, match=message):
        block.step(X_BLD[:, :1], cache, 0)


def test_gmlp_block_trains_and_is_restored_from_nnx_split():
    made = GatedMLP(D, F, L, dropout=0.5, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(made, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        loss = lambda model: jnp.square(model(X_BLD) - X_BLD[:, ::-1]).mean()  # noqa: E731
        value, gradients = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradients)
        return value

    losses = [step(made, optimizer) for _ in range(30)]
    assert min(losses[-5:]) < 0.8 * losses[0]
    assert not np.allclose(made(X_BLD), made(X_BLD))  # dropout draws new masks
    made.eval()
    graphdef, trainable, rest = nnx.split(made, nnx.Param, ...)
    apply = jax.jit(lambda trainable, rest, x: nnx.merge(graphdef, trainable, rest)(x))
    other = GatedMLP(D, F, L, dropout=0.5, rngs=nnx.Rngs(7))
    other.eval()
    nnx.update(other, trainable)
    np.testing.assert_allclose(other(X_BLD), apply(trainable, rest, X_BLD), rtol=1e-5, atol=1e-5)


def test_integer_inputs_are_promoted_to_float32(block):
    whole_BLD = np.arange(2 * L * D).reshape(2, L, D) % 5
    output_BLD = block(whole_BLD)
    assert output_BLD.dtype == np.float32
    np.testing.assert_array_equal(output_BLD, block(whole_BLD.astype(np.float32)))


@pytest.mark.medium
def test_examples_run(capsys, tmp_path, monkeypatch):
    write_tiny_run("gmlp_lm", tmp_path)
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[2] / "gmlp_lm" / "PYTHON.md").read_text()
    names: dict = {}
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(code, "PYTHON.md", "exec"), names)
    *numbers, texts = capsys.readouterr().out.split(maxsplit=3)
    first, last, difference = map(float, numbers)
    assert len(ast.literal_eval(texts)) == 2
    assert last < 0.6 * first
    assert difference < 1e-4
