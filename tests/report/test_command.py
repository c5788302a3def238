"""python -m common.report: the files that it writes, its errors, and the names of layers."""

import csv
import sys

import pytest

from common.report import report
from common.report.groups import groups
from tests.programs import ROOT, finish, start
from tests.report.helpers import made

RUNS = [f"results/multi30k_{name}" for name in ("transformer", "t_res", "ffn_res")]
TABLES = ("runs", "differences", "aucc", "times", "seeds", "verdicts")


@pytest.mark.medium
def test_report_of_the_repository_results(tmp_path):
    options = ["--axis=step", "--horizon=shortest", f"--out={tmp_path / 'report'}"]
    output = finish(start([sys.executable, "-m", "common.report", *RUNS, *options]))
    assert "AUCC, BLEU·steps" in output and "never" not in output
    made = {path.name for path in (tmp_path / "report").iterdir()}
    tables = {f"{name}.{kind}" for name in TABLES for kind in ("csv", "md")}
    assert made == tables | {"curves.png", "layers_updatable.png"}
    with (tmp_path / "report" / "seeds.csv").open(newline="") as file:
        areas = [float(row["AUCC (step)"]) for row in csv.DictReader(file)]
    # results/observations.md has these values of the AUCC up to step 2,000, in units of BLEU x 1,000 steps.
    assert [round(area / 1000, 1) for area in areas] == [52.3, 51.8, 52.8]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "there are no runs to compare: give the folder of at least one run"),
        (
            [RUNS[0], "--horizon=4h"],
            "--horizon must be a finite number above 0, longest or shortest, got 4h",
        ),
        ([RUNS[0], "--out=README.md"], "cannot write to --out=README.md"),
        (
            ["runs/of/nobody"],
            "runs/of/nobody does not exist: give the folder or the summary.json of a run",
        ),
    ],
)
def test_errors_are_one_line(arguments, complaint, tmp_path, monkeypatch, capsys):
    from common.errors import UserError
    from common.report.__main__ import main

    monkeypatch.chdir(ROOT)
    where = [f"--out={tmp_path}"] if not any("--out" in a for a in arguments) else []
    monkeypatch.setattr(sys, "argv", ["report", *arguments, *where])
    with pytest.raises(UserError) as fault:
        main()
    assert str(fault.value).startswith(complaint)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("models", "figures"),
    [
        ([("none", 6)], set()),
        ([("none", 6), ("none", 8)], {"layers_updatable"}),
        ([("none", 6), ("ffn", 6)], {"layers_updatable"}),
        ([("none", 6), ("ffn", 8)], {"layers_total"}),
        ([("none", 6), ("ffn", 9)], {"layers_updatable", "layers_total"}),
        ([("none", None), ("none", 8)], set()),
    ],
)
def test_figures_over_depth_need_two_depths(models, figures, tmp_path):
    """Without frozen layers, trained layers and all layers are the same number, so one figure is enough."""
    runs = [made([1.0], f"{kind}{depth}", reservoir=kind, layers=depth) for kind, depth in models]
    report.write(groups(runs), tmp_path, margins={})
    assert {path.stem for path in tmp_path.glob("*.png")} == figures | {"curves"}


def test_layers_are_named_by_the_paper_of_a_run():
    from common.report.groups import layers_of

    reservoirs = {"encoder_layers": 6, "reservoir": "ffn", "reservoirs": 2}
    assert str(layers_of({"paper": "reservoir", "model": reservoirs})) == "FFN, 2 of 6"
    # The configuration of an old run has no field `paper`.
    assert str(layers_of({"model": reservoirs})) == "FFN, 2 of 6"
    for paper in ("gmlp_lm", "perception", "nobody", "not a module"):
        found = layers_of({"paper": paper, "model": {"layers": 4, "kind": "gmlp"}})
        assert str(found) == "gmlp, 4 layers"
