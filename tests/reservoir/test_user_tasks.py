"""Tasks that users define, --config.task=MODULE:CLASS, valid and invalid."""

import re
from itertools import islice

import jax.numpy as jnp
import pytest

from common.train.task import Task
from tests.programs import call
from tests.train import toy

TINY = ("--config=configs/iwslt_ffn_res.py:tiny", "--config.train.steps=3", "--config.eval.steps=3")


class UserTask(toy.Toy):
    """The toy task with the arguments that a configured task gets."""

    def __init__(self, config, mesh, *, read_data=True):
        super().__init__()
        assert config.task.endswith(f":{type(self).__name__}") and dict(mesh.shape) and read_data


class Raising(UserTask):
    def __init__(self, config, mesh, *, read_data=True):
        config.data.my_file  # noqa: B018


class Unfinished(UserTask):
    def __init__(self, config, mesh, *, read_data=True):
        raise NotImplementedError


class NoMethods(Task):
    mode = "min"

    def __init__(self, config, mesh, *, read_data=True):
        pass


class Lower(UserTask):
    mode = "lower"


class OtherObjective(UserTask):
    objective = "accuracy"


class NoMetrics(UserTask):
    def evaluate(self, values, split):
        pass


class OneValue(UserTask):
    def loss(self, model, batch, key):
        return super().loss(model, batch, key)[0]


class LossPerRow(UserTask):
    def loss(self, model, batch, key):
        return jnp.square(model(batch["x"]) - batch["y"]), jnp.float32(8)


class MetricsInLoss(UserTask):
    def loss(self, model, batch, key):
        return super().loss(model, batch, key)[0], {"accuracy": 1.0}


class OneMetric(UserTask):
    def evaluate(self, values, split):
        return 0.5


class ArrayMetric(UserTask):
    def evaluate(self, values, split):
        return {"error": jnp.ones(()), "label": "text"}


class ArrayPredictions(UserTask):
    evaluate = Task.evaluate

    def predict(self, values, split):
        return jnp.ones(2)


class NoBatches(UserTask):
    def batches(self, start):
        pass


class NoPredictions(UserTask):
    evaluate = Task.evaluate

    def predict(self, values, split):
        pass


class NoDataState(UserTask):
    def batches(self, start):
        return (batch for batch, _ in super().batches(start))


class Empty(UserTask):
    def batches(self, start):
        return iter(())


class Ending(UserTask):
    def batches(self, start):
        return islice(super().batches(start), 2)


INVALID = {
    "Raising": rf"--config.task={__name__}:Raising raises AttributeError in \w+ \({__file__}, line \d+\): .*my_file",
    "Unfinished": rf"--config.task={__name__}:Unfinished raises NotImplementedError in .*; correct the class$",
    "NoMethods": "NoMethods lacks objective, build, loss, batches, predict or evaluate; define",
    "Lower": "the mode of the metric 'error' must be 'max' or 'min', got 'lower'",
    "OneValue": r"Task.loss must return a tuple of two scalars, \(loss, weight\); it returned .*float32\[\]",
    "LossPerRow": r"Task.loss must return a tuple of two scalars, \(loss, weight\); it returned .*float32\[8,1\]",
    "MetricsInLoss": r"Task.loss must return a tuple of two scalars, .*; it returned .*{'accuracy': 1.0}",
    "NoBatches": r"Task.batches must return an iterable of tuples \(batch, data state\); it returned None",
    "NoDataState": r"Task.batches must yield a tuple of two dictionaries, .*; it yielded the type dict$",
}
"""{class: regular expression of the error before the first step}."""


@pytest.mark.parametrize("name", INVALID)
@pytest.mark.parametrize("dry", [(), ("--dry-run",)], ids=["train", "dry run"])
def test_invalid_tasks_raise_user_errors_before_the_first_step(name, dry, tmp_path):
    task, workdir = f"--config.task={__name__}:{name}", f"--workdir={tmp_path / 'run'}"
    output = call("reservoir.train", *TINY, *dry, task, workdir, code=2)
    assert re.search(rf"^error: .*{INVALID[name]}", output.splitlines()[-1])
    if name in ("Raising", "Unfinished", "NoMethods", "Lower"):
        assert not (tmp_path / "run").exists()


def test_dry_run_of_a_task_without_a_batch_is_a_user_error(tmp_path):
    task, workdir = f"--config.task={__name__}:Empty", f"--workdir={tmp_path / 'run'}"
    output = call("reservoir.train", *TINY, "--dry-run", task, workdir, code=2)
    assert output.splitlines()[-1].startswith("error: Task.batches yielded no batch")


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("OtherObjective", "returned {'error': .*} without the objective 'accuracy'"),
        ("NoMetrics", "Task.evaluate returned None without the objective 'error'"),
        (
            "NoPredictions",
            "NoPredictions.predict returned None; return predictions, .* or define evaluate",
        ),
        ("OneMetric", "Task.evaluate returned 0.5 without the objective 'error'"),
        ("ArrayMetric", "Task.evaluate returned .*, but error must be a Python number"),
        (
            "ArrayPredictions",
            r"ArrayPredictions.predict returned Array\(.*; return predictions, such as an object of",
        ),
        ("Ending", "Task.batches ended after step 2; it must yield batches without end"),
    ],
)
def test_invalid_tasks_raise_user_errors_in_training(name, line, tmp_path):
    task, workdir = f"--config.task={__name__}:{name}", f"--workdir={tmp_path / 'run'}"
    output = call("reservoir.train", *TINY, task, workdir, code=2)
    assert re.search(f"^error: .*{line}", output.splitlines()[-1])
    assert not (tmp_path / "run/summary.json").exists()


@pytest.mark.medium
def test_user_task_trains_from_the_command_line(tmp_path):
    task = f"--config.task={__name__}:UserTask"
    output = call("reservoir.train", *TINY, task, f"--workdir={tmp_path / 'run'}")
    assert "test error" in output and (tmp_path / "run/summary.json").is_file()


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("nowhere:UserTask", "No module named 'nowhere'"),
        (f"{__name__}:Missing", "no attribute 'Missing'"),
        (f"{__name__}:Task", "must be a class that inherits common.train.task.Task"),
        (f"{__name__}:TINY", "must be a class that inherits common.train.task.Task"),
        ("typing:Protocol", "must be a class that inherits common.train.task.Task"),
    ],
)
def test_invalid_task_classes_raise_user_errors(name, line, tmp_path):
    workdir = f"--workdir={tmp_path / 'run'}"
    output = call("reservoir.train", *TINY, f"--config.task={name}", workdir, code=2)
    assert output.startswith(f"error: --config.task={name}") and line in output
    assert not (tmp_path / "run").exists()
