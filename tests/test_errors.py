"""Reasons in error messages, and JSON files whose brackets are nested too deeply for Python's module `json`."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from common.cached import cached_json
from common.data.record_files import parse_json_lines, read_names
from common.errors import UserError, reason_of
from common.report.runs import read_run
from common.track.tracker import read_metrics
from common.train.workdir import saved_config
from gmlp_lm import sample
from perception.families.fields import read_object
from perception.loading import read_classes
from perception.safetensor_files import INDEX, TensorFiles

NESTED = "[" * 100_000 + "]" * 100_000 + "\n"


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("labels.json", read_names),
        ("config.json", saved_config),
        ("config.json", read_object),
        ("summary.json", read_run),
        ("metrics.jsonl", lambda path: read_metrics(path.parent)),
        ("classes.json", lambda path: read_classes(path.parent)),
        ("prompts.jsonl", sample.read),
        (INDEX, lambda path: TensorFiles(path.parent)),
    ],
)
def test_deeply_nested_json_raises_an_error_that_names_the_file(
    tmp_path: Path, name: str, read: Callable
):
    path = tmp_path / name
    path.write_text(NESTED)
    with pytest.raises(UserError, match=re.escape(str(path))):
        read(path)


def test_deeply_nested_cached_result_is_computed_again(tmp_path: Path):
    path = tmp_path / "result.json"
    path.write_text(NESTED)
    assert cached_json(path, "key", lambda: 1) == 1


def test_deeply_nested_json_line_has_an_error_text():
    ((place, text),) = parse_json_lines("a.jsonl", [NESTED])
    assert (place, text) == ("a.jsonl line 1", " is not JSON: its brackets are nested too deeply")


READ = """OUT_OF_RANGE: Error reading "trainable.a/0.0" in OCDBT database at local file "/runs/a/state/":
 Requested byte range [0, 9) is not valid for value of size 1"""
WRITE = (
    'RESOURCE_EXHAUSTED: Error writing "trainable.a/0" in OCDBT database at local file "/runs/a/state/": Failed'
    " writing: \"/runs/a/state/d/e5\": No space left on device [os_error_code='28']"
)


def test_reason_of_a_checkpoint_fault_leaves_out_the_state_of_the_storage_library():
    outer = Exception(
        "Encountered error. See full TensorStore details: <spec of ({\n 'base': {\n}})>."
    )
    assert reason_of(outer) == "Encountered error"
    outer.__cause__ = ValueError(READ)
    expected = 'Error reading "trainable.a/0.0": Requested byte range [0, 9) is not valid for value of size 1'
    assert reason_of(outer) == f"OUT_OF_RANGE: {expected}"
    expected = 'Error writing "trainable.a/0": Failed writing: "/runs/a/state/d/e5": No space left on device'
    assert reason_of(ValueError(WRITE)) == f"RESOURCE_EXHAUSTED: {expected}"


def test_reason_that_is_too_long_ends_before_a_word():
    path = "/runs/" + "a" * 150
    assert reason_of(OSError(f"{path} {path} {path}")) == f"{path} ..."
    assert reason_of(ValueError("a" * 400)) == "a" * 300 + " ..."
    assert reason_of(ValueError()) == "ValueError"
