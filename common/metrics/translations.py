"""Translations of sentences, scored by sacrebleu's corpus BLEU from statistics of single sentences.

Shape letters of this module: B resamples, E sentences, S statistics.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from common.metrics.predictions import Predictions, perplexity

if TYPE_CHECKING:
    from sacrebleu.metrics import BLEU

# The tokenizers of sacrebleu that need no download and no other package.
TOKENIZERS = ("13a", "intl", "char", "zh", "none")


def bleu_metric(lowercase: bool, tokenize: str) -> "BLEU":
    """Returns sacrebleu's BLEU metric. `tokenize` is one of TOKENIZERS; "none" is for tokenised text."""
    from sacrebleu.metrics import BLEU

    # force=True suppresses sacrebleu's warning about tokenised text.
    return BLEU(lowercase=lowercase, tokenize=tokenize, force=tokenize == "none")


@dataclass(frozen=True)
class Translations(Predictions):
    """Translations of test sentences, each with one reference.

    Attributes:
      hypotheses, references: the translation and the reference of each sentence.
      nats_E: loss of each reference in nats under teacher forcing, summed over its `tokens_E` tokens.
      tokens_E: number of tokens of each reference in the run's vocabulary, including the end token.
      lowercase, tokenize: arguments of `bleu_metric`.
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
        return bleu_metric(self.lowercase, self.tokenize)

    @cached_property
    def statistics(self) -> np.ndarray:
        """Statistics of each sentence, (E, 12): sacrebleu's 10 counts, loss in nats, number of tokens."""
        # No public method returns these counts. `sacrebleu.significance` uses this private method too.
        counts_ES = self.metric()._extract_corpus_statistics(
            list(self.hypotheses), [list(self.references)]
        )
        return np.column_stack([counts_ES, self.nats_E, self.tokens_E]).astype(float)

    def measure(self, sums_BS: np.ndarray) -> dict[str, np.ndarray]:
        """Returns BLEU (0 to 100), the loss in nats per reference token, and the perplexity per reference token."""
        score = self.metric()._compute_score_from_stats
        loss_B = sums_BS[:, -2] / sums_BS[:, -1]
        return {
            "bleu": np.array([score(counts_S).score for counts_S in sums_BS[:, :-2].tolist()]),
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
