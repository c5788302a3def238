"""Weighted F1, the metric of the paper's Table 1."""

import numpy as np


def weighted_f1(labels_E: np.ndarray, predictions_E: np.ndarray) -> float:
    """Returns the mean of the classes' F1 in percent, weighted by the number of labels of each class.

    The F1 of a class that is never predicted is 0. With several classes per example, both arguments are 0 or 1, (E, C).
    """
    from sklearn.metrics import f1_score

    return 100 * float(f1_score(labels_E, predictions_E, average="weighted"))
