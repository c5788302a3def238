"""Weighted F1 of predicted classes, computed by hand."""

import warnings

import numpy as np
import pytest

from perception.weighted_f1 import weighted_f1


def test_weighted_f1_of_a_worked_example():
    """Class 0 has precision 2/3 and recall 1. Class 1 has recall 0. Class 2 has precision 1/2 and recall 1."""
    labels, guesses = np.array([0, 0, 1, 1, 2]), np.array([0, 0, 0, 2, 2])
    expected = 100 * (2 * 0.8 + 2 * 0 + 1 * 2 / 3) / 5
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # A class that is never predicted must not cause a warning.
        assert weighted_f1(labels, guesses) == pytest.approx(expected)


def test_weighted_f1_weights_classes_by_their_labels():
    """Class 0 has precision 1, recall 3/4 and F1 6/7. Class 1 has precision 1/2, recall 1 and F1 2/3."""
    labels, guesses = np.array([0, 0, 0, 0, 1]), np.array([0, 0, 0, 1, 1])
    assert weighted_f1(labels, guesses) == pytest.approx(100 * (4 * 6 / 7 + 2 / 3) / 5)
