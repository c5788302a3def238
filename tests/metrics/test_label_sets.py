"""Metrics of predicted sets of classes, against scikit-learn."""

import numpy as np
import pytest
from sklearn import metrics

from common.metrics.kinds import load
from common.metrics.label_sets import LabelSets
from common.report.significance import resample

NAMES = ("a", "b", "c", "d")
THRESHOLDS = (0.5, 0.3, 0.6, 0.5)


def predictions(seed: int = 0) -> LabelSets:
    """Returns predictions whose last class is neither a label nor predicted."""
    generator = np.random.default_rng(seed)
    labels_EC = (generator.random((50, 4)) < [0.5, 0.3, 0.1, 0]).astype(np.uint8)
    logits_EC = generator.normal(2.0 * labels_EC - 1, 1.5)
    logits_EC[:, 3] = -9
    return LabelSets.of_logits("examples", labels_EC, logits_EC, THRESHOLDS, NAMES)


def test_metrics_of_sets_match_scikit_learn() -> None:
    found = predictions()
    truth, guessed = found.labels_EC, found.guesses_EC
    wanted = {
        f"{average}_f1": 100 * metrics.f1_score(truth, guessed, average=average, zero_division=0)
        for average in ("micro", "macro", "weighted")
    }
    wanted["accuracy"] = 100 * metrics.accuracy_score(truth, guessed)
    chances = found.probabilities_EC.astype(float)
    wanted["loss"] = np.mean(
        [metrics.log_loss(truth[:, n], chances[:, n], labels=[0, 1]) for n in range(4)]
    )
    assert found.metrics() == pytest.approx(wanted, rel=1e-3)
    assert not truth[:, 3].any() and not guessed[:, 3].any()


def test_class_is_predicted_at_or_above_its_threshold() -> None:
    found = predictions()
    np.testing.assert_array_equal(
        found.guesses_EC, found.probabilities_EC.astype(float) >= np.array(THRESHOLDS)
    )


def test_saved_sets_are_read_back(tmp_path) -> None:
    found = predictions()
    found.save(tmp_path / "predictions.npz")
    again = load(tmp_path / "predictions.npz")
    assert isinstance(again, LabelSets) and again.metrics() == found.metrics()
    assert (again.thresholds, again.names, again.pairing) == (THRESHOLDS, NAMES, found.pairing)
    assert len(again) == 50 and again.describe(0).keys() == {"labels", "prediction"}


def test_sets_can_be_resampled() -> None:
    """The mean over bootstrap resamples is near the value on all examples."""
    (resampled,) = resample([predictions()])
    for name, value in predictions().metrics().items():
        assert resampled[name].mean() == pytest.approx(value, rel=0.1), name


def test_metrics_of_a_single_example_at_its_threshold() -> None:
    """The probability of logit 0 is 0.5, which is also the threshold of class a."""
    labels_EC, logits_EC = np.array([[1, 0, 0, 0]]), np.array([[0, -9, -9, -9]], np.float32)
    found = LabelSets.of_logits("the test", labels_EC, logits_EC, THRESHOLDS, NAMES)
    assert found.metrics()["weighted_f1"] == 100 and found.examples == "the test"
    assert (found.probabilities_EC.dtype, found.nats_E.dtype) == (np.float16, np.float32)


def test_classes_of_an_example_are_named() -> None:
    labels_EC, logits_EC = np.array([[1, 1, 0, 0]]), np.full((1, 4), -9.0)
    found = LabelSets.of_logits("the test", labels_EC, logits_EC, THRESHOLDS, NAMES)
    assert found.describe(0) == {"labels": "a, b", "prediction": "(none)"}
