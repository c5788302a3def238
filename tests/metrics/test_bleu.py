import logging

import numpy as np
import pytest

from common.errors import UserError
from common.metrics.bleu import bleu_metric, bleu_of, corpus_bleu, sentence_statistics

REFERENCES = ["the cat sat on the mat .", "a dog barked at the moon tonight ."]


def test_perfect_translation_scores_100():
    assert corpus_bleu(REFERENCES, REFERENCES).score == pytest.approx(100.0)


def test_bleu_of_a_worked_example():
    """Precisions 5/6, 3/5, 2/4, 1/3 and no brevity penalty."""
    bleu = corpus_bleu(["the cat sat on a mat"], ["the cat sat on the mat"])
    assert bleu.score == pytest.approx(100 * (5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25)


def test_bleu_is_a_corpus_score_and_no_mean():
    hypotheses = [REFERENCES[0], "a dog barked at the sun today ."]
    pairs = zip(hypotheses, REFERENCES, strict=True)
    single = [corpus_bleu([h], [r]).score for h, r in pairs]
    assert corpus_bleu(hypotheses, REFERENCES).score != pytest.approx(sum(single) / 2, abs=0.1)


def test_signature_contains_the_options():
    plain = corpus_bleu(["The Cat sat on the mat ."], REFERENCES[:1])
    lower = corpus_bleu(["The Cat sat on the mat ."], REFERENCES[:1], lowercase=True)
    assert "case:mixed" in plain.signature and "tok:13a" in plain.signature
    assert "case:lc" in lower.signature
    assert plain.score < lower.score == pytest.approx(100.0)
    none = corpus_bleu(REFERENCES, REFERENCES, tokenize="none")
    assert "tok:none" in none.signature


def test_sums_of_sentence_statistics_give_the_corpus_score():
    """Also for a corpus with a repeated sentence."""
    hypotheses = ["The cat sat on a mat .", "a dog barked at the sun today ."]
    for lowercase, tokenize in ((False, "13a"), (True, "none")):
        metric = bleu_metric(lowercase, tokenize)
        counts_MS = sentence_statistics(metric, hypotheses, REFERENCES)
        assert counts_MS.shape == (2, 10) and counts_MS.dtype == np.int64
        for order in ([0, 1], [0, 1, 1]):
            texts = [hypotheses[i] for i in order], [REFERENCES[i] for i in order]
            expected = corpus_bleu(*texts, lowercase, tokenize).score
            assert bleu_of(metric, counts_MS[order].sum(0)) == pytest.approx(expected)


@pytest.mark.parametrize(("tokenize", "warned"), [("none", False), ("13a", True)])
def test_tokenize_none_suppresses_the_warning(caplog, tokenize, warned):
    """sacrebleu warns if a hundred translations end with a separate full stop."""
    with caplog.at_level(logging.WARNING, "sacrebleu"):
        corpus_bleu(["a cat sat on a mat ."] * 100, ["a cat sat there ."] * 100, tokenize=tokenize)
    assert any("tokenized" in record.getMessage() for record in caplog.records) == warned


def test_invalid_arguments_raise_user_errors():
    with pytest.raises(UserError, match="1 translations and 2 references"):
        corpus_bleu(["a"], ["a", "b"])
    with pytest.raises(UserError, match=r"^BLEU needs at least one sentence$"):
        corpus_bleu([], [])
    with pytest.raises(UserError, match=r"'moses' is not one of 13a, intl, char, zh, none$"):
        corpus_bleu(["a"], ["a"], tokenize="moses")
