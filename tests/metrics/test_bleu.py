"""Corpus BLEU: from sums of sentence statistics, by hand, and with the options of `bleu_metric`."""

import logging

import numpy as np
import pytest

from common.metrics.translations import Translations, bleu_metric

REFERENCES = ["the cat sat on the mat .", "a dog barked at the moon tonight ."]


def bleu(hypotheses: list[str], references: list[str], *, lowercase=False, tokenize="13a"):
    """Returns the corpus BLEU in percent, and sacrebleu's signature."""
    metric = bleu_metric(lowercase, tokenize)
    return metric.corpus_score(hypotheses, [references]).score, str(metric.get_signature())


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


def test_perfect_translation_scores_100():
    assert bleu(REFERENCES, REFERENCES)[0] == pytest.approx(100.0)


def test_bleu_of_a_worked_example():
    """The n-gram precisions are 5/6, 3/5, 2/4 and 1/3. There is no brevity penalty."""
    score, _ = bleu(["the cat sat on a mat"], ["the cat sat on the mat"])
    assert score == pytest.approx(100 * (5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25)


def test_bleu_is_a_corpus_score_not_a_mean_over_sentences():
    hypotheses = [REFERENCES[0], "a dog barked at the sun today ."]
    pairs = zip(hypotheses, REFERENCES, strict=True)
    single = [bleu([h], [r])[0] for h, r in pairs]
    assert bleu(hypotheses, REFERENCES)[0] != pytest.approx(sum(single) / 2, abs=0.1)


def test_signature_contains_the_options():
    plain, plain_signature = bleu(["The Cat sat on the mat ."], REFERENCES[:1])
    lower, lower_signature = bleu(["The Cat sat on the mat ."], REFERENCES[:1], lowercase=True)
    assert "case:mixed" in plain_signature and "tok:13a" in plain_signature
    assert "case:lc" in lower_signature
    assert plain < lower == pytest.approx(100.0)
    _, signature = bleu(REFERENCES, REFERENCES, tokenize="none")
    assert "tok:none" in signature


@pytest.mark.parametrize(("tokenize", "warned"), [("none", False), ("13a", True)])
def test_tokenize_none_suppresses_the_warning(caplog, tokenize, warned):
    """sacrebleu warns if a hundred translations end with a separate full stop."""
    with caplog.at_level(logging.WARNING, "sacrebleu"):
        bleu(["a cat sat on a mat ."] * 100, ["a cat sat there ."] * 100, tokenize=tokenize)
    assert any("tokenized" in record.getMessage() for record in caplog.records) == warned
