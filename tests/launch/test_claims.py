"""python -m launch.claims: the chip-hours of the claims that only a paper's own scale decides."""

import csv
import sys
from types import SimpleNamespace

import pytest

from common.errors import UserError
from common.report import claims as report
from launch import claims, topology
from tests.programs import finish, start

HEADER = "id,section,claim,metric,a,b,direction,printed,evidence\n"


@pytest.fixture
def paper(tmp_path, monkeypatch) -> str:
    """A package with two plans, one of them twice."""
    folder = tmp_path / "planned"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    plans = ("--config=a", "--config=b", "--config=a")
    rows = [f"c{i},2,x,,,,better,,plan: {plan}\n" for i, plan in enumerate(plans)]
    (folder / "claims.csv").write_text(HEADER + "".join(rows))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "planned", raising=False)
    return "planned"


def found(hours: float | None) -> SimpleNamespace:
    return SimpleNamespace(chip_hours=hours, bound=SimpleNamespace(binds="memory"))


def test_every_plan_is_asked_for_once_and_read_by_the_table_of_claims(paper):
    asked = []

    def ask(plan: str) -> SimpleNamespace:
        asked.append(plan)
        return found(1234.5)

    path = claims.place(paper)
    claims.write(paper, path, ask)
    assert report.chip_hours(paper) == {"--config=a": "1,234.50", "--config=b": "1,234.50"}
    claims.write(paper, path, ask)
    assert asked == ["--config=a", "--config=b"]
    # What no claim has any more is left out once another plan is asked for.
    path.write_text("plan,chip_hours,binds,commit\n--config=old,1,x,y\n--config=a,2,x,y\n")
    claims.write(paper, path, ask)
    assert report.chip_hours(paper) == {"--config=a": "2", "--config=b": "1,234.50"}


def test_what_is_known_before_a_fault_is_kept(paper):
    def ask(plan: str) -> SimpleNamespace:
        if plan == "--config=b":
            raise UserError("the step does not fit")
        return found(2.0)

    with pytest.raises(UserError, match="--config=b: the step does not fit"):
        claims.write(paper, claims.place(paper), ask)
    assert report.chip_hours(paper) == {"--config=a": "2.00"}
    with pytest.raises(UserError, match="--config=b: its configuration says no number of steps"):
        claims.write(paper, claims.place(paper), lambda plan: found(None))


def test_wrong_papers_and_a_missing_compiler_are_told_in_a_line(monkeypatch):
    told = finish(start([sys.executable, "-m", "launch.claims", "reservoirs"]), code=2)
    assert "there is no reservoirs/claims.csv" in told
    monkeypatch.setattr(topology, "has_compiler", lambda: False)
    with pytest.raises(UserError, match="the TPU compiler is missing: pip install libtpu"):
        claims.estimate_of("--config=configs/mnist_explicit.py --topology=v5e:1x1", quick=True)


@pytest.mark.skipif(not topology.has_compiler(), reason="needs the TPU compiler")
def test_an_estimate_is_that_of_the_plan():
    plan = "--config=configs/mnist_explicit.py --config.mesh.fsdp=4 --topology=v5e:2x4"
    one = claims.estimate_of(plan, quick=True)
    assert one.mesh.shape["fsdp"] == 4 and one.topology.name == "v5e:2x4"
    assert one.bound.seconds > 0


def test_the_columns_are_those_that_are_read(paper):
    claims.write(paper, claims.place(paper), lambda plan: found(1.0))
    with claims.place(paper).open() as file:
        header, row, *_ = csv.reader(file)
    assert tuple(header) == claims.COLUMNS and row[2] == "memory" and row[3]
