"""Token sequences of single texts and text pairs, and their truncation."""

import pytest

from common.data.special_ids import BOS, EOS
from reservoir.finetuning import sequence


def test_text_has_begin_and_end_tokens():
    assert sequence([[5, 6]], 10) == ([BOS, 5, 6], False)
    assert sequence([[5, 6], [7]], 10) == ([BOS, 5, 6, EOS, EOS, 7], False)


@pytest.mark.parametrize("longest", [6, 7, 12, 13])
@pytest.mark.parametrize(("first", "second"), [(3, 30), (30, 3), (30, 30), (1, 1), (4, 5)])
def test_longer_text_of_a_pair_is_truncated_first(longest, first, second):
    tokens, cut = sequence([[5] * first, [6] * second], longest)
    assert len(tokens) + 1 <= longest
    kept = tokens.count(5), tokens.count(6)
    assert cut == (kept != (first, second)) == (first + second + 4 > longest)
    if cut:
        assert len(tokens) + 1 == longest
        # A text is truncated only while it is at least as long as the other text.
        assert kept[0] == first or kept[0] >= kept[1]
        assert kept[1] == second or kept[1] >= kept[0] - 1


def test_long_text_is_truncated_at_its_end():
    assert sequence([[5, 6, 7, 8]], 5) == ([BOS, 5, 6, 7], True)
    assert sequence([[5, 6, 7]], 5) == ([BOS, 5, 6, 7], False)
