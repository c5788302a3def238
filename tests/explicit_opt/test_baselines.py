"""Baselines of Figure 2: agreement with scikit-learn, optimality, an error without convergence, and kept results."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from common.errors import UserError
from common.sharding import make_mesh
from configs import mnist_explicit
from explicit_opt import baselines
from explicit_opt.digits import Digits


@pytest.fixture(scope="module")
def task() -> Digits:
    config = mnist_explicit.get_config("tiny")
    return Digits(config, make_mesh({"data": 1}, jax.devices()[:1]))


def test_baselines_of_the_scikit_learn_digits(task):
    """LDA has the test accuracy of scikit-learn's LDA within 1 point.

    Logistic regression has a lower test loss and a higher test accuracy than LDA.
    """
    found = baselines.baselines(task)
    (first, lda), (second, converged) = found.items()
    assert first == "LDA, one pass" and second.startswith("logistic regression, converged (C = ")
    # Constant pixels make the covariance singular, so scikit-learn's LDA needs shrinkage.
    theirs = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=1e-3)
    theirs.fit(task.features("train"), task.splits["train"][1])
    test = task.features("test"), task.splits["test"][1]
    assert lda["accuracy"] == pytest.approx(100 * theirs.score(*test), abs=1.0)
    assert converged["loss"] < lda["loss"] and converged["accuracy"] > lda["accuracy"]


def test_no_small_step_lowers_the_penalized_loss(task):
    """Twenty small random changes of the weights all raise the objective that scikit-learn minimizes.

    The objective is C times the cross-entropy summed over examples, plus half the sum of squared weights.
    """
    features, labels = task.features("train").astype(np.float64), task.splits["train"][1]
    model = baselines.logistic_regression(features, labels, 0.1)

    def objective(weights):
        logits = features @ weights.T + model.intercept_
        loss = baselines.measure(logits, labels)["loss"] * len(labels)
        return 0.1 * loss + 0.5 * (weights**2).sum()

    best = objective(model.coef_)
    steps = np.random.default_rng(0).normal(scale=1e-2, size=(20, *model.coef_.shape))
    assert all(objective(model.coef_ + step) > best for step in steps)


def test_logistic_regression_that_does_not_converge_is_an_error(task, monkeypatch):
    monkeypatch.setattr(baselines, "_MOST_ITERATIONS", 2)
    with pytest.raises(UserError, match="has not converged"):
        baselines.baselines(task)


def test_kept_baselines_need_the_same_images_and_labels(tmp_path, monkeypatch):
    computed = []
    monkeypatch.setattr(baselines, "baselines", lambda task: computed.append(task) or {})
    pixels, labels = np.zeros((4, 9), np.uint8), np.arange(4, dtype=np.int32)
    tasks = [SimpleNamespace(splits={"test": (pixels, labels + n)}) for n in (0, 0, 1)]
    for task in tasks:
        baselines.kept_baselines(task, tmp_path / "kept.json")
    assert computed == [tasks[0], tasks[2]]
