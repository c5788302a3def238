"""The closed form against a slow reference implementation, against multinomial naive Bayes, and in limiting cases."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.naive_bayes import MultinomialNB

from common.errors import UserError
from explicit_opt.solution import (
    FLOOR,
    cooccurrences,
    explicit_solution,
    separate_intercept,
)

E, M, N, K = 3000, 7, 5, 3


@pytest.fixture(scope="module")
def data() -> tuple[np.ndarray, np.ndarray]:
    """Returns features (E, M), whose rows have different norms, and targets (E,). Every output occurs as a target."""
    generator = np.random.default_rng(0)
    return generator.gamma(1.0, size=(E, M)).astype(np.float32), generator.integers(0, N, E)


@pytest.fixture(scope="module")
def primed(data) -> tuple[np.ndarray, np.ndarray]:
    """Returns the features of `data`, each row scaled to the sum K, and the targets."""
    features, targets = data
    return K * features / features.sum(1, keepdims=True), targets


def slow(features, targets, outputs, priming, exponent=None, sign=-1):
    """Computes eq. (2) as a sum of outer products and eq. (5) entry by entry, in float64."""
    found = np.zeros((features.shape[1], outputs))
    for h, i in zip(features, targets, strict=True):
        found += np.outer(h.astype(np.float64), np.eye(outputs)[i])
    exponent = (priming - 1) / priming if exponent is None else exponent
    weights = np.zeros_like(found)
    for j in range(found.shape[0]):
        for i in range(outputs):
            total = max(sum(found[d, i] for d in range(found.shape[0])), FLOOR)
            weights[j, i] = math.log(max(found[j, i], FLOOR)) + sign * exponent * math.log(total)
    return weights


@pytest.mark.parametrize(
    ("priming", "exponent", "sign"),
    [(1, None, -1), (3, None, -1), (3, 0.75, -1), (3, None, 1), (105.1, None, -1)],
)
def test_solution_matches_slow_reference(data, priming, exponent, sign):
    found = explicit_solution(*data, priming, exponent=exponent, sign=sign)
    expected = slow(*data, N, priming, exponent, sign)
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_priming_defaults_to_average_norm(data):
    features, targets = data
    estimated = explicit_solution(features, targets)
    given = explicit_solution(features, targets, features.sum(1).mean())
    np.testing.assert_allclose(estimated, given, rtol=1e-6)


def test_segment_sum_path_matches_matmul_path(data):
    features, targets = data
    few, many = cooccurrences(features, targets, N), cooccurrences(features, targets, 400)
    np.testing.assert_allclose(many[:, :N], few, rtol=1e-6)
    assert not np.asarray(many[:, N:]).any()


def test_solution_equals_multinomial_naive_bayes(primed):
    """If all rows h of the features have the sum K, eq. (3) is multinomial naive Bayes without smoothing.

    With co-occurrences F and f_i = sum_d F_di, logit i is sum_d h_d log(F_di / f_i) + (|h|_1 / K) log f_i: log
    likelihood plus log prior, up to a constant.
    """
    features, targets = primed
    mass_N = np.asarray(cooccurrences(features, targets, N), np.float64).sum(0)
    peer = MultinomialNB(alpha=1e-12, force_alpha=True, class_prior=mass_N / mass_N.sum())
    expected = peer.fit(features, targets).predict_log_proba(features)
    logits = features @ np.asarray(explicit_solution(features, targets, K), np.float64)
    found = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    np.testing.assert_allclose(found, expected, atol=2e-6)


def test_one_hot_features_with_k_1_give_maximum_likelihood_bigram():
    generator = np.random.default_rng(1)
    before, after = generator.integers(0, 6, (2, 500))
    weights = explicit_solution(np.eye(6, dtype=np.float32)[before], after, 1, outputs=6)
    counts = np.zeros((6, 6))
    np.add.at(counts, (before, after), 1)
    np.testing.assert_allclose(
        jax.nn.softmax(weights), counts / counts.sum(1, keepdims=True), atol=1e-6
    )


def test_separate_intercept_equals_eq_3_when_norm_is_k(primed):
    features, targets = primed
    weights, bias = separate_intercept(cooccurrences(features, targets, N), K)
    np.testing.assert_allclose(
        jnp.asarray(features) @ weights + bias,
        jnp.asarray(features) @ explicit_solution(features, targets, K),
        atol=1e-4,
    )


def test_output_without_targets_gets_finite_floor(data):
    features, targets = data
    weights = np.asarray(explicit_solution(features, targets, K, outputs=N + 1))
    assert np.isfinite(weights).all()
    # The exponent is (K - 1) / K = 2/3, so the weight is log(1e-12) - 2/3 log(1e-12).
    np.testing.assert_allclose(weights[:, N], math.log(FLOOR) / 3, rtol=1e-5)


FEATURES, TARGETS = np.ones((4, 2), np.float32), np.arange(4) % 2


@pytest.mark.parametrize(
    ("fault", "arguments"),
    [
        ("non-negative", (-FEATURES, TARGETS)),
        ("NaN", (FEATURES * np.nan, TARGETS)),
        ("finite", (FEATURES * np.inf, TARGETS)),
        ("without empty axes", (FEATURES[:0], TARGETS[:0])),
        ("without empty axes", (FEATURES[0], TARGETS)),
        (r"targets must have the shape \(4,\), .* got \(3,\)", (FEATURES, TARGETS[:3])),
        ("targets must be integers, got float64", (FEATURES, TARGETS + 0.5)),
        ("at least 1, got 0.5", (FEATURES, TARGETS, 0.5)),
        ("at least 1, got nan", (FEATURES, TARGETS, math.nan)),
        ("at least 1, got 0.2", (FEATURES / 10, TARGETS)),
        ("targets must be below outputs=2, got 7", (FEATURES, np.array([0, 1, 7, 0]), 1)),
        ("targets must be at least 0, got -1", (FEATURES, np.array([0, -1, 1, 0]), 1)),
        ("features must be real numbers, got complex", (FEATURES * 1j, TARGETS)),
        ("features must be real numbers, got complex", (jnp.asarray(FEATURES * 1j), TARGETS)),
        ("features must be real numbers, got <U", (FEATURES.astype(str), TARGETS)),
    ],
)
def test_invalid_arguments_raise_one_line_errors(fault, arguments):
    options = {"outputs": 2} if len(arguments) == 3 else {}
    with pytest.raises(UserError, match=fault) as caught:
        explicit_solution(*arguments, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("outputs", [2.5, 8.0, 300.5, True, "8", 0])
def test_number_of_outputs_must_be_a_positive_integer(outputs):
    with pytest.raises(UserError, match="outputs must be a whole number of at least 1, got"):
        explicit_solution(FEATURES, TARGETS, outputs=outputs)


@pytest.mark.parametrize("dtype", [bool, np.int64, np.float16, jnp.bfloat16])
def test_features_of_any_real_dtype_have_the_same_solution(dtype):
    features = (FEATURES > 0).astype(np.float32)
    expected = explicit_solution(features, TARGETS, 2)
    np.testing.assert_array_equal(explicit_solution(features.astype(dtype), TARGETS, 2), expected)
