"""A task from a module outside the project."""

import pytest

from tests.programs import call
from tests.train import toy

TINY = ("--config=configs/iwslt_ffn_res.py:tiny", "--config.train.steps=3", "--config.eval.steps=3")


class Own(toy.Toy):
    """The toy task with the arguments that a configured task gets."""

    def __init__(self, config, mesh, *, read_data=True):
        super().__init__()
        assert config.task.endswith(":Own") and dict(mesh.shape) and read_data


@pytest.mark.medium
def test_own_task_trains_from_the_command_line(tmp_path):
    own = f"--config.task={__name__}:Own"
    output = call("reservoir.train", *TINY, own, f"--workdir={tmp_path / 'run'}")
    assert "test error" in output and (tmp_path / "run/summary.json").is_file()


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("nowhere:Own", "No module named 'nowhere'"),
        (f"{__name__}:Missing", "no attribute 'Missing'"),
        (f"{__name__}:TINY", "is not a class that inherits common.train.task.Task"),
        ("typing:Protocol", "is not a class that inherits common.train.task.Task"),
    ],
)
def test_invalid_task_classes_raise_user_errors(name, line, tmp_path):
    workdir = f"--workdir={tmp_path / 'run'}"
    output = call("reservoir.train", *TINY, f"--config.task={name}", workdir, code=2)
    assert output.startswith(f"error: --config.task={name}") and line in output
    assert not (tmp_path / "run").exists()
