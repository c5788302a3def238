"""Cached results in JSON files: a damaged or outdated result is computed again, a UserError is shown."""

import pytest

from common.cached import cached_json
from common.config import check


def test_damaged_and_outdated_results_are_ignored(tmp_path):
    path = tmp_path / "result.json"
    assert cached_json(path, bool) is None
    path.write_text("{")
    assert cached_json(path, bool) is None
    path.write_text('{"key": 1}')
    assert cached_json(path, lambda content: content["other"] == 1) is None
    assert cached_json(path, lambda content: content["key"] == 2) is None
    assert cached_json(path, lambda content: content["key"] == 1) == {"key": 1}


def test_a_user_error_is_not_taken_for_an_outdated_result(tmp_path):
    path = tmp_path / "result.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match="the bucket cannot be read"):
        cached_json(path, lambda content: check(False, "the bucket cannot be read"))
