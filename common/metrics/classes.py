"""Classification metrics."""

import numpy as np


def weighted_f1(labels_E: np.ndarray, predictions_E: np.ndarray) -> float:
    """Returns the mean F1 in percent, weighted by the labels of each class; F1 of an unpredicted class is 0."""
    from sklearn.metrics import f1_score

    return 100 * float(f1_score(labels_E, predictions_E, average="weighted"))
