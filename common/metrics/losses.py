"""Losses of a language model on parts of a text.

Shape letters of this module: B resamples, M parts of the text, S statistics.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from common.metrics.predictions import Predictions, perplexity


@dataclass(frozen=True)
class Losses(Predictions):
    """Losses of a language model on parts of a text: windows of bytes or tokens, or rows of masked tokens.

    Attributes:
      nats_M: loss summed over each part, float64.
      weights_M: number of predicted bytes, tokens or masked tokens in each part.
      hits_M: number of correct predictions in each part; an empty array if correct predictions are not counted.
      words_M: number of words in each part; an empty array if words are not counted.
      unit: "byte" or "token", the unit of `weights_M`.
    """

    kind: ClassVar[str] = "losses"
    nats_M: np.ndarray
    weights_M: np.ndarray
    hits_M: np.ndarray
    words_M: np.ndarray
    unit: str

    def __len__(self) -> int:
        return len(self.nats_M)

    @property
    def pairing(self) -> tuple:
        return *super().pairing, self.unit

    @property
    def statistics(self) -> np.ndarray:
        """Statistics of each part, (M, 4): loss in nats, weight, number of correct predictions, number of words."""
        zeros_M = np.zeros(len(self.nats_M))
        hits_M, words_M = (x if len(x) else zeros_M for x in (self.hits_M, self.words_M))
        return np.column_stack([self.nats_M, self.weights_M, hits_M, words_M]).astype(float)

    def measure(self, sums_BS: np.ndarray) -> dict[str, np.ndarray]:
        """Returns bits and nats per byte if `unit` is "byte", else perplexity and loss in nats per token.

        Adds the accuracy in percent if correct predictions are counted, and perplexity per word if words are counted.
        """
        nats_B, weights_B, hits_B, words_B = sums_BS.T
        loss_B = nats_B / weights_B
        if self.unit == "byte":
            found = {"bits_per_byte": loss_B / np.log(2), "nats_per_byte": loss_B}
        else:
            found = {"perplexity": perplexity(loss_B), "loss": loss_B}
        if len(self.hits_M):
            found["accuracy"] = 100 * hits_B / weights_B
        if len(self.words_M):
            found["perplexity_per_word"] = perplexity(nats_B / np.maximum(words_B, 1))
        return found

    def describe(self, example: int) -> dict[str, str]:
        share = self.nats_M[example] / max(self.weights_M[example], 1)
        return {f"{self.unit}s": f"{self.weights_M[example]:.0f}", "nats each": f"{share:.3f}"}

    @property
    def costs_M(self) -> np.ndarray:
        return self.nats_M / np.maximum(self.weights_M, 1)
