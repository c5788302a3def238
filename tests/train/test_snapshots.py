"""Snapshots of parameters during training: loading one snapshot, and the mean of several."""

from pathlib import Path

import numpy as np
import pytest
from flax import nnx

from common.errors import UserError
from common.model.linear import Linear
from common.train.restore import load_run, snapshots
from common.train.task import ModelState
from tests.train import toy


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the workdir of a run of 20 steps, resumed at step 10.

    The run has a snapshot every seven steps, and keeps one checkpoint to resume from.
    """
    folder = tmp_path_factory.mktemp("run")
    options = {"checkpoint__snapshots": 7, "checkpoint__keep": 1}
    toy.run(folder, train__steps=10, **options)
    toy.run(folder, train__steps=20, **options)
    return folder


def load(workdir: Path, build: type = toy.Model, *steps: int) -> ModelState:
    return load_run(workdir, toy.config(), build, toy.mesh(), snapshots=steps)


def test_snapshot_has_the_values_of_its_step(workdir: Path, tmp_path: Path) -> None:
    assert snapshots(workdir) == [7, 14] and snapshots(tmp_path) == []
    # This run is evaluated at step 7 only, so its best checkpoint is of step 7.
    toy.run(tmp_path / "short", train__steps=7, eval__steps=7)
    expected, found = load(tmp_path / "short"), load(workdir, toy.Model, 7)
    for name, value in expected.trainable.items():
        np.testing.assert_array_equal(found.trainable[name], value)
    for name, value in expected.frozen.items():
        np.testing.assert_array_equal(found.frozen[name], value)


def test_mean_of_snapshots_is_loaded(workdir: Path) -> None:
    seven, fourteen, mean = (load(workdir, toy.Model, *s) for s in ((7,), (14,), (7, 14)))
    for name, value in mean.trainable.items():
        assert np.any(seven.trainable[name] != fourteen.trainable[name])
        middle = (np.asarray(seven.trainable[name]) + np.asarray(fourteen.trainable[name])) / 2
        np.testing.assert_allclose(value, middle, rtol=1e-6)
    assert all(np.array_equal(mean.frozen[n], x) for n, x in seven.frozen.items())


def test_missing_snapshot_is_refused(workdir: Path) -> None:
    with pytest.raises(
        UserError, match=r"no snapshot of step 8 in .*: choose one of the steps 7, 14$"
    ):
        load(workdir, toy.Model, 8)


class Wider(toy.Model):
    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.trained = Linear(4, 3, ("mlp", "embed"), rngs=rngs)
        self.more = Linear(1, 1, ("mlp", "embed"), rngs=rngs)


def test_checkpoint_of_another_model_is_not_reported_as_damaged(workdir: Path) -> None:
    for steps in ((), (7,)):
        with pytest.raises(UserError, match="does not match the model: the array") as caught:
            load(workdir, Wider, *steps)
        message = str(caught.value)
        lost = "more/bias is missing in the checkpoint, (1,) in the model, the array more/kernel is"
        assert lost in message
        assert "and 2 more; restore" in message and "damaged" not in message
