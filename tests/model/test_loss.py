"""Cross-entropy against fairseq's formula, and its custom gradient against automatic differentiation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from common.model.loss import cross_entropy

SMOOTHINGS = [0.0, 0.1, 0.5]


@pytest.fixture(scope="module")
def batch() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns logits (3, 4, 9), targets, and a weight per token."""
    generator = np.random.default_rng(0)
    logits = (3 * generator.standard_normal((3, 4, 9))).astype(np.float32)
    return logits, generator.integers(0, 9, (3, 4)), generator.uniform(0, 2, (3, 4))


def fairseq(logits: np.ndarray, target: int, smoothing: float) -> float:
    """Returns fairseq's label_smoothed_nll_loss of one token."""
    logits = logits.astype(np.float64)
    lprobs = logits - np.log(np.sum(np.exp(logits)))
    nll_loss, smooth_loss = -lprobs[target], -sum(lprobs)
    eps_i = smoothing / (len(logits) - 1)
    return (1 - smoothing - eps_i) * nll_loss + eps_i * smooth_loss


@pytest.mark.parametrize("smoothing", SMOOTHINGS)
def test_label_smoothing_matches_fairseq(batch, smoothing: float):
    logits, targets, _ = batch
    loss = cross_entropy(logits, targets, smoothing)
    expected = [
        [fairseq(logits[b, t], targets[b, t], smoothing) for t in range(4)] for b in range(3)
    ]
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


@pytest.mark.parametrize("smoothing", SMOOTHINGS)
def test_gradient_matches_automatic_differentiation(batch, smoothing: float):
    logits, targets, weights = batch

    def plain(logits):
        hit = jax.nn.one_hot(targets, 9)
        q = hit * (1 - smoothing) + (1 - hit) * smoothing / 8
        return -jnp.sum(weights * jnp.sum(q * jax.nn.log_softmax(logits), -1))

    expected = jax.grad(plain)(logits)
    ours = jax.grad(lambda x: jnp.sum(weights * cross_entropy(x, targets, smoothing)))(logits)
    assert ours.dtype == jnp.float32
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-6)


def test_large_logits_do_not_overflow():
    logits = jnp.array([[[1e4, 0.0, -1e4]]])
    loss, gradient = jax.value_and_grad(lambda x: cross_entropy(x, jnp.array([[1]]), 0.1).sum())(
        logits
    )
    assert loss == pytest.approx(0.9 * 1e4 + 0.05 * 2e4)
    np.testing.assert_allclose(gradient, [[[0.95, -0.9, -0.05]]], atol=1e-6)
