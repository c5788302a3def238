"""Keeping the best checkpoints of a run, and testing the mean of their parameters."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from common.errors import UserError
from common.train.checkpoint import Checkpoints
from common.train.restore import load_run
from common.train.task import ModelState
from tests.train import toy

SCORES = [5.0, 2.0, 4.0, 1.0, 3.0, 6.0]
"""Errors at steps 2, 4, ..., 12. The three lowest errors are at steps 8, 4 and 10."""

FIELDS = {"eval__steps": 2, "checkpoint__steps": 4, "checkpoint__keep_best": 3}


class Noted(toy.Toy):
    """The toy task. Records the trainable values at each evaluation."""

    def __init__(self, scores: list[float]):
        super().__init__(scores=scores)
        self.seen: list[tuple[str, dict]] = []

    def evaluate(self, values: ModelState, split: str) -> dict[str, float]:
        self.seen.append((split, {n: np.asarray(x) for n, x in values.trainable.items()}))
        return super().evaluate(values, split)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict], dict, dict]:
    """Trains 8 steps, and resumes the run up to step 12.

    Returns:
      (folder, parameters at each validation, parameters of the last test, summary). The last test is of the mean of the
      best checkpoints.
    """
    folder, task = tmp_path_factory.mktemp("run"), Noted(SCORES)
    toy.run(folder, task, train__steps=8, **FIELDS)
    resumed = Noted(SCORES[4:])
    summary = toy.run(folder, resumed, train__steps=12, **FIELDS)
    seen = [*task.seen, *resumed.seen]
    return folder, [v for split, v in seen if split == "valid"], seen[-1][1], summary


def mean(values: list[dict], steps: tuple[int, ...]) -> dict:
    return {n: sum(values[s // 2 - 1][n] for s in steps) / len(steps) for n in values[0]}


def test_best_checkpoints_are_kept_even_if_never_the_best_so_far(run) -> None:
    folder = run[0]
    checkpoints = Checkpoints(folder)
    assert [*checkpoints.top()] == [8, 4, 10]
    assert sorted(p.name for p in (folder / "checkpoints" / "top").glob("[0-9]*")) == [
        "10",
        "4",
        "8",
    ]
    checkpoints.close()


def test_mean_of_the_best_checkpoints_is_tested(run) -> None:
    folder, values, tested, summary = run
    for count, steps in ((1, (8,)), (2, (8, 4)), (3, (8, 4, 10))):
        found = load_run(folder, toy.config(), toy.Model, toy.mesh(), best=count)
        for name, expected in mean(values, steps).items():
            np.testing.assert_allclose(found.trainable[name], expected, rtol=1e-6)
    for name, expected in mean(values, (8, 4, 10)).items():
        np.testing.assert_allclose(tested[name], expected, rtol=1e-6)
    assert summary["test_mean_of_best"]["error"] != summary["test"]["error"]
    with pytest.raises(
        UserError,
        match=r"cannot average the 4 best checkpoints: .* has kept only 3; average at most 3",
    ):
        load_run(folder, toy.config(), toy.Model, toy.mesh(), best=4)


def test_ended_run_without_top_checkpoints_has_no_mean(tmp_path: Path) -> None:
    fields = {"train__steps": 4, "eval__steps": 2}
    toy.run(tmp_path, **fields, eval__test=False)
    summary = toy.run(tmp_path, **fields, checkpoint__keep_best=3)
    assert summary["test"]
    assert "test_mean_of_best" not in summary


def test_resumed_run_that_keeps_fewer_checkpoints_averages_fewer(tmp_path: Path) -> None:
    """The evaluations after the resume are too bad to be kept, so four checkpoints stay on disk."""
    fields = {"eval__steps": 2, "checkpoint__steps": 4}
    toy.run(tmp_path, toy.Toy(scores=SCORES), train__steps=8, checkpoint__keep_best=4, **fields)
    worse = Noted([9.0])
    toy.run(tmp_path, worse, train__steps=12, checkpoint__keep_best=2, **fields)
    tested = worse.seen[-1][1]
    two = load_run(tmp_path, toy.config(), toy.Model, toy.mesh(), best=2).trainable
    four = load_run(tmp_path, toy.config(), toy.Model, toy.mesh(), best=4).trainable
    for name, expected in two.items():
        np.testing.assert_allclose(tested[name], expected, rtol=1e-6)
    assert any(not np.allclose(four[name], two[name]) for name in two)


def test_resumed_run_that_keeps_one_checkpoint_discards_abandoned_checkpoints(
    tmp_path: Path,
) -> None:
    """The process was killed after it saved a "top" checkpoint of step 8, before "latest" of step 8."""
    fields = {"checkpoint__steps": 4, "checkpoint__keep_best": 2}
    toy.run(tmp_path, toy.Toy(scores=[3.0, 1.0]), train__steps=8, eval__steps=4, **fields)
    shutil.rmtree(tmp_path / "checkpoints" / "latest" / "8")
    toy.run(tmp_path, toy.Toy(scores=[5.0]), train__steps=7, eval__steps=7, checkpoint__keep_best=1)
    checkpoints = Checkpoints(tmp_path)
    assert [*checkpoints.top()] == [4]
    checkpoints.close()


def test_default_keeps_one_best_checkpoint(tmp_path: Path) -> None:
    summary = toy.run(tmp_path, train__steps=4, eval__steps=2)
    assert "test_mean_of_best" not in summary
    assert not (tmp_path / "checkpoints" / "top").exists()
