"""JSON files whose brackets are nested more deeply than Python's module `json` can read."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from common.cached import cached_json
from common.data.record_files import parse_json_lines, read_names
from common.errors import UserError
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
