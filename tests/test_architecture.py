"""The examples in ARCHITECTURE.md train as printed, and the modules that the page names exist."""

import re
import sys
from pathlib import Path

import jax
import pytest

from common.config import load
from common.errors import UserError
from common.sharding import make_mesh
from common.train.command import fit
from launch import estimate
from launch.topology import find
from reservoir import run
from tests.programs import call
from tests.train import toy

ROOT = Path(__file__).parents[1]


@pytest.fixture
def examples(tmp_path, monkeypatch) -> Path:
    """Writes each Python example of ARCHITECTURE.md to the path in the example's first line, below a new folder.

    Yields the folder, from which the examples can be imported.
    """
    text = (ROOT / "ARCHITECTURE.md").read_text()
    for path, code in re.findall(r"```python\n# (\S+)\n(.*?)```", text, re.DOTALL):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(code)
    assert text.count("```python\n") == len(list(tmp_path.glob("*/*.py")))
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] in ("my_package", "my_paper")]:
        del sys.modules[name]


def test_example_task_trains_if_a_configuration_names_it(tmp_path, examples):
    mesh = make_mesh({"data": 1}, jax.devices()[:1])
    config = toy.config(train__steps=100, eval__steps=50, checkpoint__steps=50)
    config.task = "my_package.tasks:Line"
    summary = fit(config, tmp_path / "run", mesh)
    assert summary["best_valid"] < 0.1


def test_example_paper_trains_from_the_command_line(examples):
    (command,) = re.findall(
        r"python -m (my_paper.train .*)", (ROOT / "ARCHITECTURE.md").read_text()
    )
    program, config = command.split()
    config = config.replace("=", f"={examples}/")
    run = f"--workdir={examples / 'run'}"
    offline = "--config.wandb.mode=disabled"
    assert "FLOPs in matrix products" in call(program, config, run, offline, "--dry-run")
    output = call(program, config, run, offline)
    (error,) = re.findall(r"run: {'error': (.*)}\n", output)
    assert float(error) < 0.1
    assert "resuming from step 100" in call(
        program, config, run, offline, "--config.train.steps=101"
    )
    out = f"--out={examples / 'report'}"
    assert "test error" in call("common.report.__main__", examples / "run", out)


def test_plan_of_a_task_without_batch_spec_raises_user_error(examples):
    with pytest.raises(UserError, match="Line, returned None from batch_spec"):
        estimate.estimate(load(f"{examples}/configs/my_paper.py"), find("cpu:8"))


def test_task_with_other_constructor_arguments_is_refused(tmp_path, monkeypatch):
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
