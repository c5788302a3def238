"""Corpus BLEU from sums of sentence statistics."""

import numpy as np
import pytest

from common.metrics.translations import Translations, bleu_metric

REFERENCES = ["the cat sat on the mat .", "a dog barked at the moon tonight ."]


def test_sums_of_sentence_statistics_give_the_corpus_score():
    """A corpus may repeat a sentence, as a bootstrap resample does."""
    hypotheses = ["The cat sat on a mat .", "a dog barked at the sun today ."]
    for lowercase, tokenize in ((False, "13a"), (True, "none")):
        metric = bleu_metric(lowercase, tokenize)
        ones_E = np.ones(2)
        made = Translations("e", hypotheses, REFERENCES, ones_E, ones_E, lowercase, tokenize)
        statistics_ES = made.statistics
        assert statistics_ES.shape == (2, 12) and (statistics_ES == statistics_ES.round()).all()
        for order in ([0, 1], [0, 1, 1]):
            references = [REFERENCES[i] for i in order]
            expected = metric.corpus_score([hypotheses[i] for i in order], [references]).score
            found = made.measure(statistics_ES[order].sum(0, keepdims=True))
            assert found["bleu"] == pytest.approx([expected])
