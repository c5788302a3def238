"""Predictions of a classifier that gives each example one class.

Shape letters of this module: B resamples, E examples, C classes, S statistics.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from scipy import sparse

from common.errors import check
from common.metrics.predictions import Predictions


@dataclass(frozen=True)
class Classes(Predictions):
    """Predictions of a classifier.

    Attributes:
      labels_E, guesses_E: indices of the true and predicted classes, int32.
      probabilities_EC: probabilities of the classes, float16.
      nats_E: negative log-probability of the label, float32.
      names: names of the classes.
    """

    kind: ClassVar[str] = "classes"
    labels_E: np.ndarray
    probabilities_EC: np.ndarray
    guesses_E: np.ndarray
    nats_E: np.ndarray
    names: tuple[str, ...]

    @classmethod
    def of_log_probabilities(
        cls, examples: str, labels_E: np.ndarray, logs_EC: np.ndarray, names: tuple[str, ...]
    ) -> "Classes":
        """Returns predictions of the class with the highest log-probability in `logs_EC`. Checks the labels."""
        labels_E, logs_EC = np.asarray(labels_E), np.asarray(logs_EC)
        known = labels_E.dtype.kind in "iu" and np.isin(labels_E, np.arange(len(names))).all()
        check(
            bool(known) and logs_EC.shape == (*labels_E.shape, len(names)),
            f"labels must be integers from 0 to {len(names) - 1}, each with a row of {len(names)} log-probabilities",
        )
        at_E = np.arange(len(labels_E))
        return cls(
            examples,
            labels_E.astype(np.int32),
            np.exp(logs_EC).astype(np.float16),
            logs_EC.argmax(-1).astype(np.int32),
            -logs_EC[at_E, labels_E].astype(np.float32),
            names,
        )

    def __len__(self) -> int:
        return len(self.labels_E)

    @property
    def statistics(self) -> sparse.csr_array:
        """Statistics of each example, (E, 3C + 2).

        The columns are three one-hot blocks of C columns, the loss in nats, and a 1 that counts examples. The blocks
        are the true class if it is predicted (else zeros), the predicted class, and the true class.
        """
        classes, count = len(self.names), len(self.labels_E)
        ones_E, at_E = np.ones(count), np.arange(count)
        hits_E = (self.guesses_E == self.labels_E).astype(float)
        entries = (
            (hits_E, self.labels_E),
            (ones_E, classes + self.guesses_E),
            (ones_E, 2 * classes + self.labels_E),
            (self.nats_E.astype(float), np.full(count, 3 * classes)),
            (ones_E, np.full(count, 3 * classes + 1)),
        )
        values, columns = (np.concatenate(parts) for parts in zip(*entries, strict=True))
        return sparse.csr_array((values, (np.tile(at_E, len(entries)), columns)))

    def measure(self, sums_BS: np.ndarray) -> dict[str, np.ndarray]:
        """Returns accuracy and weighted F1 in percent, and the loss in nats per example.

        The F1 of a class without a correct prediction is 0.
        """
        hits_BC, guessed_BC, labelled_BC = np.split(sums_BS[:, :-2], 3, axis=1)
        nats_B, count_B = sums_BS[:, -2], sums_BS[:, -1]
        f1_BC = 2 * hits_BC / np.maximum(guessed_BC + labelled_BC, 1)
        return {
            "accuracy": 100 * hits_BC.sum(1) / count_B,
            "weighted_f1": 100 * (f1_BC * labelled_BC).sum(1) / count_B,
            "loss": nats_B / count_B,
        }

    def describe(self, example: int) -> dict[str, str]:
        guess = self.guesses_E[example]
        chance = float(self.probabilities_EC[example, guess])
        return {
            "label": self.names[self.labels_E[example]],
            "prediction": f"{self.names[guess]} ({chance:.2f})",
        }
