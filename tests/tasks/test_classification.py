"""What a classifier reads and how it is measured."""

import numpy as np
import pytest
from sklearn.metrics import f1_score

from common.data.tokenizer import BOS, EOS
from common.metrics.classes import accuracy, weighted_f1
from common.tasks.classification import sequence


def test_a_text_stands_between_its_marks():
    assert sequence([[5, 6]], 10) == ([BOS, 5, 6], False)
    assert sequence([[5, 6], [7]], 10) == ([BOS, 5, 6, EOS, EOS, 7], False)


@pytest.mark.parametrize("longest", [6, 7, 12, 13])
@pytest.mark.parametrize(("first", "second"), [(3, 30), (30, 3), (30, 30), (1, 1), (4, 5)])
def test_of_a_pair_the_longer_one_is_cut_and_the_end_has_room(longest, first, second):
    tokens, cut = sequence([[5] * first, [6] * second], longest)
    assert len(tokens) + 1 <= longest
    kept = tokens.count(5), tokens.count(6)
    assert cut == (kept != (first, second)) == (first + second + 4 > longest)
    if cut:
        assert len(tokens) + 1 == longest
        # Nothing is taken from a text that is shorter than what is left of the other.
        assert kept[0] == first or kept[0] >= kept[1]
        assert kept[1] == second or kept[1] >= kept[0] - 1


def test_a_long_text_is_cut_at_its_end():
    assert sequence([[5, 6, 7, 8]], 5) == ([BOS, 5, 6, 7], True)
    assert sequence([[5, 6, 7]], 5) == ([BOS, 5, 6, 7], False)


def test_measures_of_an_uneven_guess():
    """By hand: class 0 has precision 2/3 and recall 1, class 1 recall 0, class 2 precision 1/2 and recall 1."""
    labels, guesses = np.array([0, 0, 1, 1, 2]), np.array([0, 0, 0, 2, 2])
    assert accuracy(labels, guesses) == pytest.approx(60)
    expected = 100 * (2 * 0.8 + 2 * 0 + 1 * 2 / 3) / 5
    assert weighted_f1(labels, guesses) == pytest.approx(expected)
    assert weighted_f1(labels, guesses) == pytest.approx(
        100 * f1_score(labels, guesses, average="weighted")
    )
