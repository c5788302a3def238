"""Predictions of a classifier that gives each example any number of classes (multi-label classification).

Shape letters of this module: B resamples, E examples, C classes, S statistics.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from common.metrics.predictions import Predictions


@dataclass(frozen=True)
class LabelSets(Predictions):
    """Predicted classes of the test examples, any number for each example.

    Attributes:
      labels_EC: 1 for each true class of an example, 0 for all other classes, uint8.
      guesses_EC: 1 for each predicted class of an example, 0 for all other classes, uint8.
      probabilities_EC: probabilities of the classes, float16.
      nats_E: binary cross-entropy in nats, averaged over the C classes, float32.
      thresholds: for each class, the smallest probability at which the class is predicted.
      names: names of the classes.
    """

    kind: ClassVar[str] = "label sets"
    labels_EC: np.ndarray
    guesses_EC: np.ndarray
    probabilities_EC: np.ndarray
    nats_E: np.ndarray
    thresholds: tuple[float, ...]
    names: tuple[str, ...]

    @classmethod
    def of_logits(
        cls,
        examples: str,
        labels_EC: np.ndarray,
        logits_EC: np.ndarray,
        thresholds: tuple[float, ...],
        names: tuple[str, ...],
    ) -> "LabelSets":
        """Returns predictions of each class whose probability, the sigmoid of its logit, reaches its threshold."""
        from scipy.special import expit

        labels_EC, logits_EC = np.asarray(labels_EC), np.asarray(logits_EC, np.float64)
        chances_EC = expit(logits_EC)
        signs_EC = np.where(labels_EC == 1, 1.0, -1.0)
        return cls(
            examples,
            labels_EC.astype(np.uint8),
            (chances_EC >= np.asarray(thresholds)).astype(np.uint8),
            chances_EC.astype(np.float16),
            np.logaddexp(0, -signs_EC * logits_EC).mean(-1).astype(np.float32),
            thresholds,
            names,
        )

    def __len__(self) -> int:
        return len(self.labels_EC)

    @property
    def statistics(self) -> np.ndarray:
        """Statistics of each example, (E, 3C + 3).

        The columns are three blocks of C columns (1 for correctly predicted, for predicted and for true classes), then
        1 for an exact match, the loss in nats, and a 1 that counts examples.
        """
        hits_EC = self.guesses_EC & self.labels_EC
        exact_E = (self.guesses_EC == self.labels_EC).all(-1)
        parts = hits_EC, self.guesses_EC, self.labels_EC, exact_E, self.nats_E, np.ones(len(self))
        return np.column_stack(parts).astype(float)

    def measure(self, sums_BS: np.ndarray) -> dict[str, np.ndarray]:
        """Returns accuracy (exact matches), micro, macro and weighted F1 in percent, and the loss in nats per class.

        The F1 of a class without a correct prediction is 0.
        """
        hits_BC, guessed_BC, labelled_BC = np.split(sums_BS[:, :-3], 3, axis=1)
        exact_B, nats_B, count_B = sums_BS[:, -3:].T
        f1_BC = 2 * hits_BC / np.maximum(guessed_BC + labelled_BC, 1)
        labels_B = np.maximum(labelled_BC.sum(1), 1)
        return {
            "accuracy": 100 * exact_B / count_B,
            "micro_f1": 200 * hits_BC.sum(1) / np.maximum((guessed_BC + labelled_BC).sum(1), 1),
            "macro_f1": 100 * f1_BC.mean(1),
            "weighted_f1": 100 * (f1_BC * labelled_BC).sum(1) / labels_B,
            "loss": nats_B / count_B,
        }

    def describe(self, example: int) -> dict[str, str]:
        return {
            "labels": self.named(self.labels_EC, example),
            "prediction": self.named(self.guesses_EC, example),
        }

    def named(self, sets_EC: np.ndarray, example: int) -> str:
        """Returns the names of an example's classes in `sets_EC`, such as "joy, love"; "(none)" if it has no class."""
        return ", ".join(self.names[n] for n in np.flatnonzero(sets_EC[example])) or "(none)"
