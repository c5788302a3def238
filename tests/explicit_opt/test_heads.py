"""Closed-form heads: they equal heads of scikit-learn, and do not depend on how examples are split into batches.

Shape letters of this module: E examples, M features, N outputs.
"""

import math
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import sparse
from sklearn.datasets import load_digits
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import RidgeClassifier
from sklearn.naive_bayes import MultinomialNB

from common.errors import UserError
from explicit_opt import HeadStart, head_from_counts, head_start
from explicit_opt.heads import METHODS
from tests.perception.helpers import write_small_bert


@pytest.fixture(scope="module")
def digits() -> tuple[np.ndarray, np.ndarray]:
    """Returns the pixels whose standard deviation over images is above 0.5, (E, M), and the digits, (E,)."""
    pixels_EM, labels_E = load_digits(return_X_y=True)
    return pixels_EM[:, pixels_EM.std(0) > 0.5], labels_E


def log_softmax(logits_EN: np.ndarray) -> np.ndarray:
    logits_EN = logits_EN - logits_EN.max(1, keepdims=True)
    return logits_EN - np.log(np.exp(logits_EN).sum(1, keepdims=True))


def test_explicit_equals_naive_bayes_for_equal_norms(digits):
    """If all feature vectors have the same L1 norm, eq. (3) is multinomial naive Bayes without smoothing."""
    pixels_EM, labels_E = digits
    features_EM = 10 * pixels_EM / pixels_EM.sum(1, keepdims=True)
    kernel_MN, bias_N = head_start(features_EM, labels_E, smoothing=1e-8, scale=1.0)
    bayes = MultinomialNB(alpha=1e-8, force_alpha=True).fit(features_EM, labels_E)
    expected_EN = bayes.predict_joint_log_proba(features_EM)
    found_EN = log_softmax(features_EM @ kernel_MN + bias_N)
    np.testing.assert_allclose(found_EN, log_softmax(expected_EN), atol=1e-5)


def test_lda_equals_scikit_learn(digits):
    features_EM, labels_E = digits
    kernel_MN, bias_N = head_start(features_EM, labels_E, method="lda", smoothing=0, scale=1.0)
    peer = LinearDiscriminantAnalysis(solver="lsqr").fit(features_EM, labels_E)
    # scikit-learn's kernels have a part that all outputs share. A softmax ignores this part, so compare differences
    # from the first output.
    np.testing.assert_allclose(kernel_MN.T - kernel_MN[:, 0], peer.coef_ - peer.coef_[0], atol=1e-5)
    np.testing.assert_allclose(bias_N - bias_N[0], peer.intercept_ - peer.intercept_[0], atol=1e-4)
    logs_EN = log_softmax(features_EM @ kernel_MN + bias_N)
    np.testing.assert_allclose(logs_EN, peer.predict_log_proba(features_EM), atol=1e-4)


@pytest.mark.parametrize("method", ["lda", "ridge"])
def test_large_offset_of_the_features_loses_no_precision(method):
    """HeadStart subtracts the mean of the first batch from all features, so that sums of products lose no precision."""
    rng = np.random.default_rng(0)
    labels_E = rng.integers(0, 3, 300)
    features_EM = rng.normal(size=(300, 6)) + np.eye(6)[labels_E]
    kernel_MN, bias_N = head_start(features_EM, labels_E, method=method)
    moved_EM = features_EM + 1e4
    moved_MN, moved_N = head_start(moved_EM, labels_E, method=method)
    np.testing.assert_allclose(moved_MN, kernel_MN, atol=1e-5)
    # Without subtracting the mean, kernels at the offset 1e7 would differ by about 0.1.
    far_MN, _ = head_start(features_EM + 1e7, labels_E, method=method)
    np.testing.assert_allclose(far_MN, kernel_MN, atol=1e-5)
    # Rounding to float32 kernels and biases changes logits of features of this size by about 0.001.
    logits_EN = moved_EM @ moved_MN.astype(float) + moved_N
    expected_EN = features_EM @ kernel_MN + bias_N
    np.testing.assert_allclose(log_softmax(logits_EN), log_softmax(expected_EN), atol=0.02)
    # Two heads get batches with different means. After a merge, the kernel equals the kernel of a single head.
    heads = HeadStart(method, seed=1), HeadStart(method, seed=2)
    for number, part in enumerate(np.array_split(np.argsort(features_EM[:, 0]), 4)):
        heads[number % 2].add(moved_EM[part], labels_E[part])
    heads[0].merge(heads[1])
    np.testing.assert_allclose(heads[0].finish()[0], kernel_MN, atol=1e-5)


def test_labels_are_not_expanded_to_one_hot_arrays():
    """Labels do not become one-hot arrays, which would take 1.6 GB for 10,000 examples and 20,000 outputs."""
    rng = np.random.default_rng(0)
    tracemalloc.start()
    features_EM, labels_E = rng.random((10_000, 4)), rng.integers(0, 20_000, 10_000)
    kernel_MN, _ = head_start(features_EM, labels_E, outputs=20_000, scale=1.0)
    assert kernel_MN.shape == (4, 20_000)
    assert tracemalloc.get_traced_memory()[1] < 50e6
    tracemalloc.stop()


@pytest.mark.parametrize("penalty", [0.5, 100.0])
def test_ridge_equals_scikit_learn(digits, penalty):
    features_EM, labels_E = digits
    kernel_MN, bias_N = head_start(
        features_EM, labels_E, method="ridge", smoothing=penalty, scale=1.0
    )
    peer = RidgeClassifier(alpha=penalty).fit(features_EM, labels_E)
    np.testing.assert_allclose(kernel_MN.T, peer.coef_, atol=1e-5)
    np.testing.assert_allclose(bias_N, peer.intercept_, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_weights_and_soft_labels_equal_repeated_examples(digits, method):
    features_EM, labels_E = digits[0][:300], digits[1][:300]
    weights_E = np.random.default_rng(0).integers(0, 3, 300)
    copies = np.repeat(np.arange(300), weights_E)
    expected = head_start(features_EM[copies], labels_E[copies], method=method, scale=1.0)
    weighted = head_start(features_EM, labels_E, method=method, weights=weights_E, scale=1.0)
    # Each example occurs twice, with its digit and with the next digit. The soft label gives each of the two digits
    # 1/2.
    next_E = (labels_E + 1) % 10
    shares_EN = (np.eye(10)[labels_E] + np.eye(10)[next_E]) / 2
    twice = head_start(
        np.concatenate([features_EM] * 2),
        np.concatenate([labels_E, next_E]),
        method=method,
        weights=np.full(600, 0.5),
        scale=1.0,
    )
    soft = head_start(features_EM, shares_EN, method=method, scale=1.0)
    for found, wanted in ((weighted, expected), (soft, twice)):
        for array, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(array, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", [sparse.csr_matrix, sparse.coo_array, jnp.asarray])
def test_array_types_give_equal_heads(digits, method, kind: Callable):
    features_EM, labels_E = digits
    found = head_start(kind(features_EM), labels_E, method=method)
    for array, wanted in zip(found, head_start(features_EM, labels_E, method=method), strict=True):
        np.testing.assert_allclose(array, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_merged_heads_equal_one_head(digits, method):
    """The examples are sorted by digit, so each batch has few digits. The digit 9 is only in late batches."""
    order = np.argsort(digits[1], kind="stable")
    features_EM, labels_E = digits[0][order], digits[1][order]
    heads = [HeadStart(method, seed=seed) for seed in (0, 1)]
    for number, start in enumerate(range(0, len(labels_E), 128)):
        part = slice(start, start + 128)
        heads[number % 2].add(features_EM[part], labels_E[part])
    heads[0].merge(heads[1])
    for array, wanted in zip(
        heads[0].finish(), head_start(features_EM, labels_E, method=method), strict=True
    ):
        np.testing.assert_allclose(array, wanted, rtol=1e-4, atol=1e-5)


def test_the_sample_for_the_scale_is_drawn_from_all_batches(digits, monkeypatch):
    monkeypatch.setattr(HeadStart, "SAMPLE", 500)
    order = np.argsort(digits[1], kind="stable")
    features_EM, labels_E = digits[0][order], digits[1][order]
    head = HeadStart("lda", outputs=10)
    for start in range(0, len(labels_E), 100):
        head.add(features_EM[start : start + 100], labels_E[start : start + 100])
    counts_N = head._sample.shares_SN.sum(0)
    assert counts_N.sum() == 500
    assert (abs(counts_N - 50) < 28).all()  # over four standard deviations of a digit's count
    whole = head_start(features_EM, labels_E, method="lda")
    np.testing.assert_allclose(head.finish()[0], whole[0], rtol=0.3, atol=1e-3)


def test_shift_to_negative_features_changes_no_logits_of_explicit_heads(digits):
    """The shift makes features negative. head_start subtracts each minimum; the bias compensates for it."""
    features_EM, labels_E = digits
    assert (features_EM.min(0) == 0).all()
    shift_M = np.random.default_rng(0).uniform(0, 9, features_EM.shape[1])
    kernel_MN, bias_N = head_start(features_EM, labels_E)
    moved_MN, moved_N = head_start(features_EM - shift_M, labels_E)
    np.testing.assert_allclose(
        (features_EM - shift_M) @ moved_MN + moved_N, features_EM @ kernel_MN + bias_N, atol=1e-3
    )
    hits_E = (features_EM @ kernel_MN + bias_N).argmax(1) == labels_E
    assert hits_E.mean() > 0.85


@pytest.mark.parametrize("method", METHODS)
def test_the_fitted_scale_has_the_least_cross_entropy(digits, method):
    features_EM, labels_E = digits
    kernel_MN, bias_N = head_start(features_EM, labels_E, method=method)
    plain_MN, _ = head_start(features_EM, labels_E, method=method, scale=1.0)
    logits_EN = features_EM @ kernel_MN + bias_N

    def loss(factor: float) -> float:
        return -log_softmax(factor * logits_EN)[np.arange(len(labels_E)), labels_E].mean()

    assert loss(1.0) < min(loss(0.95), loss(1.05))
    ratio = kernel_MN / plain_MN
    np.testing.assert_allclose(ratio, ratio.mean(), rtol=1e-4)


ROWS = np.ones((3, 2))
TWINS = np.array([[1.0, 1.0], [2.0, 2.0], [4.0, 4.0], [8.0, 8.0]])


@pytest.mark.parametrize(
    ("features", "labels", "options", "message"),
    [
        (np.ones(3), [0, 1, 0], {}, "shape"),
        (np.ones((0, 2)), [], {}, "no example has a weight above 0"),
        (np.ones((3, 0)), [0, 1, 0], {}, "at least one column"),
        (ROWS * 1j, [0, 1, 0], {}, "real numbers"),
        (sparse.csr_array(ROWS * 1j), [0, 1, 0], {}, "features must be an array of real numbers"),
        (ROWS, [[0], [1], [0]], {}, "have fewer than 2 columns"),
        (ROWS, np.ones((3, 0)), {"outputs": 1}, "have fewer than 2 columns"),
        (
            ROWS,
            sparse.csr_array(ROWS * 0.5j),
            {},
            "probabilities in labels must be an array of real",
        ),
        (
            ROWS,
            sparse.coo_array([0, 1, 0]),
            {"weights": [0] * 3},
            "no example has a weight above 0",
        ),
        (ROWS, [0, 1, 0], {"outputs": 2.5}, "outputs must be a whole number"),
        (ROWS, [0, 1, 0], {"outputs": True}, "outputs must be a whole number"),
        (ROWS, [0, 1, 0], {"scale": "auto"}, "scale, if it is not 'fit', must be a finite"),
        (ROWS, [0, 1, 0], {"scale": math.inf}, "scale, if it is not 'fit', must be a finite"),
        (ROWS, [0, 1, 0], {"scale": np.ones(2)}, "scale, if it is not 'fit', must be a finite"),
        (ROWS, [0, 1, 0], {"smoothing": math.inf}, "smoothing must be a finite"),
        (ROWS, [0, 1, 0], {"smoothing": None}, "smoothing must be a finite"),
        (ROWS, [0, 1, 0], {"method": ["lda"]}, "method=.* did you mean lda"),
        (ROWS, [0, 1, 0], {"weights": ["a"] * 3}, "weights must be an array of real numbers"),
        (ROWS, [0, 1, 0], {"weights": [1j] * 3}, "weights must be an array of real numbers"),
        ([["a"], ["b"]], [0, 1], {}, "features must be an array of real numbers"),
        ([[1, 2], [3]], [0, 1], {}, "features must be an array of real numbers"),
        (None, [0, 1], {}, "features must have the shape"),
        (ROWS, None, {}, r"labels must have the shape \(3,\) or .*, got \(\)"),
        (ROWS, ["a", "b", "a"], {}, "must be integers, got <U1"),
        (ROWS, [[0], [1, 2], [0]], {}, "labels must be an array of real numbers"),
        (ROWS, [["a", "b"]] * 3, {}, "probabilities in labels must be an array of real numbers"),
        (ROWS, [0, 1], {}, r"labels must have the shape \(3,\) or .*, got \(2,\)"),
        (ROWS, [0.0, 1.0, 0.0], {}, "must be integers, got float64"),
        (ROWS, [0, -1, 1], {}, "labels must be at least 0, got -1"),
        (ROWS, [-3, -3, -2], {}, "labels must be at least 0, got -3"),
        (ROWS, [0, 1, 2], {"outputs": 2}, "labels must be below outputs=2, got 2"),
        (ROWS, np.full((3, 2), 0.7), {}, "add up to 1 for each example, got the sum 1.4"),
        (ROWS, [[1.5, -0.5]] * 3, {}, "probabilities in labels must be at least 0, got -0.5"),
        (
            ROWS,
            np.full((3, 2), 0.5),
            {"outputs": 3},
            "labels have 2 columns, but outputs=3: set outputs=2, or None",
        ),
        (ROWS * np.nan, [0, 1, 0], {}, "one is NaN or infinite"),
        (sparse.csr_array(ROWS * np.inf), [0, 1, 0], {}, "one is NaN or infinite"),
        (ROWS, [0, 1, 0], {"weights": [1, -1, 1]}, "at least 0, got -1"),
        (ROWS, [0, 1, 0], {"weights": [0, 0, 0]}, "no example has a weight above 0"),
        (ROWS, [0, 1, 0], {"weights": [1]}, r"weights must have the shape \(3,\)"),
        (ROWS, [0, 1, 0], {"method": "svm"}, "svm"),
        (ROWS, [0, 1, 0], {"smoothing": -1}, "smoothing"),
        (ROWS, [0, 1, 0], {"scale": 0.0}, "scale"),
        (ROWS, [0, 1, 0], {"outputs": 0}, "outputs"),
        (ROWS, [0, 1, 0], {"method": "lda", "smoothing": 0}, "vary within a class"),
        (ROWS, [0, 1, 0], {"method": "lda"}, "vary within a class"),
        (TWINS, [0, 1, 0, 1], {"method": "lda", "smoothing": 0}, "linearly dependent"),
    ],
)
def test_invalid_arguments_raise_user_errors(features, labels, options, message):
    with pytest.raises(UserError, match=message):
        head_start(features, labels, **options)


def test_incompatible_batches_and_heads_raise_user_errors():
    head = HeadStart()
    head.add(np.ones((2, 3)), [0, 1])
    with pytest.raises(UserError, match="got 2 after 3"):
        head.add(np.ones((2, 2)), [0, 1])
    other = HeadStart()
    other.add(np.ones((2, 2)), [0, 1])
    with pytest.raises(UserError, match="got 2 after 3"):
        head.merge(other)
    for options in ({"method": "ridge"}, {"outputs": 4}, {"smoothing": 2.0}, {"scale": 1.0}):
        ((name, value),) = options.items()
        with pytest.raises(UserError, match=f"merge a head with {name}={value!r} into a head with"):
            head.merge(HeadStart(**options))
    with pytest.raises(UserError, match="no example has a weight above 0"):
        HeadStart().finish()
    for other, named in ((None, "None"), (head, "this head")):
        with pytest.raises(UserError, match=f"other must be another HeadStart, got {named}"):
            head.merge(other)
    with pytest.raises(UserError, match="seed must be a whole number of at least 0, got -1"):
        HeadStart(seed=-1)


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray, sparse.csr_array, np.ndarray.tolist])
@pytest.mark.parametrize(("priming", "smoothing"), [(1, 1.0), (3.5, 0.25), (jnp.float32(8), 0)])
def test_head_from_counts_is_eq_3(kind, priming, smoothing):
    counts_MN = np.random.default_rng(0).poisson(3.0, (7, 5)) + (smoothing == 0)
    found_MN = head_from_counts(kind(counts_MN), priming, smoothing=smoothing)
    f_MN, k = counts_MN + smoothing, float(priming)
    expected_MN = np.log(f_MN) - (k - 1) / k * np.log(f_MN.sum(0))
    np.testing.assert_allclose(found_MN, expected_MN, atol=1e-5)
    assert found_MN.dtype == np.float32 and isinstance(found_MN, np.ndarray)


def test_head_from_counts_equals_head_start(digits):
    pixels_EM, labels_E = digits
    counts_MN = pixels_EM.T @ np.eye(10)[labels_E]
    kernel_MN, bias_N = head_start(pixels_EM, labels_E, scale=1.0)
    found_MN = head_from_counts(counts_MN, counts_MN.sum() / len(labels_E))
    np.testing.assert_allclose(found_MN, kernel_MN, atol=1e-4)
    assert not bias_N.any()


@pytest.mark.parametrize(
    ("counts", "options", "complaint"),
    [
        ([[1, -1]], {}, "counts must be at least 0, got -1"),
        ([[1, np.nan]], {}, "counts must be finite numbers, but one is NaN or infinite: correct"),
        (sparse.csr_array([[1, np.inf]]), {}, "counts must be finite numbers, but one is"),
        ([1, 2], {}, r"counts must have the shape \(features, outputs\), .* got \(2,\)"),
        (np.ones((3, 0)), {}, r"with at least one column, got \(3, 0\)"),
        ([["a", "b"]], {}, "counts must be an array of real numbers"),
        ([[1, 2]], {"priming": "2"}, "priming must be a number, got '2'"),
        ([[1, 2]], {"priming": 0.5}, "priming number K .* must be a finite number of at least 1"),
        ([[1, 2]], {"smoothing": -1}, "smoothing must be a finite number of at least 0, got -1"),
    ],
)
def test_wrong_counts_raise_user_error(counts, options, complaint):
    with pytest.raises(UserError, match=complaint):
        head_from_counts(counts, **{"priming": 2, **options})


@pytest.mark.medium
def test_examples_run(capsys, tmp_path, monkeypatch):
    """The folder that the example reads has a small random BERT."""
    write_small_bert(tmp_path / "all-MiniLM-L6-v2")
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[2] / "explicit_opt" / "PYTHON.md").read_text()
    names: dict = {}
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(code, "PYTHON.md", "exec"), names)
    printed = map(float, re.findall(r"[\d.]+", capsys.readouterr().out))
    of_digits, *of_bigrams, of_texts = printed
    assert of_digits > 0.9 and of_bigrams == [0.75, 0.25, 0.25, 0.75] and of_texts == 1
    features_EM, labels_E = names["features"], names["labels"]
    assert ((features_EM @ names["kernel"] + names["bias"]).argmax(1) == labels_E).mean() > 0.95
    logits_EN = names["layer"](jnp.asarray(features_EM))
    assert (np.asarray(logits_EN).argmax(1) == labels_E).mean() > 0.9
    before, after = names["values"].trainable, names["trainable"]
    assert not np.array_equal(before["layers/0/kernel"], after["layers/0/kernel"])
