"""The explicit solution of a softmax layer: its weights from co-occurrences, without a gradient (section 2.1).

M examples, D features, N outputs, K priming number (the norm of a feature vector).
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import minimize_scalar

from common.errors import UserError

FLOOR = 1e-12
"""Co-occurrences below this are raised to it: an output that is never a target has no logarithm."""

# Up to this many outputs a product with one-hot targets is faster than adding rows one by one.
_FEW_OUTPUTS = 256
_BLOCK = 1024


def explicit_solution(
    features: jax.typing.ArrayLike,
    targets: jax.typing.ArrayLike | None = None,
    priming: float | None = None,
    *,
    outputs: int | None = None,
    exponent: float | None = None,
    sign: int = -1,
    floor: float = FLOOR,
) -> jax.Array:
    """U = log F + sign * exponent * log f, the weights of eq. (3) and (5), (D, N) float32.

    F are the co-occurrences of features and targets (eq. 2), f their sums over the features.

    Args:
      features: (M, D), not negative; or without `targets` the co-occurrences F themselves, (D, N).
      targets: (M,) integers below N.
      priming: K; None takes the average norm of the features (section 2.1). Needed with co-occurrences.
      outputs: N; None takes the largest target + 1.
      exponent: of f; None is (K - 1) / K.
      sign: -1 as in eq. (3); +1 as in the sentence before it, which is a slip (eq. 14 has the minus).
      floor: the least co-occurrence.

    Raises:
      UserError: a feature is negative or not a number, there is no example, K is below 1, or a target is out of range.
    """
    features = np.asarray(features) if not isinstance(features, jax.Array) else features
    if features.ndim != 2 or 0 in features.shape:
        raise UserError(
            f"a table of features with rows and columns is needed, got the shape {features.shape}"
        )
    if targets is None:
        _check_values(float(features.min()), float(features.max()), "co-occurrence")
        if priming is None:
            raise UserError("co-occurrences alone do not tell the priming number: give priming=K")
        return from_cooccurrences(features, priming, exponent=exponent, sign=sign, floor=floor)
    targets = np.asarray(targets)
    if targets.shape != features.shape[:1] or targets.dtype.kind not in "iu":
        raise UserError(
            f"{len(features)} examples need as many integer targets, got {targets.dtype} {targets.shape}"
        )
    outputs = int(targets.max()) + 1 if outputs is None else outputs
    if targets.min() < 0 or targets.max() >= outputs:
        raise UserError(
            f"targets must be from 0 to {outputs - 1}, got {targets.min()} to {targets.max()}"
        )
    found, lowest = _one_pass(features, targets, outputs)
    total = float(found.sum())
    _check_values(lowest, total, "feature")
    if priming is None:
        # Every feature is in one co-occurrence, so their sum is that of the norms.
        priming = total / len(features)
    return from_cooccurrences(found, priming, exponent=exponent, sign=sign, floor=floor)


def from_cooccurrences(
    cooccurrences_DN: jax.typing.ArrayLike,
    priming: float,
    *,
    exponent: float | None = None,
    sign: int = -1,
    floor: float = FLOOR,
) -> jax.Array:
    """As `explicit_solution`, from F; (K, D, N) is one layer of K D features."""
    share = prior_exponent(priming, exponent)
    return _weights(cooccurrences_DN, share * sign, floor)


def separate_intercept(
    cooccurrences_DN: jax.typing.ArrayLike, priming: float, floor: float = FLOOR
) -> tuple[jax.Array, jax.Array]:
    """Weights log F, (D, N), and the bias -(K - 1) log f, (N,): the form whose best K is the norm (section 4).

    It is eq. (3) where every feature vector has the norm K, and another model where they differ: the prior then does
    not grow with the norm.
    """
    _check_priming(priming)
    totals_N = jnp.maximum(jnp.sum(cooccurrences_DN, axis=0, dtype=jnp.float32), floor)
    return _weights(cooccurrences_DN, 0.0, floor), -(priming - 1) * jnp.log(totals_N)


def prior_exponent(priming: float, exponent: float | None = None) -> float:
    """(K - 1) / K, or what is put in its place."""
    _check_priming(priming)
    return (priming - 1) / priming if exponent is None else exponent


def fit_scale(loss: Callable[[float], float]) -> float:
    """Returns the s > 0 that minimises a training cross-entropy of the logits s h U. Not in the paper.

    The confidence of the explicit solution grows with the norm of the features, whatever the targets are; s corrects it
    and leaves the ranking of the outputs as it is. The cross-entropy is convex in s, so its minimum is the only one.

    Args:
      loss: mean cross-entropy over training data, a function of s.
    """
    found = minimize_scalar(
        lambda log_s: loss(math.exp(log_s)),
        bounds=(math.log(1e-3), math.log(10.0)),
        method="bounded",
        options={"xatol": 1e-3},
    )
    return math.exp(found.x)


def average_norm(features_MD: jax.typing.ArrayLike) -> float:
    """K estimated as the mean of |H_m|_1 (section 2.1)."""
    return float(_norm(features_MD))


def cooccurrences(
    features_MD: jax.typing.ArrayLike, targets_M: jax.typing.ArrayLike, outputs: int
) -> jax.Array:
    """F = H^T Y without Y (eq. 2), (D, N) float32; targets outside of 0 to N - 1 do not count.

    Sums over blocks of examples are added in float64. Features that are sharded over examples give the same result:
    XLA adds what the devices found.
    """
    return _one_pass(features_MD, targets_M, outputs)[0]


def _one_pass(features_MD, targets_M, outputs: int) -> tuple[jax.Array, float]:
    """Co-occurrences and the lowest feature."""
    if isinstance(features_MD, np.ndarray) and outputs <= _FEW_OUTPUTS:
        return _on_host(features_MD, np.asarray(targets_M), outputs)
    with jax.enable_x64(True):
        return _cooccurrences(features_MD, targets_M, outputs), float(features_MD.min())


def _on_host(features_MD, targets_M, outputs):
    """Where memory is read once, block by block, since reading is what takes the time; nothing is copied."""
    found_ND, lowest = np.zeros((outputs, features_MD.shape[1])), np.inf
    number_N = np.arange(outputs)[:, None]
    for start in range(0, len(features_MD), _BLOCK):
        part_BD = np.asarray(features_MD[start : start + _BLOCK], np.float32)
        hits_NB = (targets_M[start : start + _BLOCK] == number_N).astype(np.float32)
        with np.errstate(invalid="ignore"):  # infinite features are told of after the pass
            found_ND += hits_NB @ part_BD
        lowest = np.minimum(lowest, part_BD.min())
    return jnp.asarray(found_ND.T, jnp.float32), float(lowest)


@jax.jit
def _norm(features_MD):
    return jnp.mean(jnp.sum(features_MD, axis=1, dtype=jnp.float32))


@jax.jit
def _weights(cooccurrences_DN, share, floor):
    found = jnp.asarray(cooccurrences_DN, jnp.float32)
    totals_N = jnp.sum(found, axis=tuple(range(found.ndim - 1)))
    return jnp.log(jnp.maximum(found, floor)) + share * jnp.log(jnp.maximum(totals_N, floor))


@jax.jit(static_argnums=2)
def _cooccurrences(features_MD, targets_M, outputs):
    features_MD = jnp.asarray(features_MD, jnp.float32)
    examples, width = features_MD.shape
    if outputs > _FEW_OUTPUTS:
        rows_ND = jax.ops.segment_sum(features_MD.astype(jnp.float64), targets_M, outputs)
        return rows_ND.T.astype(jnp.float32)
    blocks = max(examples // _BLOCK, 1)
    inside = examples // blocks * blocks
    hits_NM = (targets_M == jnp.arange(outputs)[:, None]).astype(jnp.float32)
    # Y^T H, each factor as it lies in memory: the form that is fast everywhere.
    parts = jnp.matmul(
        hits_NM[:, :inside].reshape(outputs, blocks, -1).swapaxes(0, 1),
        features_MD[:inside].reshape(blocks, -1, width),
    )
    rest_ND = jnp.matmul(hits_NM[:, inside:], features_MD[inside:])
    return (parts.sum(0, dtype=jnp.float64) + rest_ND).T.astype(jnp.float32)


def _check_priming(priming: float) -> None:
    if not (math.isfinite(priming) and priming >= 1):
        raise UserError(f"the priming number K must be at least 1, got {priming:g}")


def _check_values(lowest: float, largest: float, what: str) -> None:
    if math.isnan(lowest):
        raise UserError(f"a {what} is not a number (NaN)")
    if lowest < 0 or not math.isfinite(largest):
        raise UserError(f"every {what} must be finite and not negative, the lowest is {lowest:g}")
