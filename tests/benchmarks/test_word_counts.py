"""benchmarks.word_counts reads the sentences of reviews, grouped by the number of stars."""

import gzip

import pytest

from benchmarks.word_counts import sentences_of
from common.errors import UserError


def test_reviews_without_stars_raise_user_error(tmp_path):
    path = tmp_path / "train.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "Good. Very good!", "stars": 9}\n'))
    assert sentences_of(tmp_path) == {9: ["Good.", "Very good!"]}
    path.write_bytes(gzip.compress(b'{"text": "Good.", "label": 1}\n'))
    with pytest.raises(UserError, match=f"--data={tmp_path}: .* lacks the field text or stars"):
        sentences_of(tmp_path)
