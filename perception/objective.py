"""Loss, label weights, thresholds and validation score for examples with one or several classes.

With one class per example, labels are class indices, (E,). With several classes (multi-label), labels are 0 or 1 for
each class, (E, C), and a class is predicted if its probability reaches its threshold.

Shape letters of this module: B rows of a batch, E examples, C classes.
"""

import jax
import jax.numpy as jnp
import numpy as np

from common.model.loss import cross_entropy
from perception.weighted_f1 import weighted_f1


def balanced_weights(labels: np.ndarray) -> np.ndarray:
    """Returns weights that give all classes equal total weight: float32, with the shape of `labels`.

    The weight of a label is examples / (classes with examples * examples of the label's class). With several classes
    per example, the formula applies to each column, with the classes 0 and 1. The mean weight is 1.
    """
    from sklearn.utils.class_weight import compute_sample_weight

    columns = labels.reshape(len(labels), -1).T
    weights = [compute_sample_weight("balanced", column) for column in columns]
    return np.stack(weights, axis=-1).reshape(labels.shape).astype(np.float32)


def loss(logits_BC: jax.Array, labels: jax.Array, weights: jax.Array | float = 1.0) -> jax.Array:
    """Returns the weighted cross-entropy of each row, (B,).

    Multi-label: the mean over the classes of the weighted binary cross-entropy.

    Args:
      weights: weights of the labels, with the shape of `labels`, or one weight for all labels.
    """
    if labels.ndim == 1:
        return cross_entropy(logits_BC, labels) * weights
    with jax.named_scope("loss"):
        signs_BC = jnp.where(labels == 1, 1.0, -1.0)
        return (weights * jax.nn.softplus(-signs_BC * logits_BC.astype(jnp.float32))).mean(-1)


def choose_thresholds(labels_EC: np.ndarray, chances_EC: np.ndarray) -> tuple[float, ...]:
    """Returns for each class the threshold with the best F1 on these (validation) examples.

    A threshold is halfway between two successive probabilities of the class, or between 0 and its smallest probability.
    The threshold of a class without examples is 0.5.
    """
    return tuple(map(_threshold, labels_EC.T, np.asarray(chances_EC, np.float64).T))


def _threshold(labels_E: np.ndarray, chances_E: np.ndarray) -> float:
    from sklearn.metrics import precision_recall_curve

    if not labels_E.any():
        return 0.5
    precision, recall, chances = precision_recall_curve(labels_E, chances_E)
    f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-12)
    best = int(f1[:-1].argmax())  # the last point has no positive predictions
    below = chances[best - 1] if best else 0.0
    return float((below + chances[best]) / 2)


def average_precisions(labels_EC: np.ndarray, chances_EC: np.ndarray) -> np.ndarray:
    """Returns the average precision of each class in percent, (C,); NaN for a class without examples."""
    from sklearn.metrics import average_precision_score

    pairs = zip(labels_EC.T, chances_EC.T.astype(np.float64), strict=True)
    found = [average_precision_score(y, p) if y.any() else np.nan for y, p in pairs]
    return 100 * np.array(found)


def score(labels: np.ndarray, logits_EC: np.ndarray) -> float:
    """Returns the weighted F1 in percent of predicting the most probable class.

    Multi-label: of predicting the classes that reach thresholds chosen on the same examples.
    """
    if labels.ndim == 1:
        return weighted_f1(labels, logits_EC.argmax(-1))
    from scipy.special import expit

    chances_EC = expit(logits_EC.astype(np.float64))
    return weighted_f1(labels, chances_EC >= np.asarray(choose_thresholds(labels, chances_EC)))
