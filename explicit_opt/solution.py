"""Closed-form weights of a softmax layer, computed from co-occurrence counts without gradients (section 2.1).

Shape letters of this module: E examples, M input features, N outputs. K is not a shape letter but the paper's priming
number: the L1 norm of a feature vector.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import minimize_scalar

from common.config import check_int
from common.errors import check

FLOOR = 1e-12
"""Lower bound of numbers whose logarithm is taken, because the logarithm of 0 is infinite."""

# Up to this number of outputs, co-occurrences are a product with one-hot targets; with more outputs, a segment sum.
_FEW_OUTPUTS = 256
_BLOCK = 1024


def explicit_solution(
    features: jax.typing.ArrayLike,
    targets: jax.typing.ArrayLike,
    priming: float | None = None,
    *,
    outputs: int | None = None,
    exponent: float | None = None,
    sign: int = -1,
) -> jax.Array:
    """Returns U = log F + sign * exponent * log f, the weights of eq. (3) and (5), (M, N) float32.

    F holds the co-occurrences of features and targets (eq. 2); f sums F over the features.

    Args:
      features: (E, M), non-negative.
      targets: (E,) integers from 0 to N - 1.
      priming: K. None takes the mean L1 norm of the feature vectors (section 2.1).
      outputs: N. None takes the largest target + 1.
      exponent: exponent of f. None takes (K - 1) / K.
      sign: -1 as in eq. (3) and (14), or +1 as in the sentence before eq. (3).

    Raises:
      UserError: an array has the wrong shape, a feature is negative, too large, not finite or not a real number, there
        are no examples, `outputs` is not a positive integer, K is infinite, NaN or below 1, or a target is not an
        integer or out of range.
    """
    features = np.asarray(features) if not isinstance(features, jax.Array) else features
    check(
        features.ndim == 2 and 0 not in features.shape,
        f"features must have the shape (examples, features) without empty axes, got {features.shape}",
    )
    real = (jnp.floating, jnp.integer, jnp.bool)
    check(
        any(jnp.issubdtype(features.dtype, kind) for kind in real),
        f"features must be real numbers, got {features.dtype}",
    )
    targets = np.asarray(targets)
    check(
        targets.shape == features.shape[:1],
        f"targets must have the shape ({len(features)},), a target for each example, got {targets.shape}",
    )
    check(targets.dtype.kind in "iu", f"targets must be integers, got {targets.dtype}")
    check(targets.min() >= 0, f"targets must be at least 0, got {targets.min()}")
    outputs = int(targets.max()) + 1 if outputs is None else outputs
    check_int("outputs", outputs)
    check(
        targets.max() < outputs,
        f"targets must be below outputs={outputs}, got {targets.max()}: correct the targets, or set a larger outputs",
    )
    counts, lowest = _one_pass(features, targets, outputs)
    total = float(counts.sum())
    valid = "every feature must be finite and non-negative, but"
    check(not math.isnan(lowest), f"{valid} one is NaN: correct the features")
    check(math.isfinite(total), f"{valid} one is infinite or too large: correct the features")
    check(lowest >= 0, f"{valid} the lowest is {lowest:g}: subtract the minimum of each feature")
    if priming is None:
        # K is the mean L1 norm of the examples: the entries of F add up to the sum of the L1 norms of all examples.
        priming = total / len(features)
    return from_cooccurrences(counts, priming, exponent=exponent, sign=sign)


def from_cooccurrences(
    cooccurrences_MN: jax.typing.ArrayLike,
    priming: float,
    *,
    exponent: float | None = None,
    sign: int = -1,
) -> jax.Array:
    """Returns the explicit solution for co-occurrences F, (..., M, N). All axes except the last are input features.

    For `exponent` and `sign` see `explicit_solution`. Raises a UserError if K is infinite, NaN or below 1.
    """
    return _weights(cooccurrences_MN, sign * prior_exponent(priming, exponent))


def separate_intercept(
    cooccurrences_MN: jax.typing.ArrayLike, priming: float
) -> tuple[jax.Array, jax.Array]:
    """Returns the weights log F, (M, N), and the bias -(K - 1) log f, (N,) (section 5).

    If every feature vector has the L1 norm K, the logits are the same as with eq. (3). If norms differ, the
    term of f in eq. (3) grows with the norm, whereas the bias is constant. Raises a UserError if K is infinite, NaN or
    below 1.
    """
    _check_priming(priming)
    totals_N = jnp.maximum(jnp.sum(cooccurrences_MN, axis=0, dtype=jnp.float32), FLOOR)
    return _weights(cooccurrences_MN, 0.0), -(priming - 1) * jnp.log(totals_N)


def prior_exponent(priming: float, exponent: float | None = None) -> float:
    """Returns `exponent`, or (K - 1) / K if `exponent` is None. K is the priming number.

    Raises a UserError if K is infinite, NaN or below 1.
    """
    _check_priming(priming)
    return (priming - 1) / priming if exponent is None else exponent


def fit_scale(loss: Callable[[float], float]) -> float:
    """Returns the factor s from 0.001 to 10 for which the logits times s have the least training cross-entropy.

    The factor is not in the paper. The logits of the explicit solution grow with the norm of the features, and so does
    the confidence of the softmax. The factor corrects the confidence and keeps the ranking of the outputs. The
    cross-entropy is convex in s.

    Args:
      loss: maps s to the mean cross-entropy over training data.
    """
    minimum = minimize_scalar(
        lambda log_s: loss(math.exp(log_s)),
        bounds=(math.log(1e-3), math.log(10.0)),
        method="bounded",
        options={"xatol": 1e-3},
    )
    return math.exp(minimum.x)


def cooccurrences(
    features_EM: jax.typing.ArrayLike, targets_E: jax.typing.ArrayLike, outputs: int
) -> jax.Array:
    """Returns F = H^T Y (eq. 2) for features H and one-hot targets Y, (M, N) float32.

    Targets outside 0 to N - 1 are ignored. Features may be sharded over the examples. With up to 256 outputs, sums over
    blocks of examples are added in float64. With more outputs, Y is never built, and all sums are in float64.
    """
    return _one_pass(features_EM, targets_E, outputs)[0]


def _one_pass(features_EM, targets_E, outputs: int) -> tuple[jax.Array, float]:
    """Returns the co-occurrences, (M, N), and the lowest feature value."""
    if isinstance(features_EM, np.ndarray) and outputs <= _FEW_OUTPUTS:
        return _on_host(features_EM, np.asarray(targets_E), outputs)
    with jax.enable_x64(True):
        return _cooccurrences(features_EM, targets_E, outputs), float(features_EM.min())


def _on_host(features_EM, targets_E, outputs):
    """Computes `_one_pass` with NumPy. Reads each block of features once, because memory bandwidth limits the speed."""
    found_NM, lowest = np.zeros((outputs, features_EM.shape[1])), np.inf
    number_N = np.arange(outputs)[:, None]
    for start in range(0, len(features_EM), _BLOCK):
        part_BM = np.asarray(features_EM[start : start + _BLOCK], np.float32)
        hits_NB = (targets_E[start : start + _BLOCK] == number_N).astype(np.float32)
        # Suppress NumPy's warning about infinite features: `explicit_solution` raises an error, and the result of
        # `cooccurrences` has infinite and NaN values.
        with np.errstate(invalid="ignore"):
            found_NM += hits_NB @ part_BM
        lowest = np.minimum(lowest, part_BM.min())
    return jnp.asarray(found_NM.T, jnp.float32), float(lowest)


@jax.jit
def _weights(cooccurrences_MN, share):
    counts = jnp.asarray(cooccurrences_MN, jnp.float32)
    totals_N = jnp.sum(counts, axis=tuple(range(counts.ndim - 1)))
    return jnp.log(jnp.maximum(counts, FLOOR)) + share * jnp.log(jnp.maximum(totals_N, FLOOR))


@jax.jit(static_argnums=2)
def _cooccurrences(features_EM, targets_E, outputs):
    features_EM = jnp.asarray(features_EM, jnp.float32)
    examples, width = features_EM.shape
    if outputs > _FEW_OUTPUTS:
        rows_NM = jax.ops.segment_sum(features_EM.astype(jnp.float64), targets_E, outputs)
        return rows_NM.T.astype(jnp.float32)
    blocks = max(examples // _BLOCK, 1)
    inside = examples // blocks * blocks
    hits_NE = (targets_E == jnp.arange(outputs)[:, None]).astype(jnp.float32)
    # `hits_NE` is Y^T for one-hot targets Y, so the product Y^T H transposes neither Y nor the features H.
    parts = jnp.matmul(
        hits_NE[:, :inside].reshape(outputs, blocks, -1).swapaxes(0, 1),
        features_EM[:inside].reshape(blocks, -1, width),
    )
    rest_NM = jnp.matmul(hits_NE[:, inside:], features_EM[inside:])
    return (parts.sum(0, dtype=jnp.float64) + rest_NM).T.astype(jnp.float32)


def _check_priming(priming: float) -> None:
    check(
        math.isfinite(priming) and priming >= 1,
        "the priming number K (priming, or --config.solution.priming) must be a finite number of at least 1, got"
        f" {priming}: set another number, or scale the features up if K is their mean L1 norm (the default)",
    )
