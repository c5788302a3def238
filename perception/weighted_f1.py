"""Weighted F1, the metric of the paper's Table 1, and thresholds of classes.

If an example may have several classes (multi-label), labels and predictions are 0 or 1 for each class, (E, C), and a
class is predicted if its probability reaches its threshold.
"""

import numpy as np


def weighted_f1(labels_E: np.ndarray, predictions_E: np.ndarray) -> float:
    """Returns the mean of the classes' F1 in percent, weighted by the number of labels of each class.

    The F1 of a class that is never predicted is 0. With one class per example, both arguments are class indices, (E,).
    """
    from sklearn.metrics import f1_score

    return 100 * float(f1_score(labels_E, predictions_E, average="weighted"))


def choose_thresholds(labels_EC: np.ndarray, chances_EC: np.ndarray) -> tuple[float, ...]:
    """Returns for each class the threshold with the best F1 on the given examples.

    A threshold is halfway between two probabilities of the class that are neighbours when sorted, or between 0 and the
    smallest probability. The threshold of a class without examples is 0.5.
    """
    return tuple(map(_threshold, labels_EC.T, np.asarray(chances_EC, np.float64).T))


def _threshold(labels_E: np.ndarray, chances_E: np.ndarray) -> float:
    from sklearn.metrics import precision_recall_curve

    if not labels_E.any():
        return 0.5
    precision, recall, chances = precision_recall_curve(labels_E, chances_E)
    f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-12)
    # The last point of the curve has no positive predictions, so it has no threshold.
    best = int(f1[:-1].argmax())
    below = chances[best - 1] if best else 0.0
    return float((below + chances[best]) / 2)


def score(labels: np.ndarray, logits_EC: np.ndarray) -> float:
    """Returns the weighted F1 in percent of predicting the most probable class.

    Multi-label: the weighted F1 of predicting the classes that reach thresholds chosen on the same examples.
    """
    if labels.ndim == 1:
        return weighted_f1(labels, logits_EC.argmax(-1))
    from scipy.special import expit

    chances_EC = expit(logits_EC.astype(np.float64))
    return weighted_f1(labels, chances_EC >= np.asarray(choose_thresholds(labels, chances_EC)))
