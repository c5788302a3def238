"""How well classes are told apart.

M examples.
"""

import numpy as np


def accuracy(labels_M: np.ndarray, guesses_M: np.ndarray) -> float:
    """Share of right guesses, in percent."""
    return 100 * float(np.mean(labels_M == guesses_M))


def weighted_f1(labels_M: np.ndarray, guesses_M: np.ndarray) -> float:
    """F1 of every class, averaged by how many examples have it, in percent; 0 for a class that is never guessed."""
    from sklearn.metrics import f1_score

    return 100 * float(f1_score(labels_M, guesses_M, average="weighted"))
