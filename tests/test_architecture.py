"""The example of a task in ARCHITECTURE.md trains as printed."""

import re
from pathlib import Path

import jax

from common.sharding import make_mesh
from common.train import loop
from tests.train import toy

ROOT = Path(__file__).parents[1]


def test_example_task_trains(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "ARCHITECTURE.md").read_text(), re.DOTALL)
    names = {}
    exec(compile(code, "ARCHITECTURE.md", "exec"), names)
    mesh = make_mesh({"data": 1}, jax.devices()[:1])
    config = toy.config(train__steps=100, eval__steps=50, checkpoint__steps=50)
    summary = loop.fit(config, names["Line"](), tmp_path, mesh)
    assert summary["best_valid"] < 0.1


def test_named_modules_exist():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    for path in re.findall(r"`(common/[a-z_/]+\.py)`", text):
        assert (ROOT / path).is_file(), path
    row = next(line for line in text.splitlines() if line.startswith("| `common/train/`"))
    modules = {path.stem for path in (ROOT / "common" / "train").glob("*.py")} - {"__init__"}
    assert set(re.findall(r"`([a-z_]+)`", row)) == modules
