"""Resuming and ending a run whose files are damaged or lost."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from common.errors import UserError
from common.metrics.kinds import load
from common.metrics.losses import Losses
from common.metrics.predictions import PREDICTIONS
from common.track.tracker import METRICS
from common.train import frozen
from common.train.restore import load_run
from common.train.task import ModelState
from common.variables import Frozen, Params
from tests.train import toy

pytestmark = pytest.mark.medium


def break_arrays(checkpoint: Path) -> None:
    for file in (checkpoint / "state").rglob("d/*"):
        file.write_bytes(b"")


@pytest.mark.parametrize("damage", [break_arrays, shutil.rmtree])
def test_lost_best_checkpoint_is_replaced_by_the_latest_of_its_step(
    tmp_path: Path, capsys: pytest.CaptureFixture, damage: Callable[[Path], None]
) -> None:
    first = toy.run(tmp_path, toy.Toy(scores=[3.0, 2.0, 1.0, 4.0]))
    best = tmp_path / "checkpoints/best/15"
    damage(best)
    (tmp_path / "summary.json").unlink()
    again = toy.run(tmp_path)
    warning = capsys.readouterr().err
    assert f"warning: the best checkpoint, {best}, cannot be read (" in warning
    assert "replaced by the latest checkpoint, which is of the same step" in warning
    assert again["best_step"] == 15 and again["test"] == first["test"]
    (tmp_path / "summary.json").unlink()
    assert toy.run(tmp_path)["test"] == first["test"]
    assert "warning" not in capsys.readouterr().err


def test_run_with_a_lost_best_checkpoint_can_end_without_a_test(tmp_path: Path) -> None:
    toy.run(tmp_path, toy.Toy(scores=[1.0, 2.0]))
    best = tmp_path / "checkpoints/best/5"
    break_arrays(best)
    (tmp_path / "summary.json").unlink()
    with pytest.raises(UserError, match=rf"checkpoint, {best}, .*--config.eval.test=false$"):
        toy.run(tmp_path)
    summary = toy.run(tmp_path, eval__test=False)
    assert summary["best_step"] == 5 and not summary["test"]


def test_run_with_a_damaged_top_checkpoint_can_end_without_a_test(tmp_path: Path) -> None:
    toy.run(tmp_path, toy.Toy(scores=[1.0, 2.0]), checkpoint__keep_best=2)
    for checkpoint in (tmp_path / "checkpoints/top").glob("[0-9]*"):
        break_arrays(checkpoint)
    (tmp_path / "summary.json").unlink()
    with pytest.raises(UserError, match=r"the top checkpoint, .*--config.eval.test=false$"):
        toy.run(tmp_path, checkpoint__keep_best=2)


def test_new_start_discards_the_best_checkpoints_of_a_killed_start(tmp_path: Path) -> None:
    toy.run(tmp_path, toy.Toy(scores=[2.0, 1.0]))
    shutil.rmtree(tmp_path / "checkpoints/latest")
    (tmp_path / "summary.json").unlink()
    best = toy.run(tmp_path, toy.Toy(scores=[1.0, 2.0]))["best_step"]
    assert [path.name for path in (tmp_path / "checkpoints/best").glob("[0-9]*")] == [str(best)]


def test_damaged_frozen_values_are_drawn_from_the_seed_again(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    once = toy.run(tmp_path / "once")
    run = tmp_path / "run"
    toy.run(run, train__steps=10)
    written = run / "checkpoints/frozen/0"
    meta = (written / "meta/metadata").read_text()
    break_arrays(written)
    again = toy.run(run)
    fault = f"warning: the frozen checkpoint, {written}, cannot be read ("
    assert fault in capsys.readouterr().err
    assert (again["test"], again["final_valid"]) == (once["test"], once["final_valid"])
    assert (written / "meta/metadata").read_text() == meta
    toy.run(run, train__steps=25)
    assert "warning" not in capsys.readouterr().err, "the values are written again"


def test_readers_of_a_run_draw_damaged_frozen_values_but_do_not_write(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    toy.run(tmp_path, train__steps=5)
    whole = load_run(tmp_path, toy.config(), toy.Model, toy.mesh()).frozen
    break_arrays(tmp_path / "checkpoints/frozen/0")
    for _ in range(2):
        drawn = load_run(tmp_path, toy.config(), toy.Model, toy.mesh()).frozen
        assert "drawing the frozen values from the seed again" in capsys.readouterr().err
    jax.tree.map(np.testing.assert_array_equal, drawn, whole)


class Added(nnx.Module):
    """The toy model with a frozen bias of zeros that `Task.start` sets."""

    def __init__(self, rngs: nnx.Rngs):
        toy.Model.__init__(self, rngs)
        self.more = Frozen(jnp.zeros(3), axes=(None,), draw=None)

    __call__ = toy.Model.__call__


class Adding(toy.Toy):
    def build(self, rngs: nnx.Rngs) -> nnx.Module:
        return Added(rngs)

    def start(self, trainable: Params, frozen: Params) -> Params:
        return trainable | {"more": jnp.zeros(3)}


class Replacing(toy.Toy):
    def start(self, trainable: Params, frozen: Params) -> Params:
        return trainable | {name: 2 * x for name, x in frozen.items()}


@pytest.mark.parametrize("task", [Adding, Replacing])
def test_damaged_frozen_values_of_another_origin_are_a_user_error(
    tmp_path: Path, task: type[toy.Toy]
) -> None:
    toy.run(tmp_path, task(), train__steps=5)
    break_arrays(tmp_path / "checkpoints/frozen/0")
    with pytest.raises(UserError, match=r"the frozen checkpoint, .*, cannot be read"):
        toy.run(tmp_path, task())


def test_damaged_frozen_values_that_the_platform_draws_otherwise_are_a_user_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy.run(tmp_path, train__steps=5)
    break_arrays(tmp_path / "checkpoints/frozen/0")
    draw = frozen.draw_frozen
    monkeypatch.setattr(
        # Permuted values have the same checksum.
        frozen,
        "draw_frozen",
        lambda *a: {n: x[::-1] for n, x in draw(*a).items()},
    )
    with pytest.raises(UserError, match=r"the frozen checkpoint, .*, cannot be read"):
        toy.run(tmp_path)


def test_lost_predictions_are_written_by_testing_the_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """The way out that `common.metrics.predictions.TEST_AGAIN` names."""

    class Predicting(toy.Toy):
        def predict(self, values: ModelState, split: str) -> Losses:
            error = np.array([self.evaluate(values, split)["error"]])
            return Losses("examples", error, np.ones(1), np.zeros(0), np.zeros(0), "token")

    first = toy.run(tmp_path, Predicting())
    costs = load(tmp_path / PREDICTIONS).costs_E
    for name in (PREDICTIONS, "summary.json"):
        (tmp_path / name).unlink()
    capsys.readouterr()
    task = Predicting()
    assert toy.run(tmp_path, task)["test"] == first["test"]
    np.testing.assert_array_equal(load(tmp_path / PREDICTIONS).costs_E, costs)
    assert task.starts == [] and "resuming from step 20" in capsys.readouterr().out


def test_lost_lines_of_metrics_are_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    toy.run(tmp_path, train__steps=10)
    toy.run(tmp_path, train__steps=15)
    assert "warning" not in capsys.readouterr().err
    path = tmp_path / METRICS
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if json.loads(line)["step"] > 10))
    assert toy.run(tmp_path)["steps"] == 20
    expected = f"warning: {path} lacks lines of steps up to 10: the run goes on"
    assert capsys.readouterr().err.count(expected) == 1
    path.unlink()
    toy.run(tmp_path, train__steps=25)
    assert "lacks lines of steps up to 20: " in capsys.readouterr().err
