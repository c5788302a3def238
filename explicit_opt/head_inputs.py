"""Checks and converts arguments of `explicit_opt.heads`: features, labels and weights of examples.

A wrong argument raises a UserError that names the argument and the fault.

Shape letters of this module: E examples, M features, N outputs.
"""

from typing import Any

import numpy as np
from jax.typing import ArrayLike
from scipy import sparse

from common.errors import UserError, check, reason_of


def checked_features(
    features: Any, name: str = "features", axes: str = "examples, features"
) -> Any:
    """Returns the features in float64, as a NumPy array or, if they are sparse, as a scipy.sparse.csr_array."""
    features_EM = values = _array(name, features, np.float64)
    if sparse.issparse(features):
        features_EM = sparse.csr_array(features_EM)
        values = features_EM.data
    check(
        features_EM.ndim == 2 and features_EM.shape[1] > 0,
        f"{name} must have the shape ({axes}), with at least one column, got {features_EM.shape}",
    )
    check(
        bool(np.isfinite(values).all()),
        f"{name} must be finite numbers, but one is NaN or infinite: correct the {name}",
    )
    return features_EM


def checked_shares(labels: Any, examples: int, outputs: int | None) -> sparse.csr_array:
    """Returns the labels as probabilities of the outputs, (E, N) float64.

    The result is sparse, because a language model has many outputs.
    """
    labels = _array("labels", labels)
    check(
        labels.shape[:1] == (examples,) and labels.ndim <= 2,
        f"labels must have the shape ({examples},) or ({examples}, outputs), a label for each row of features, got"
        f" {labels.shape}",
    )
    if labels.ndim == 1:
        check(
            not examples or labels.dtype.kind in "iu",
            f"labels of shape {labels.shape} must be integers, got {labels.dtype}: give class indices, or probabilities"
            f" of shape ({examples}, outputs)",
        )
        lowest, highest = (int(labels.min()), int(labels.max())) if examples else (0, 0)
        check(lowest >= 0, f"labels must be at least 0, got {lowest}")
        outputs = outputs or highest + 1
        check(
            highest < outputs,
            f"labels must be below outputs={outputs}, got {highest}: correct the labels, or set a larger outputs",
        )
        rows = np.arange(examples + 1)
        columns = dense(labels).astype(np.int64)
        return sparse.csr_array((np.ones(examples), columns, rows), (examples, outputs))
    check(
        labels.shape[1] > 1 or labels.shape[1] == outputs,
        f"labels of shape {labels.shape} have fewer than 2 columns, but two-dimensional labels have a probability for"
        f" each output: give class indices of shape ({examples},), or probabilities of at least two outputs",
    )
    check(
        outputs in (None, labels.shape[1]),
        f"labels have {labels.shape[1]} columns, but outputs={outputs}: set outputs={labels.shape[1]}, or None",
    )
    shares_EN = sparse.csr_array(_array("probabilities in labels", labels, np.float64))
    sums_E = dense(shares_EN.sum(1)).ravel()
    check(
        bool((shares_EN.data >= 0).all()),
        f"the probabilities in labels must be at least 0, got {shares_EN.data.min(initial=0):g}",
    )
    wrong = sums_E[~np.isclose(sums_E, 1, atol=1e-3)]
    if wrong.size:
        raise UserError(
            f"the probabilities in labels must add up to 1 for each example, got the sum {wrong[0]:g}"
        )
    return sparse.csr_array(shares_EN.multiply(1 / sums_E[:, None]))


def checked_weights(weights: ArrayLike | None, examples: int) -> np.ndarray:
    """Returns the weights of the examples, (E,) float64. None weights all examples by 1."""
    if weights is None:
        return np.ones(examples)
    weights_E = dense(_array("weights", weights, np.float64))
    check(
        weights_E.shape == (examples,),
        f"weights must have the shape ({examples},), a weight for each row of features, got {weights_E.shape}",
    )
    wrong = weights_E[~(np.isfinite(weights_E) & (weights_E >= 0))]
    if wrong.size:
        raise UserError(f"weights must be finite numbers of at least 0, got {wrong[0]}")
    return weights_E


def _array(name: str, values: Any, dtype: Any = None) -> Any:
    """Converts `values` to an array of real numbers of `dtype`; None keeps any dtype. Sparse arrays remain sparse."""
    try:
        array = values if sparse.issparse(values) else np.asarray(values)
        if dtype is not None and array.dtype.kind == "c":
            raise TypeError(f"its dtype is {array.dtype}")
        return array.astype(dtype or array.dtype, copy=False)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{name} must be an array of real numbers, and must not be traced by jax.jit ({reason_of(error)})"
        ) from error


def dense(array: Any) -> np.ndarray:
    """Returns a sparse or dense array as a NumPy array."""
    return array.toarray() if sparse.issparse(array) else np.asarray(array)
