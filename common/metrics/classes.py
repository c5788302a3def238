"""Predictions of a classifier that gives each example one class.

Shape letters of this module: B resamples, M examples, N classes, S statistics.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from scipy import sparse

from common.metrics.predictions import Predictions


@dataclass(frozen=True)
class Classes(Predictions):
    """Predictions of a classifier.

    Attributes:
      labels_M, guesses_M: true and predicted classes, int32.
      probabilities_MN: probabilities of the classes, float16.
      nats_M: negative log-probability of the label, float32.
      names: names of the classes.
    """

    kind: ClassVar[str] = "classes"
    labels_M: np.ndarray
    probabilities_MN: np.ndarray
    guesses_M: np.ndarray
    nats_M: np.ndarray
    names: tuple[str, ...]

    @classmethod
    def of_log_probabilities(
        cls, examples: str, labels_M: np.ndarray, logs_MN: np.ndarray, names: tuple[str, ...]
    ) -> "Classes":
        """Makes predictions from `logs_MN`, the log-probabilities of all classes.

        Args:
          examples: fingerprint of the test examples and their labels.
          labels_M: true class of each example.
          names: names of the N classes.
        """
        at_M = np.arange(len(labels_M))
        return cls(
            examples,
            labels_M.astype(np.int32),
            np.exp(logs_MN).astype(np.float16),
            logs_MN.argmax(-1).astype(np.int32),
            -logs_MN[at_M, labels_M].astype(np.float32),
            names,
        )

    def __len__(self) -> int:
        return len(self.labels_M)

    @property
    def statistics(self) -> sparse.csr_array:
        """Statistics of each example, (M, 3N + 2).

        The columns are three one-hot blocks of N columns, the loss in nats, and a 1 that counts examples. The blocks
        are the true class if the prediction is correct, the predicted class, and the true class.
        """
        classes, count = len(self.names), len(self.labels_M)
        ones_M, at_M = np.ones(count), np.arange(count)
        hits_M = (self.guesses_M == self.labels_M).astype(float)
        entries = (
            (hits_M, self.labels_M),
            (ones_M, classes + self.guesses_M),
            (ones_M, 2 * classes + self.labels_M),
            (self.nats_M.astype(float), np.full(count, 3 * classes)),
            (ones_M, np.full(count, 3 * classes + 1)),
        )
        values, columns = (np.concatenate(parts) for parts in zip(*entries, strict=True))
        return sparse.csr_array((values, (np.tile(at_M, len(entries)), columns)))

    def measure(self, sums_BS: np.ndarray) -> dict[str, np.ndarray]:
        """Returns accuracy and weighted F1 in percent, and the loss in nats. A class without hits has F1 0."""
        hits_BN, guessed_BN, labelled_BN = np.split(sums_BS[:, :-2], 3, axis=1)
        nats_B, count_B = sums_BS[:, -2], sums_BS[:, -1]
        f1_BN = 2 * hits_BN / np.maximum(guessed_BN + labelled_BN, 1)
        return {
            "accuracy": 100 * hits_BN.sum(1) / count_B,
            "weighted_f1": 100 * (f1_BN * labelled_BN).sum(1) / count_B,
            "loss": nats_B / count_B,
        }

    def describe(self, example: int) -> dict[str, str]:
        guess = self.guesses_M[example]
        chance = float(self.probabilities_MN[example, guess])
        return {
            "label": self.names[self.labels_M[example]],
            "prediction": f"{self.names[guess]} ({chance:.2f})",
        }

    @property
    def costs_M(self) -> np.ndarray:
        return self.nats_M
