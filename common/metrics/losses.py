"""Losses of a language model on parts of a text.

Shape letters of this module: B resamples, E parts of the text, S statistics.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from common.metrics.predictions import Predictions, perplexity


@dataclass(frozen=True)
class Losses(Predictions):
    """Losses of a language model on parts of a text: windows of bytes or tokens, or rows with masked tokens.

    Attributes:
      nats_E: loss in nats, summed over the predictions of each part, float64.
      weights_E: number of predicted bytes, tokens or masked tokens in each part.
      hits_E: number of correct predictions in each part; an empty array if correct predictions are not counted.
      words_E: number of words in each part; an empty array if words are not counted.
      unit: "byte" or "token", the unit of `weights_E`.
    """

    kind: ClassVar[str] = "losses"
    nats_E: np.ndarray
    weights_E: np.ndarray
    hits_E: np.ndarray
    words_E: np.ndarray
    unit: str

    def __len__(self) -> int:
        return len(self.nats_E)

    @property
    def pairing(self) -> tuple:
        return *super().pairing, self.unit

    @property
    def statistics(self) -> np.ndarray:
        """Statistics of each part, (E, 4): loss in nats, weight, number of correct predictions, number of words."""
        zeros_E = np.zeros(len(self.nats_E))
        hits_E, words_E = (x if len(x) else zeros_E for x in (self.hits_E, self.words_E))
        return np.column_stack([self.nats_E, self.weights_E, hits_E, words_E]).astype(float)

    def measure(self, sums_BS: np.ndarray) -> dict[str, np.ndarray]:
        """Returns bits and nats per byte if `unit` is "byte", else perplexity and loss in nats per token.

        Also returns the accuracy in percent if `hits_E` is not empty, and the perplexity per word if `words_E` is not
        empty.
        """
        nats_B, weights_B, hits_B, words_B = sums_BS.T
        loss_B = nats_B / weights_B
        if self.unit == "byte":
            found = {"bits_per_byte": loss_B / np.log(2), "nats_per_byte": loss_B}
        else:
            found = {"perplexity": perplexity(loss_B), "loss": loss_B}
        if len(self.hits_E):
            found["accuracy"] = 100 * hits_B / weights_B
        if len(self.words_E):
            found["perplexity_per_word"] = perplexity(nats_B / np.maximum(words_B, 1))
        return found

    def describe(self, example: int) -> dict[str, str]:
        share = self.nats_E[example] / max(self.weights_E[example], 1)
        return {f"{self.unit}s": f"{self.weights_E[example]:.0f}", "nats each": f"{share:.3f}"}

    @property
    def cost_unit(self) -> str:
        return f"nats per {self.unit}"

    @property
    def costs_E(self) -> np.ndarray:
        return self.nats_E / np.maximum(self.weights_E, 1)
