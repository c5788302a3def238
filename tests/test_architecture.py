"""The example of a task in ARCHITECTURE.md trains as printed."""

import re
from pathlib import Path

import jax
import pytest

from common.errors import UserError
from common.sharding import make_mesh
from reservoir import run
from tests.train import toy

ROOT = Path(__file__).parents[1]


def test_example_task_trains_if_a_configuration_names_it(tmp_path, monkeypatch):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "ARCHITECTURE.md").read_text(), re.DOTALL)
    (tmp_path / "my_tasks.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    mesh = make_mesh({"data": 1}, jax.devices()[:1])
    config = toy.config(train__steps=100, eval__steps=50, checkpoint__steps=50)
    config.task = "my_tasks:Line"
    summary = run.fit(config, tmp_path / "run", mesh)
    assert summary["best_valid"] < 0.1


def test_task_that_cannot_be_called_is_refused(tmp_path, monkeypatch):
    code = "from common.train.task import Task\nclass Bare(Task):\n    def __init__(self): pass\n"
    (tmp_path / "bare_tasks.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    config = toy.config()
    config.task = "bare_tasks:Bare"
    with pytest.raises(
        UserError, match=r"bare_tasks:Bare must accept \(config, mesh, read_data=True\)"
    ):
        run.prepare(config, None)


def test_named_modules_exist():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    for path in re.findall(r"`(common/[a-z_/]+\.py)`", text):
        assert (ROOT / path).is_file(), path
    row = next(line for line in text.splitlines() if line.startswith("| `common/train/`"))
    modules = {path.stem for path in (ROOT / "common" / "train").glob("*.py")} - {"__init__"}
    assert set(re.findall(r"`([a-z_]+)`", row)) == modules
