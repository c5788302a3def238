"""Cached results in JSON files: a damaged or outdated result is computed again. A UserError from the check of a file is
passed on.
"""

import json

import pytest

from common.cached import cached_json, read_json_if
from common.errors import check


@pytest.fixture
def count():
    """Returns a function that returns the number of its calls so far, including the current call."""

    def call() -> int:
        call.calls += 1
        return call.calls

    call.calls = 0
    return call


def test_a_result_is_computed_once_per_key(tmp_path, count):
    path = tmp_path / "folder" / "result.json"
    assert [cached_json(path, {"data": (1, 2)}, count) for _ in range(3)] == [1, 1, 1]
    assert [cached_json(path, {"data": (1, 3)}, count) for _ in range(2)] == [2, 2]
    assert cached_json(path, {"data": (1, 2)}, count) == 3, "a file must hold only the last result"


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"key": "a"}', '{"value": 7}'])
def test_a_damaged_file_is_computed_again(tmp_path, count, text):
    path = tmp_path / "result.json"
    path.write_text(text)
    assert cached_json(path, "a", count) == 1
    assert json.loads(path.read_text()) == {"key": "a", "value": 1}


def test_a_failure_or_a_result_not_marked_for_keeping_writes_no_file(tmp_path, count):
    path = tmp_path / "result.json"
    with pytest.raises(ZeroDivisionError):
        cached_json(path, "a", lambda: 1 / 0)
    assert cached_json(path, "a", count, keep=lambda value: value > 1) == 1
    assert not list(tmp_path.iterdir())
    assert cached_json(path, "a", count, keep=lambda value: value > 1) == 2
    assert cached_json(path, "a", count) == 2


def test_a_file_that_is_not_valid_is_not_read(tmp_path):
    path = tmp_path / "result.json"
    assert read_json_if(path, bool) is None
    path.write_text("{")
    assert read_json_if(path, bool) is None
    path.write_text('{"key": 1}')
    assert read_json_if(path, lambda content: content["other"] == 1) is None
    assert read_json_if(path, lambda content: content["key"] == 2) is None
    assert read_json_if(path, lambda content: content["key"] == 1) == {"key": 1}


def test_a_user_error_is_not_taken_for_an_outdated_result(tmp_path):
    path = tmp_path / "result.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match="the bucket cannot be read"):
        read_json_if(path, lambda content: check(False, "the bucket cannot be read"))
