"""benchmarks.overview writes a table and a figure of the kept runs."""

import json
from pathlib import Path

import pytest

from benchmarks import overview
from common.errors import UserError

FOLDER = Path("explicit_opt/laptop/runs")


def keep(results: Path, name: str, accuracy: float | None, trained: int = 7840) -> None:
    folder = results / FOLDER / name
    folder.mkdir(parents=True)
    test = {} if accuracy is None else {"accuracy": accuracy}
    summary = {"test": test, "flops": 1e9 * trained, "params": {"trainable": trained}}
    (folder / "summary.json").write_text(json.dumps(summary))


@pytest.fixture
def results(tmp_path: Path) -> Path:
    keep(tmp_path, "digits_1_warm_seed1_learning_rate=1e-3", 92.0)
    keep(tmp_path, "digits_1_warm_seed2_learning_rate=1e-3", 93.0)
    # In a sweep, only runs at the chosen grid point (here 1e-3) have test results.
    keep(tmp_path, "digits_1_warm_seed1_learning_rate=3e-3", None)
    keep(tmp_path, "digits_1_cold_seed1", 91.0, trained=99)
    keep(tmp_path, "digits_2_warm_seed1", 50.0)  # The figure does not show this case.
    return tmp_path


def test_a_case_is_the_mean_of_its_tested_seeds(results, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["overview", f"--results={results}"])
    overview.main()
    rows = [line.split(",") for line in (results / "overview.csv").read_text().splitlines()]
    cells = [dict(zip(rows[0], row[-len(rows[0]) :], strict=True)) for row in rows[1:]]
    assert [(row["way"], row["seeds"]) for row in cells] == [
        ("from random weights", "1"),
        ("from the formula", "2"),
    ]
    assert [float(row["mean"]) for row in cells] == [91.0, 92.5]
    assert [row["deviation"][:6] for row in cells] == ["", "0.7071"]
    assert [float(row["trained parameters"]) for row in cells] == [99, 7840]
    assert [float(row["FLOPs"]) for row in cells] == [9.9e10, 7.84e12]
    assert (results / "overview.png").stat().st_size > 10_000
    assert "overview.png" in capsys.readouterr().out


def test_missing_runs_raise_user_error_with_the_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["overview", f"--results={tmp_path}"])
    with pytest.raises(UserError, match=f"--results={tmp_path} has no runs with test metrics"):
        overview.main()
