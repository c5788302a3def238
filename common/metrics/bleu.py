"""Corpus BLEU by sacrebleu, computed from statistics of single sentences."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from sacrebleu.metrics import BLEU

# The tokenizers of sacrebleu that need no download and no other package.
TOKENIZERS = ("13a", "intl", "char", "zh", "none")


def bleu_metric(lowercase: bool, tokenize: str) -> "BLEU":
    """Returns sacrebleu's BLEU metric. `tokenize` is one of TOKENIZERS; "none" is for tokenised text."""
    from sacrebleu.metrics import BLEU

    # force=True suppresses sacrebleu's warning about tokenised text.
    return BLEU(lowercase=lowercase, tokenize=tokenize, force=tokenize == "none")


def sentence_statistics(
    metric: "BLEU", hypotheses: Sequence[str], references: Sequence[str]
) -> np.ndarray:
    """Returns lengths and n-gram counts of each sentence, (sentences, 10). `bleu_of` needs their sum."""
    # No public method returns these statistics. `sacrebleu.significance` uses this private method too.
    statistics = metric._extract_corpus_statistics(list(hypotheses), [list(references)])
    return np.asarray(statistics)


def bleu_of(metric: "BLEU", sums: np.ndarray) -> float:
    """Returns the corpus BLEU (0 to 100) from `sentence_statistics` summed over the sentences, (10,)."""
    return metric._compute_score_from_stats(sums.tolist()).score
