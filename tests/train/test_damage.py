"""Resuming and ending a run whose files are damaged or lost."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from common.errors import UserError
from tests.train import toy


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
