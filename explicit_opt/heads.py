"""Closed-form initial weights of a linear head, for any model: one pass over features and labels, no gradients.

    from explicit_opt import head_start

    kernel, bias = head_start(features, labels)  # logits = features @ kernel + bias

Shape letters of this module: E examples, M features, N outputs, S sampled examples.
"""

from typing import Any, Literal, NamedTuple

import numpy as np
from jax.typing import ArrayLike
from scipy import linalg, sparse

from common.config import check_choice, check_int, check_number
from common.errors import UserError, check
from common.metrics.curve import as_number
from explicit_opt.head_inputs import checked_features, checked_shares, checked_weights, dense
from explicit_opt.solution import FLOOR, fit_scale, from_cooccurrences, prior_exponent

Method = Literal["explicit", "lda", "ridge"]
METHODS = ("explicit", "lda", "ridge")

LOGITS = 50_000_000
"""Maximum number of logits that `scale="fit"` computes. With more than 500,000 outputs, the fit uses up to 100
examples and may exceed this number."""


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
        values is shifted so that its lowest value is 0, and the bias undoes the shift. "lda": linear discriminant
        analysis. "ridge": least squares with the target 1 for the label and -1 for all other outputs.
      outputs: N. None takes the largest label + 1, or the number of columns of soft labels.
      scale: factor of all logits. "fit" takes the factor from 0.001 to 10 with the least cross-entropy on a random
        sample of at most 10,000 examples (fewer with more than 5,000 outputs: see `LOGITS`). The factor does not change
        the order of the logits.
      smoothing: its meaning depends on the method. "explicit": number added to every co-occurrence. "lda": weight, in
        examples, of an isotropic covariance that is averaged with the measured covariance. "ridge": factor of
        the squared norm of the kernel in the loss.
      weights: (E,) weights of the examples. None weights all examples by 1.

    Raises:
      ValueError: an option is invalid, shapes do not match, a value is not a finite number, a weight is negative, a
        label is not an integer or is out of range, soft labels are not probabilities, or `HeadStart.finish` fails.
    """
    head = HeadStart(method, outputs=outputs, scale=scale, smoothing=smoothing)
    head.add(features, labels, weights)
    return head.finish()


def head_from_counts(counts: Any, priming: float, *, smoothing: float = 1.0) -> np.ndarray:
    """Returns the kernel of eq. (3), log F - (K - 1) / K log f, (M, N) float32, for co-occurrences F.

    f sums F over the features. `head_start` with `scale=1` and the same `smoothing` returns this kernel and the bias 0
    if each output has an example and `counts` and `priming` are those of its features.

    Args:
      counts: (M, N), the sum of each feature over the examples of each output, a NumPy, JAX or scipy.sparse array.
      priming: K, the sum of the features of an example, averaged over the examples, at least 1.
      smoothing: number added to every count. Numbers below 1e-12 are replaced by 1e-12 before the logarithm.

    Raises a ValueError if a count is negative or not finite, a shape is wrong, or an option is invalid.
    """
    check_number("smoothing", smoothing)
    counts_MN = dense(checked_features(counts, "counts", "features, outputs"))
    lowest = counts_MN.min(initial=0)
    check(lowest >= 0, f"counts must be at least 0, got {lowest:g}")
    return np.asarray(from_cooccurrences(counts_MN + smoothing, as_number("priming", priming)))


def zero_head(
    features: ArrayLike, labels: ArrayLike, *, outputs: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns a kernel, (M, N), and a bias, (N,), of zeros, as a control for `head_start`."""
    del labels
    return np.zeros((np.shape(features)[1], outputs), np.float32), np.zeros(outputs, np.float32)


class HeadStart:
    """Computes `head_start` batch by batch, for data that do not fit into memory.

    Call `add` for each batch, then `finish`. `merge` adds the examples of another `HeadStart`, for example from another
    process. A `HeadStart` stores M x N float64 numbers, M x M more with "lda" and "ridge", and at most `SAMPLE`
    examples with `scale="fit"`.
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
        """Starts without examples. `head_start` documents all arguments except `seed`, and the errors.

        Args:
          seed: seed of the random sample for `scale="fit"`. Heads that will be merged need different seeds.
        """
        check_choice("method", method, METHODS)
        if outputs is not None:
            check_int("outputs", outputs)
        if not (isinstance(scale, str) and scale == "fit"):
            check_number("scale, if it is not 'fit',", scale, positive=True)
        check_number("smoothing", smoothing)
        check_int("seed", seed, 0)
        self.method, self.outputs, self.scale, self.smoothing = method, outputs, scale, smoothing
        self._random = np.random.default_rng(seed)
        # `_origin_M` is subtracted from all features before they are summed. Otherwise, rounding errors of the sums
        # could exceed the differences between examples.
        self._origin_M = np.zeros(0)
        self._sums_NM = np.zeros((0, 0))
        self._mass_N = np.zeros(0)
        self._products_MM: np.ndarray | None = None
        self._lowest_M = np.zeros(0)
        self._sample: _Sample | None = None

    def add(self, features: Any, labels: ArrayLike, weights: ArrayLike | None = None) -> None:
        """Adds a batch of examples. `head_start` documents the arguments and the errors.

        Also raises a ValueError if the number of features differs from earlier batches.
        """
        features_EM = checked_features(features)
        examples, width = features_EM.shape
        self._check_width(width)
        shares_EN = checked_shares(labels, examples, self.outputs)
        weights_E = checked_weights(weights, examples)
        seen_E = weights_E > 0
        if not seen_E.any():
            return
        features_EM, shares_EN, weights_E = (x[seen_E] for x in (features_EM, shares_EN, weights_E))
        if not self._origin_M.size:
            # The first batch sets the origin: the mean of dense features for "lda" and "ridge". For "explicit" the
            # origin is 0, because `_explicit` needs sums of the original values. For sparse features it is 0, because
            # subtracting the mean would make them dense.
            moves = self.method != "explicit" and not sparse.issparse(features_EM)
            self._origin_M = features_EM.mean(0) if moves else np.zeros(width)
        moved_EM = features_EM
        if self._origin_M.any():
            moved_EM = dense(features_EM) - self._origin_M
        weighted_EN = sparse.csr_array(shares_EN.multiply(weights_E[:, None]))
        products_MM = None
        if self.method != "explicit":
            products_MM = dense(moved_EM.T @ (moved_EM.T * weights_E).T)
        sums_NM = dense(weighted_EN.T @ moved_EM)
        lowest_M = dense(features_EM.min(axis=0)).ravel()
        self._join(sums_NM, dense(weighted_EN.sum(0)).ravel(), products_MM, lowest_M)
        if self.scale == "fit":
            priority_E = self._random.random(len(weights_E))
            kept = np.argsort(priority_E)[: self.SAMPLE]
            rows_EM = dense(features_EM[kept]) - self._origin_M
            self._keep(_Sample(priority_E[kept], rows_EM, weights_E[kept], shares_EN[kept]))

    def merge(self, other: "HeadStart") -> None:
        """Adds the examples of another head.

        Raises a UserError if `other` is not another `HeadStart`, or differs from this head in the number of features or
        in an option other than `seed`.
        """
        check(
            isinstance(other, HeadStart) and other is not self,
            f"other must be another HeadStart, got {'this head' if other is self else repr(other)[:80]}",
        )
        for name in ("method", "outputs", "scale", "smoothing"):
            own, others = getattr(self, name), getattr(other, name)
            check(
                own == others,
                f"cannot merge a head with {name}={others!r} into a head with {name}={own!r}: make both heads with the"
                f" same {name}",
            )
        if not other._mass_N.size:
            return
        self._check_width(other._sums_NM.shape[1])
        if not self._origin_M.size:
            self._origin_M = other._origin_M
        # Move the other head's sums from its origin b to the origin a of this head: x - a = (x - b) + (b - a).
        move_M = other._origin_M - self._origin_M
        sums_NM = other._sums_NM + np.outer(other._mass_N, move_M)
        products_MM = other._products_MM
        if products_MM is not None:
            crossed_MM = np.outer(other._sums_NM.sum(0), move_M)
            squared_MM = other._mass_N.sum() * np.outer(move_M, move_M)
            products_MM = products_MM + crossed_MM + crossed_MM.T + squared_MM
        self._join(sums_NM, other._mass_N, products_MM, other._lowest_M)
        if other._sample is not None:
            rows_SM = other._sample.features_SM + move_M
            self._keep(other._sample._replace(features_SM=rows_SM))

    def _check_width(self, width: int) -> None:
        before = self._sums_NM.shape[1]
        check(
            before in (0, width),
            f"features of all examples must have the same number of columns, got {width} after {before}",
        )

    def _join(
        self,
        sums_NM: np.ndarray,
        mass_N: np.ndarray,
        products_MM: np.ndarray | None,
        lowest_M: np.ndarray,
    ) -> None:
        """Adds the sums of a batch or of another head. Labels above all earlier labels append rows."""
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

        Priorities are random, so the sample is uniform, whatever the batches and the order of merges.
        """
        if self._sample is not None:
            both = (self._sample, more)
            outputs = max(one.shares_SN.shape[1] for one in both)
            shares_SN = sparse.vstack([_widened(one.shares_SN, outputs) for one in both], "csr")
            arrays = map(np.concatenate, zip(*(one[:3] for one in both), strict=True))
            more = _Sample(*arrays, shares_SN)
        kept = np.argsort(more.priority_S)[: self.SAMPLE]
        self._sample = _Sample(*(array[kept] for array in more))

    def finish(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the kernel, (M, N), and the bias, (N,), both float32. `add` may be called again afterwards.

        Raises:
          ValueError: no example has a positive weight, the linear system is singular ("lda" and "ridge" with linearly
            dependent features and too small a `smoothing`), or all features are constant within each class ("lda").
        """
        check(
            self._mass_N.sum() > 0,
            "no example has a weight above 0: give at least one example with such a weight (the default weight is 1)",
        )
        kernel_MN, bias_N = getattr(self, f"_{self.method}")()
        scale = self.scale
        if scale == "fit":
            scale = self._fit_scale(kernel_MN, bias_N)
        bias_N = bias_N - self._origin_M @ kernel_MN
        return (scale * kernel_MN).astype(np.float32), (scale * bias_N).astype(np.float32)

    def _explicit(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the kernel of eq. (3) for shifted features, and the bias that undoes the shift.

        The shift subtracts the minimum of each feature that has negative values. The priming number K is the mean L1
        norm of the shifted features, weighted by the weights of the examples, but at least 1.
        """
        shift_M = np.minimum(self._lowest_M, 0.0)
        counts_NM = self._sums_NM - self._mass_N[:, None] * shift_M
        # After the shift, the co-occurrences of a constant negative feature are 0. Rounding may make them negative.
        counts_NM = np.maximum(counts_NM, 0.0)
        priming = max(counts_NM.sum() / self._mass_N.sum(), 1.0)
        counts_NM = np.maximum(counts_NM + self.smoothing, FLOOR)
        totals_N = counts_NM.sum(1)
        kernel_MN = (np.log(counts_NM) - prior_exponent(priming) * np.log(totals_N)[:, None]).T
        return kernel_MN, -shift_M @ kernel_MN

    def _lda(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns kernel and bias of linear discriminant analysis: a Gaussian per output, with a common covariance.

        The part of the kernel that all outputs share is left out, since a softmax ignores it.
        """
        total, width = self._mass_N.sum(), self._sums_NM.shape[1]
        centre_M = self._sums_NM.sum(0) / total
        share_N = np.maximum(self._mass_N, FLOOR)
        mean_NM = np.where(
            self._mass_N[:, None] > 0, self._sums_NM / share_N[:, None] - centre_M, 0
        )
        scatter_MM = self._products_MM - total * np.outer(centre_M, centre_M)
        covariance_MM = scatter_MM - (mean_NM * self._mass_N[:, None]).T @ mean_NM
        check(
            np.trace(covariance_MM) > 1e-12 * np.trace(scatter_MM),
            "method='lda' needs features that vary within a class, but all features are constant within every class:"
            " use method='explicit' or method='ridge'",
        )
        prior = self.smoothing * np.trace(covariance_MM) / (total * width)
        covariance_MM = (covariance_MM + prior * np.eye(width)) / (total + self.smoothing)
        kernel_MN = _solve(covariance_MM, mean_NM.T)
        bias_N = np.log(share_N / total) - 0.5 * np.einsum("nm,mn->n", mean_NM, kernel_MN)
        return kernel_MN, bias_N - centre_M @ kernel_MN

    def _ridge(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns kernel and bias of ridge regression on centred features and targets, so the bias has no penalty."""
        total, width = self._mass_N.sum(), self._sums_NM.shape[1]
        mean_M = self._sums_NM.sum(0) / total
        target_N = 2 * self._mass_N / total - 1
        # The weighted product H^T (2 Y - 1) of features H and targets 2 Y - 1, both centred. Row e of Y is the label of
        # example e, one-hot or soft.
        right_MN = 2 * self._sums_NM.T - total * np.outer(mean_M, 1 + target_N)
        left_MM = self._products_MM - total * np.outer(mean_M, mean_M)
        kernel_MN = _solve(left_MM + self.smoothing * np.eye(width), right_MN)
        return kernel_MN, target_N - mean_M @ kernel_MN

    def _fit_scale(self, kernel_MN: np.ndarray, bias_N: np.ndarray) -> float:
        # Use only the first rows of the sample, because the logits must fit into memory. The rows are in random order.
        most = max(LOGITS // len(bias_N), 100)
        features_SM, weights_S = self._sample.features_SM[:most], self._sample.weights_S[:most]
        shares_SN = _widened(self._sample.shares_SN[:most], len(bias_N))
        logits_SN = features_SM @ kernel_MN + bias_N
        logits_SN -= logits_SN.max(1, keepdims=True)
        expected_S = dense(shares_SN.multiply(logits_SN).sum(1)).ravel()

        def loss(factor: float) -> float:
            log_total_S = np.log(np.exp(factor * logits_SN).sum(1))
            return float(np.average(log_total_S - factor * expected_S, weights=weights_S))

        return fit_scale(loss)


class _Sample(NamedTuple):
    """The random sample of S examples for `scale="fit"`, and the random number (priority) of each example."""

    priority_S: np.ndarray
    features_SM: np.ndarray
    weights_S: np.ndarray
    shares_SN: sparse.csr_array


def _padded(rows: np.ndarray, count: int) -> np.ndarray:
    """Appends rows of zeros until the array has `count` rows."""
    return np.pad(rows, [(0, count - len(rows)), *[(0, 0)] * (rows.ndim - 1)])


def _widened(shares: sparse.csr_array, outputs: int) -> sparse.csr_array:
    """Returns a copy with columns of zeros appended, until it has `outputs` columns."""
    wide = shares.copy()
    wide.resize((shares.shape[0], outputs))
    return wide


def _solve(left_MM: np.ndarray, right_MN: np.ndarray) -> np.ndarray:
    """Solves left X = right for X, (M, N). Raises a UserError if the symmetric `left_MM` is not positive definite."""
    try:
        return linalg.solve(left_MM, right_MN, assume_a="pos")
    except linalg.LinAlgError as error:
        raise UserError(
            "the features are linearly dependent, so the weights are not unique: set smoothing to a larger number"
        ) from error
