"""The matrix product with a custom gradient equals jnp's product and gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from common.model.linear import Linear, matmul


def plain(x: jax.Array, kernel: jax.Array, transposed: bool) -> jax.Array:
    return jnp.einsum("...d,fd->...f" if transposed else "...d,df->...f", x, kernel)


def operands(transposed: bool, shape: tuple[int, ...] = (2, 5, 6), outputs: int = 7) -> tuple:
    """Returns x, a kernel and a gradient of the result."""
    generator = np.random.default_rng(0)
    kernel = (outputs, shape[-1]) if transposed else (shape[-1], outputs)
    return tuple(
        jnp.asarray(generator.standard_normal(s), jnp.float32)
        for s in (shape, kernel, (*shape[:-1], outputs))
    )


def value_and_gradients(function, x, kernel, g) -> tuple:
    y, pull = jax.vjp(function, x, kernel)
    return y, *pull(g)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", [(2, 5, 6), (4, 6), (1, 1, 6), (1, 8)])
def test_matmul_and_gradients_match_jnp(transposed: bool, shape: tuple[int, ...]):
    # The last two shapes have a single row.
    x, kernel, g = operands(transposed, shape, outputs=8 if shape == (1, 1, 6) else 7)
    ours = value_and_gradients(lambda x, k: matmul(x, k, transposed), x, kernel, g)
    theirs = value_and_gradients(lambda x, k: plain(x, k, transposed), x, kernel, g)
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape and one.dtype == jnp.float32
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("transposed", [False, True])
def test_bfloat16_matmul_has_a_float32_kernel_gradient(transposed: bool):
    x, kernel, g = operands(transposed)
    ours = value_and_gradients(
        lambda x, k: matmul(x, k, transposed), x.astype(jnp.bfloat16), kernel, g
    )
    assert [a.dtype for a in ours] == [jnp.float32, jnp.bfloat16, jnp.float32]
    theirs = value_and_gradients(lambda x, k: plain(x, k, transposed), x, kernel, g)
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(one.astype(jnp.float32), other, rtol=0.02, atol=0.05)


@pytest.mark.parametrize("transposed", [False, True])
def test_bfloat16_kernel_gives_the_same_product(transposed: bool):
    """The products are equal to the bit, because a float32 kernel is cast to bfloat16."""
    x, kernel, g = operands(transposed)
    x, narrow = x.astype(jnp.bfloat16), kernel.astype(jnp.bfloat16)
    one, other = (
        value_and_gradients(lambda x, k: matmul(x, k, transposed), x, k, g)
        for k in (kernel, narrow)
    )
    assert other[2].dtype == jnp.bfloat16
    for a, b in zip(one[:2], other[:2], strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("transposed", [False, True])
def test_bfloat16_products_are_accumulated_and_returned_in_float32(transposed: bool):
    """The result and the weight gradient are 1 + 2^-12, which bfloat16 cannot represent."""
    small = 2.0**-12
    kernel = jnp.array([[1.0], [small]])
    kernel = kernel.T if transposed else kernel
    x = jnp.ones((1, 2, 2), jnp.bfloat16).at[0, 1].set(small)
    y, pull = jax.vjp(lambda x, k: matmul(x, k, transposed), x, kernel)
    assert y[0, 0, 0] == 1 + small
    _, dkernel = pull(jnp.ones((1, 2, 1)))
    np.testing.assert_array_equal(dkernel.reshape(-1), [1 + small, 1 + small])


def test_linear_adds_its_bias_and_keeps_the_dtype():
    layer = Linear(6, 7, ("embed", "mlp"), rngs=nnx.Rngs(0))
    x, _, _ = operands(False)
    layer.bias[...] = jnp.arange(7.0)
    np.testing.assert_allclose(
        layer(x), plain(x, layer.kernel[...], False) + np.arange(7), rtol=1e-5, atol=1e-5
    )
    assert layer(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16
    assert layer(x.astype(jnp.bfloat16), jnp.float32).dtype == jnp.float32


def test_linear_initialisation():
    layer = Linear(300, 100, (None, None), rngs=nnx.Rngs(0), bias_init=None)
    assert layer.bias is None
    bound = (6 / 400) ** 0.5
    kernel = np.asarray(layer.kernel[...])
    assert 0.99 * bound < kernel.max() <= bound and -bound <= kernel.min() < -0.99 * bound
    assert kernel.std() == pytest.approx(bound / 3**0.5, rel=0.02)
    assert layer(jnp.ones((1, 1, 300))).shape == (1, 1, 100)
