import logging

import pytest

from common.errors import UserError
from reservoir.bleu import corpus_bleu

REFERENCES = ["the cat sat on the mat .", "a dog barked at the moon tonight ."]


def test_perfect_translation_scores_100():
    assert corpus_bleu(REFERENCES, REFERENCES).score == pytest.approx(100.0)


def test_bleu_of_a_worked_example():
    """The n-gram precisions are 5/6, 3/5, 2/4 and 1/3. There is no brevity penalty."""
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


@pytest.mark.parametrize(("tokenize", "warned"), [("none", False), ("13a", True)])
def test_tokenize_none_suppresses_the_warning(caplog, tokenize, warned):
    """sacrebleu warns if a hundred translations end with a separate full stop."""
    with caplog.at_level(logging.WARNING, "sacrebleu"):
        corpus_bleu(["a cat sat on a mat ."] * 100, ["a cat sat there ."] * 100, tokenize=tokenize)
    assert any("tokenized" in record.getMessage() for record in caplog.records) == warned


def test_invalid_arguments_raise_user_errors():
    with pytest.raises(UserError, match=r"must have the same length.*, got 1 and 2"):
        corpus_bleu(["a"], ["a", "b"])
    with pytest.raises(UserError, match=r"are empty: give at least one sentence$"):
        corpus_bleu([], [])
    with pytest.raises(
        UserError, match=r"^tokenize='moses': choose one of 13a, intl, char, zh, none$"
    ):
        corpus_bleu(["a"], ["a"], tokenize="moses")
