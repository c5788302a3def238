"""Corpus BLEU by sacrebleu, with its signature."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from common.errors import UserError

if TYPE_CHECKING:
    from sacrebleu.metrics import BLEU

# Without the tokenizers of sacrebleu that download a model or need another package.
TOKENIZERS = ("13a", "intl", "char", "zh", "none")


@dataclass(frozen=True)
class Bleu:
    """A BLEU score.

    Attributes:
      score: BLEU in percent, 0 to 100.
      signature: sacrebleu's, such as "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0".
    """

    score: float
    signature: str


def corpus_bleu(
    hypotheses: Sequence[str],
    references: Sequence[str],
    lowercase: bool = False,
    tokenize: str = "13a",
) -> Bleu:
    """Returns the corpus BLEU of translations with one reference each.

    Args:
      hypotheses: one translation per sentence.
      references: one per sentence.
      lowercase: ignore case.
      tokenize: one of `TOKENIZERS`; "none" is for text that is already tokenised.

    Raises:
      UserError: no sentences, unequal counts, or an unknown tokenizer.
    """
    if len(hypotheses) != len(references):
        raise UserError(
            f"BLEU of {len(hypotheses)} translations and {len(references)} references: give one reference each"
        )
    if not hypotheses:
        raise UserError("BLEU needs at least one sentence")
    if tokenize not in TOKENIZERS:
        raise UserError(f"BLEU tokenizer {tokenize!r} is not one of {', '.join(TOKENIZERS)}")

    metric = bleu_metric(lowercase, tokenize)
    score = metric.corpus_score(list(hypotheses), [list(references)]).score
    return Bleu(score, str(metric.get_signature()))


def bleu_metric(lowercase: bool, tokenize: str) -> "BLEU":
    """Returns sacrebleu's metric."""
    from sacrebleu.metrics import BLEU

    # force=True suppresses the warning about tokenised text, which "none" expects.
    return BLEU(lowercase=lowercase, tokenize=tokenize, force=tokenize == "none")


def sentence_statistics(
    metric: "BLEU", hypotheses: Sequence[str], references: Sequence[str]
) -> np.ndarray:
    """Returns lengths and n-gram counts of each sentence, (sentences, 10), whose sums give the corpus BLEU."""
    # sacrebleu.significance uses the same private method; there is no public one.
    found = metric._extract_corpus_statistics(list(hypotheses), [list(references)])
    return np.asarray(found)


def bleu_of(metric: "BLEU", sums: np.ndarray) -> float:
    """Returns the corpus BLEU (0 to 100) of summed `sentence_statistics`, (10,)."""
    return metric._compute_score_from_stats(sums.tolist()).score
