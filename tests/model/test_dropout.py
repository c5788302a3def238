"""Dropout with rates that are rounded to multiples of 1/256."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from common.model.dropout import dropout, fold

KEY = jax.random.key(0)


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.5])
@pytest.mark.parametrize("width", [8, 7])
def test_dropout_rate_and_scale(rate: float, width: int):
    dropped = round(256 * rate)
    rows = 40_000
    y = np.asarray(dropout(jnp.ones((4, rows // 4, width)), rate, KEY)).reshape(rows, width)
    kept = y != 0
    np.testing.assert_array_equal(y[kept], np.float32(256 / (256 - dropped)))
    p = dropped / 256
    deviation = np.sqrt(p * (1 - p) / rows)
    assert 4 * deviation / np.sqrt(width) < 1 / 256, (
        "the tolerance is below 1/256, one step of the rate"
    )
    assert abs(1 - kept.mean() - p) < 4 * deviation / np.sqrt(width)
    # Check each column, because four columns share a word of random bits.
    assert np.all(np.abs(1 - kept.mean(0) - p) < 5 * deviation)
    correlation = np.corrcoef(kept.T) - np.eye(width)
    assert np.max(np.abs(correlation)) < 5 / np.sqrt(rows)


def test_bfloat16_dropout_scales_in_float32():
    """The rate 0.1 becomes 26/256. The scale 256/230, rounded to bfloat16, would change every element by 0.3 %."""
    x = jnp.linspace(1, 2, 64, dtype=jnp.bfloat16)
    y = dropout(x, 0.1, KEY)
    assert y.dtype == jnp.bfloat16
    kept = np.asarray(y != 0)
    assert 40 < kept.sum() < 64
    exact = (x.astype(jnp.float32) * np.float32(256 / 230)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(y[kept], exact[kept])


def test_dropout_without_key_or_rate_is_the_identity():
    x = jnp.arange(6.0)
    assert dropout(x, 0.5, None) is x
    assert dropout(x, 0.0, KEY) is x


def test_dropout_mask_depends_on_the_key():
    x = jnp.ones((16, 16))
    first = dropout(x, 0.5, fold(KEY, 1))
    np.testing.assert_array_equal(first, dropout(x, 0.5, fold(KEY, 1)))
    assert np.any(first != dropout(x, 0.5, fold(KEY, 2)))
    assert fold(None, 1) is None


def test_gradient_of_dropped_elements_is_zero():
    x = jnp.ones(64)
    gradient = jax.grad(lambda x: dropout(x, 0.5, KEY).sum())(x)
    np.testing.assert_array_equal(gradient, dropout(x, 0.5, KEY))
