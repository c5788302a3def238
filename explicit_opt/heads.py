"""Closed-form initial weights of a linear head, for any model: one pass over features and labels, no gradients.

    from explicit_opt import head_start

    kernel, bias = head_start(features, labels)  # logits = features @ kernel + bias

Suffixes: E examples, M features, N outputs.
"""

from typing import Any, Literal, NamedTuple

import numpy as np
from jax.typing import ArrayLike
from scipy import linalg, sparse

from common.config import check, check_choice
from common.errors import UserError
from explicit_opt.solution import FLOOR, fit_scale, prior_exponent

Method = Literal["explicit", "lda", "ridge"]
METHODS = ("explicit", "lda", "ridge")


def head_start(
    features: Any,
    labels: ArrayLike,
    *,
    method: Method = "explicit",
    outputs: int | None = None,
    scale: Literal["fit"] | float = "fit",
    smoothing: float = 1.0,
    weights: ArrayLike | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the kernel, (M, N), and the bias, (N,), of a linear head, both float32.

    Args:
      features: (E, M), a NumPy, JAX or scipy.sparse array.
      labels: (E,) integers from 0 to N - 1, or (E, N) probabilities of the outputs (soft labels).
      method: "explicit": explicit optimization (eq. 3), which needs non-negative features. A feature with negative
        values is shifted so that its lowest value is 0, and the bias compensates. "lda": linear discriminant analysis.
        "ridge": least squares on targets -1 and 1.
      outputs: N. None takes the largest label + 1.
      scale: factor of all logits. "fit" takes the factor with the least cross-entropy on the examples, or on a random
        sample of 10,000 examples. The factor does not change the order of the logits.
      smoothing: its meaning depends on the method. "explicit": number added to every co-occurrence. "lda": weight, in
        examples, of an isotropic covariance that is averaged with the measured covariance. "ridge": penalty of the
        squared weights without the bias.
      weights: (E,) weights of the examples. None weights all examples by 1.

    Raises:
      UserError: an option is invalid, shapes do not match, a value is not finite, a label is out of range, or no
        example has a positive weight.
    """
    head = HeadStart(method, outputs=outputs, scale=scale, smoothing=smoothing)
    head.add(features, labels, weights)
    return head.finish()


def zero_head(
    features: ArrayLike, labels: ArrayLike, *, outputs: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns a kernel, (M, N), and a bias, (N,), of zeros, as a control for `head_start`."""
    del labels
    return np.zeros((np.shape(features)[1], outputs), np.float32), np.zeros(outputs, np.float32)


class HeadStart:
    """Computes `head_start` batch by batch, for data that do not fit into memory.

    Call `add` for each batch, then `finish`. `merge` adds the examples of another `HeadStart`, for example from another
    process. The sums take M x N float64 numbers, and M x M more with "lda" and "ridge".
    """

    SAMPLE = 10_000
    """Maximum number of examples in the random sample from which `scale="fit"` is computed."""

    def __init__(
        self,
        method: Method = "explicit",
        *,
        outputs: int | None = None,
        scale: Literal["fit"] | float = "fit",
        smoothing: float = 1.0,
        seed: int = 0,
    ):
        """Starts without examples. `head_start` documents all arguments except `seed`.

        Args:
          seed: seed of the random sample for `scale="fit"`. Heads that will be merged need different seeds.

        Raises:
          UserError: an argument is invalid.
        """
        check_choice("method", method, METHODS)
        check(outputs is None or outputs > 0, f"outputs must be at least 1, got {outputs}")
        check(scale == "fit" or scale > 0, f"scale must be 'fit' or above 0, got {scale}")
        check(smoothing >= 0, f"smoothing must be at least 0, got {smoothing}")
        self.method, self.outputs, self.scale, self.smoothing = method, outputs, scale, smoothing
        self._random = np.random.default_rng(seed)
        self._sums_NM = np.zeros((0, 0))
        self._mass_N = np.zeros(0)
        self._products_MM: np.ndarray | None = None
        self._lowest_M = np.zeros(0)
        self._sample: _Sample | None = None

    def add(self, features: Any, labels: ArrayLike, weights: ArrayLike | None = None) -> None:
        """Adds a batch of examples. `head_start` documents the arguments and errors."""
        features_EM = _checked_features(features)
        examples, width = features_EM.shape
        self._check_width(width)
        shares_EN = _checked_shares(np.asarray(labels), examples, self.outputs)
        weights_E = _checked_weights(weights, examples)
        seen_E = weights_E > 0
        if not seen_E.any():
            return
        features_EM, shares_EN, weights_E = (
            features_EM[seen_E],
            shares_EN[seen_E],
            weights_E[seen_E],
        )
        weighted_EN = shares_EN * weights_E[:, None]
        products_MM = None
        if self.method != "explicit":
            weighted_EM = (features_EM.T * weights_E).T
            products_MM = _dense(features_EM.T @ weighted_EM)
        lowest_M = _dense(features_EM.min(axis=0)).ravel()
        self._join((features_EM.T @ weighted_EN).T, weighted_EN.sum(0), products_MM, lowest_M)
        if self.scale == "fit":
            priority_E = self._random.random(len(weights_E))
            kept = np.argsort(priority_E)[: self.SAMPLE]
            rows_EM = _dense(features_EM[kept]).astype(np.float32)
            self._keep(_Sample(priority_E[kept], rows_EM, shares_EN[kept], weights_E[kept]))

    def merge(self, other: "HeadStart") -> None:
        """Adds the examples of another head of the same method.

        Raises:
          UserError: the methods or the numbers of features differ.
        """
        check(
            other.method == self.method,
            f"cannot merge a head with the method {other.method} into a head with the method {self.method}",
        )
        if other._mass_N.size:
            self._check_width(other._sums_NM.shape[1])
            self._join(other._sums_NM, other._mass_N, other._products_MM, other._lowest_M)
        if other._sample is not None:
            self._keep(other._sample)

    def _check_width(self, width: int) -> None:
        before = self._sums_NM.shape[1]
        check(
            before in (0, width),
            f"the new examples have {width} features, but the earlier examples have {before}",
        )

    def _join(
        self,
        sums_NM: np.ndarray,
        mass_N: np.ndarray,
        products_MM: np.ndarray | None,
        lowest_M: np.ndarray,
    ) -> None:
        """Adds the sums of a batch or of another head. New labels append rows, unless `outputs` fixes N."""
        if not self._mass_N.size:
            self._sums_NM, self._mass_N = sums_NM.copy(), mass_N.copy()
            self._products_MM, self._lowest_M = products_MM, lowest_M
            return
        outputs = max(len(mass_N), len(self._mass_N))
        self._sums_NM = _padded(self._sums_NM, outputs) + _padded(sums_NM, outputs)
        self._mass_N = _padded(self._mass_N, outputs) + _padded(mass_N, outputs)
        self._lowest_M = np.minimum(self._lowest_M, lowest_M)
        if products_MM is not None:
            self._products_MM = self._products_MM + products_MM

    def _keep(self, more: "_Sample") -> None:
        """Adds examples to the sample, then keeps the `SAMPLE` examples of lowest priority.

        Priorities are random. So the sample is uniform, whatever the batches and the order of merges.
        """
        if self._sample is not None:
            outputs = max(more.shares_SN.shape[1], self._sample.shares_SN.shape[1])
            parts = [
                one._replace(shares_SN=_padded(one.shares_SN.T, outputs).T)
                for one in (self._sample, more)
            ]
            more = _Sample(*(np.concatenate(both) for both in zip(*parts, strict=True)))
        kept = np.argsort(more.priority_S)[: self.SAMPLE]
        self._sample = _Sample(*(array[kept] for array in more))

    def finish(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the kernel, (M, N), and the bias, (N,), both float32. `add` may be called again afterwards.

        Raises:
          UserError: no example has a positive weight, or the features are linearly dependent ("lda" and "ridge" with
            smoothing 0).
        """
        check(self._mass_N.sum() > 0, "no examples have a positive weight: at least one is needed")
        kernel_MN, bias_N = getattr(self, f"_{self.method}")()
        scale = self.scale
        if scale == "fit":
            scale = self._fit_scale(kernel_MN, bias_N)
        return (scale * kernel_MN).astype(np.float32), (scale * bias_N).astype(np.float32)

    def _explicit(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns kernel and bias of eq. (3). If a feature has negative values, its minimum is subtracted first."""
        shift_M = np.minimum(self._lowest_M, 0.0)
        counts_NM = self._sums_NM - self._mass_N[:, None] * shift_M
        # A constant feature, once shifted, has co-occurrences of 0. Rounding may make them negative.
        counts_NM = np.maximum(counts_NM, 0.0)
        priming = max(counts_NM.sum() / self._mass_N.sum(), 1.0)
        counts_NM = np.maximum(counts_NM + self.smoothing, FLOOR)
        totals_N = counts_NM.sum(1)
        kernel_MN = (np.log(counts_NM) - prior_exponent(priming) * np.log(totals_N)[:, None]).T
        return kernel_MN, -shift_M @ kernel_MN

    def _lda(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns kernel and bias of linear discriminant analysis: a Gaussian per output, with a common covariance."""
        total, width = self._mass_N.sum(), self._sums_NM.shape[1]
        mean_NM = self._sums_NM / np.maximum(self._mass_N, FLOOR)[:, None]
        covariance_MM = self._products_MM - self._sums_NM.T @ mean_NM
        prior = self.smoothing * np.trace(covariance_MM) / (total * width)
        covariance_MM = (covariance_MM + prior * np.eye(width)) / (total + self.smoothing)
        kernel_MN = _solve(covariance_MM, mean_NM.T)
        log_mass_N = np.log(np.maximum(self._mass_N, FLOOR) / total)
        return kernel_MN, log_mass_N - 0.5 * np.einsum("nm,mn->n", mean_NM, kernel_MN)

    def _ridge(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns kernel and bias of ridge regression on centred features and targets, so the bias has no penalty."""
        total, width = self._mass_N.sum(), self._sums_NM.shape[1]
        mean_M = self._sums_NM.sum(0) / total
        target_N = 2 * self._mass_N / total - 1
        # The product H^T (2 Y - 1) of features H and targets 2 Y - 1, both centred.
        right_MN = 2 * self._sums_NM.T - total * np.outer(mean_M, 1 + target_N)
        left_MM = self._products_MM - total * np.outer(mean_M, mean_M)
        kernel_MN = _solve(left_MM + self.smoothing * np.eye(width), right_MN)
        return kernel_MN, target_N - mean_M @ kernel_MN

    def _fit_scale(self, kernel_MN: np.ndarray, bias_N: np.ndarray) -> float:
        sample = self._sample
        shares_SN = _padded(sample.shares_SN.T, len(bias_N)).T
        logits_SN = sample.features_SM @ kernel_MN + bias_N
        logits_SN -= logits_SN.max(1, keepdims=True)

        def loss(factor: float) -> float:
            log_total_S = np.log(np.exp(factor * logits_SN).sum(1))
            nats_S = log_total_S - factor * (shares_SN * logits_SN).sum(1)
            return float(np.average(nats_S, weights=sample.weights_S))

        return fit_scale(loss)


class _Sample(NamedTuple):
    """The random sample of S examples for `scale="fit"`. Each example has a random priority."""

    priority_S: np.ndarray
    features_SM: np.ndarray
    shares_SN: np.ndarray
    weights_S: np.ndarray


def _checked_features(features: Any) -> Any:
    """Returns the features in float64, as an array or a scipy.sparse.csr_array."""
    if sparse.issparse(features):
        features_EM = sparse.csr_array(features, dtype=np.float64)
        values = features_EM.data
    else:
        features_EM = values = np.asarray(features, np.float64)
    check(
        features_EM.ndim == 2 and 0 not in features_EM.shape,
        f"features must have the shape (examples, features), without empty axes, got {features_EM.shape}",
    )
    check(bool(np.isfinite(values).all()), "a feature is not finite")
    return features_EM


def _checked_shares(labels: np.ndarray, examples: int, outputs: int | None) -> np.ndarray:
    """Returns the labels as probabilities of the outputs, (E, N) float64."""
    check(
        labels.shape[:1] == (examples,) and labels.ndim <= 2,
        f"{examples} examples need {examples} labels, got labels of shape {labels.shape}",
    )
    if labels.ndim == 1:
        check(
            labels.dtype.kind in "iu",
            f"labels of shape (examples,) must be integers, got {labels.dtype}",
        )
        outputs = outputs or int(labels.max()) + 1
        check(
            labels.min() >= 0 and labels.max() < outputs,
            f"labels must be from 0 to {outputs - 1}, got {labels.min()} to {labels.max()}",
        )
        return np.eye(outputs)[labels]
    check(
        outputs in (None, labels.shape[1]),
        f"the labels are probabilities of {labels.shape[1]} outputs, but outputs={outputs}",
    )
    shares_EN = labels.astype(np.float64)
    sums_E = shares_EN.sum(1)
    check(
        bool((shares_EN >= 0).all()) and np.allclose(sums_E, 1, atol=1e-3),
        "the probabilities in labels must be at least 0 and add up to 1 for each example",
    )
    return shares_EN / sums_E[:, None]


def _checked_weights(weights: ArrayLike | None, examples: int) -> np.ndarray:
    if weights is None:
        return np.ones(examples)
    weights_E = np.asarray(weights, np.float64)
    check(
        weights_E.shape == (examples,),
        f"{examples} examples need {examples} weights, got weights of shape {weights_E.shape}",
    )
    check(
        bool(np.isfinite(weights_E).all() and (weights_E >= 0).all()),
        "a weight is negative or not finite",
    )
    return weights_E


def _padded(rows: np.ndarray, count: int) -> np.ndarray:
    """Appends rows of zeros until the array has `count` rows."""
    return np.pad(rows, [(0, count - len(rows)), *[(0, 0)] * (rows.ndim - 1)])


def _dense(array: Any) -> np.ndarray:
    return array.toarray() if sparse.issparse(array) else np.asarray(array)


def _solve(left_MM: np.ndarray, right_MN: np.ndarray) -> np.ndarray:
    """Solves left X = right for X, (M, N). `left_MM` is symmetric and positive definite.

    Raises:
      UserError: `left_MM` is singular.
    """
    try:
        return linalg.solve(left_MM, right_MN, assume_a="pos")
    except linalg.LinAlgError as error:
        raise UserError("the features are linearly dependent: set smoothing above 0") from error
