"""Corpus BLEU from sums of sentence statistics."""

import numpy as np
import pytest

from common.metrics.translations import bleu_metric, bleu_of, sentence_statistics

REFERENCES = ["the cat sat on the mat .", "a dog barked at the moon tonight ."]


def test_sums_of_sentence_statistics_give_the_corpus_score():
    """Includes a corpus with a repeated sentence."""
    hypotheses = ["The cat sat on a mat .", "a dog barked at the sun today ."]
    for lowercase, tokenize in ((False, "13a"), (True, "none")):
        metric = bleu_metric(lowercase, tokenize)
        counts_MS = sentence_statistics(metric, hypotheses, REFERENCES)
        assert counts_MS.shape == (2, 10) and counts_MS.dtype == np.int64
        for order in ([0, 1], [0, 1, 1]):
            references = [REFERENCES[i] for i in order]
            expected = metric.corpus_score([hypotheses[i] for i in order], [references]).score
            assert bleu_of(metric, counts_MS[order].sum(0)) == pytest.approx(expected)
