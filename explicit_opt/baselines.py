"""Baselines that the paper lacks: linear discriminant analysis (one pass over the data) and logistic regression."""

import warnings
from hashlib import sha256
from pathlib import Path

import numpy as np
from scipy.special import log_softmax

from common.cached import cached_json
from common.errors import UserError
from explicit_opt.digits import Digits
from explicit_opt.heads import head_start

PENALTIES = (0.01, 0.1, 1.0, 10.0)
"""Candidates for the inverse penalty (scikit-learn's C). `baselines` takes the C with the least validation loss."""

_MOST_ITERATIONS = 10_000


def baselines(task: Digits) -> dict[str, dict[str, float]]:
    """Returns {name of a baseline: its test metrics (`measure`)}. The metrics do not depend on a seed.

    Raises a UserError if logistic regression does not converge, or `head_start` fails.
    """
    train, valid, test = (
        (task.features(split), task.splits[split][1]) for split in ("train", "valid", "test")
    )
    kernel, bias = head_start(*train, method="lda", outputs=task.outputs)
    lda = {"LDA, one pass": measure(test[0] @ kernel + bias, test[1])}
    fitted = [logistic_regression(*train, penalty) for penalty in PENALTIES]
    losses = [measure(model.decision_function(valid[0]), valid[1])["loss"] for model in fitted]
    best = int(np.argmin(losses))
    name = f"logistic regression, converged (C = {PENALTIES[best]:g})"
    return {**lda, name: measure(fitted[best].decision_function(test[0]), test[1])}


def kept_baselines(task: Digits, path: Path) -> dict[str, dict[str, float]]:
    """Returns `baselines(task)`, cached in the JSON file `path` until the data change."""
    data = {
        split: [sha256(array).hexdigest() for array in arrays]
        for split, arrays in task.splits.items()
    }
    return cached_json(path, data, lambda: baselines(task))


def logistic_regression(features_EM: np.ndarray, labels_E: np.ndarray, penalty: float):
    """Returns scikit-learn's logistic regression with C = `penalty`. Raises a UserError if it does not converge."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(C=penalty, max_iter=_MOST_ITERATIONS)
    with warnings.catch_warnings():
        # Ignore the warning, because the UserError below replaces it.
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(features_EM.astype(np.float64), labels_E)
    if model.n_iter_.max() >= _MOST_ITERATIONS:
        raise UserError(
            f"logistic regression (C = {penalty:g}) has not converged in {_MOST_ITERATIONS:,} iterations:"
            " increase _MOST_ITERATIONS in explicit_opt/baselines.py"
        )
    return model


def measure(logits_EN: np.ndarray, labels_E: np.ndarray) -> dict[str, float]:
    """Returns {"accuracy": accuracy in percent, "loss": mean cross-entropy in nats} of the logits of a classifier."""
    logs_EN = log_softmax(logits_EN, axis=1)
    return {
        "accuracy": 100 * float(np.mean(logs_EN.argmax(1) == labels_E)),
        "loss": float(-np.mean(logs_EN[np.arange(len(labels_E)), labels_E])),
    }
