"""Corpus BLEU, with sacrebleu's signature."""

from collections.abc import Sequence
from typing import NamedTuple

from common.config import check_choice
from common.errors import check
from common.metrics.translations import TOKENIZERS, bleu_metric


class Bleu(NamedTuple):
    """BLEU in percent, and sacrebleu's signature.

    An example of a signature: "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0".
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
      lowercase: ignore case.
      tokenize: one of sacrebleu's tokenizers in `TOKENIZERS`. "none" is for text that is tokenized already.

    Raises:
      UserError: there are no sentences, the numbers of hypotheses and references differ, or the tokenizer is unknown.
    """
    check(
        len(hypotheses) == len(references),
        "hypotheses and references must have the same length, with one reference for each hypothesis, got"
        f" {len(hypotheses)} and {len(references)}",
    )
    check(len(hypotheses) > 0, "hypotheses and references are empty: give at least one sentence")
    check_choice("tokenize", tokenize, TOKENIZERS)
    metric = bleu_metric(lowercase, tokenize)
    score = metric.corpus_score(list(hypotheses), [list(references)]).score
    return Bleu(score, str(metric.get_signature()))
