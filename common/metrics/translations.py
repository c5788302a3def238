"""Translations of sentences, scored by BLEU.

Shape letters of this module: B resamples, E sentences, S statistics.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from common.metrics.bleu import bleu_metric, bleu_of, sentence_statistics
from common.metrics.predictions import Predictions, perplexity

if TYPE_CHECKING:
    from sacrebleu.metrics import BLEU


@dataclass(frozen=True)
class Translations(Predictions):
    """Translations of test sentences, each with one reference.

    Attributes:
      hypotheses, references: one translation and one reference for each sentence.
      nats_E: loss of each reference under teacher forcing, summed over its tokens.
      tokens_E: number of tokens in each reference.
      lowercase, tokenize: options of `common.metrics.bleu.bleu_metric`.
    """

    kind: ClassVar[str] = "translations"
    cost_unit: ClassVar[str] = "minus sentence BLEU"
    hypotheses: tuple[str, ...]
    references: tuple[str, ...]
    nats_E: np.ndarray
    tokens_E: np.ndarray
    lowercase: bool
    tokenize: str

    def __len__(self) -> int:
        return len(self.hypotheses)

    @property
    def pairing(self) -> tuple:
        return *super().pairing, self.lowercase, self.tokenize

    def metric(self) -> "BLEU":
        """Returns sacrebleu's BLEU metric with the options of these translations."""
        return bleu_metric(self.lowercase, self.tokenize)

    @property
    def statistics(self) -> np.ndarray:
        """Statistics of each sentence, (E, 12): sacrebleu's 10 counts, loss in nats, number of tokens."""
        counts_ES = sentence_statistics(self.metric(), self.hypotheses, self.references)
        return np.column_stack([counts_ES, self.nats_E, self.tokens_E]).astype(float)

    def measure(self, sums_BS: np.ndarray) -> dict[str, np.ndarray]:
        """Returns BLEU (0 to 100), the loss in nats per reference token, and the perplexity."""
        metric = self.metric()
        loss_B = sums_BS[:, -2] / sums_BS[:, -1]
        return {
            "bleu": np.array([bleu_of(metric, sums_S) for sums_S in sums_BS[:, :-2]]),
            "loss": loss_B,
            "perplexity": perplexity(loss_B),
        }

    def describe(self, example: int) -> dict[str, str]:
        return {"reference": self.references[example], "translation": self.hypotheses[example]}

    @property
    def costs_E(self) -> np.ndarray:
        """Negative sentence BLEU of each translation."""
        scores = zip(self.hypotheses, self.references, strict=True)
        metric = self.metric()
        metric.effective_order = True  # recommended by sacrebleu for the BLEU of a sentence
        return np.array([-metric.sentence_score(mine, [right]).score for mine, right in scores])
