"""python -m launch.claims: chip-hours of the claims that need runs at the paper's scale."""

import csv
import sys
from types import SimpleNamespace

import pytest

from common.errors import UserError
from common.report import claims as report
from launch import claims, estimate, topology
from tests.programs import call

HEADER = "id,section,claim,metric,a,b,direction,printed,evidence\n"


@pytest.fixture
def paper(tmp_path, monkeypatch) -> str:
    """Returns the name of a package. Its claims.csv names two plans, the first plan twice.

    A plan is a text with options of `launch.plan`.
    """
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
    place = SimpleNamespace(name="v5e:1x1")
    return SimpleNamespace(chip_hours=hours, bound=SimpleNamespace(binds="memory"), topology=place)


def test_each_plan_is_estimated_once_and_read_by_reports(paper):
    asked = []

    def ask(plan: str) -> SimpleNamespace:
        asked.append(plan)
        return found(1234.5)

    path = claims.plans_path(paper)
    claims.write(paper, path, ask)
    assert report.chip_hours(paper) == {"--config=a": "1,234.50", "--config=b": "1,234.50"}
    claims.write(paper, path, ask)
    assert asked == ["--config=a", "--config=b"]
    # Writing removes plans that no claim needs, even if the file already has all needed plans.
    path.write_text(path.read_text() + "--config=old,1,x,y\n")
    claims.write(paper, path, ask)
    assert "old" not in path.read_text()
    path.write_text("plan,chip_hours,binds,commit\n--config=old,1,x,y\n--config=a,2,x,y\n")
    claims.write(paper, path, ask)
    assert report.chip_hours(paper) == {"--config=a": "2", "--config=b": "1,234.50"}


def test_failing_plan_does_not_stop_the_others(paper, capsys):
    def ask(plan: str) -> SimpleNamespace:
        if plan == "--config=a":
            raise UserError("the step does not fit")
        return found(2.0)

    with pytest.raises(
        UserError, match=r"1 of 2 plans in .*claims.csv could not be estimated \(--config=a"
    ):
        claims.write(paper, claims.plans_path(paper), ask)
    assert "error: --config=a: the step does not fit" in capsys.readouterr().err
    assert report.chip_hours(paper) == {"--config=b": "2.00"}
    with pytest.raises(
        UserError, match=r"1 of 2 plans in .*claims.csv could not be estimated \(--config=a"
    ):
        claims.write(paper, claims.plans_path(paper), lambda plan: found(None))
    assert "the number of steps is 0, or unknown without data" in capsys.readouterr().err


def test_unknown_paper_and_wrong_options_raise_errors():
    told = call("launch.claims", "reservoirs", code=2)
    assert "unknown paper 'reservoirs'" in told
    with pytest.raises(UserError, match="a plan of a claim cannot have --decode: leave out"):
        claims.estimate_of(
            "--config=configs/mnist_explicit.py --topology=cpu:1 --decode", quick=True
        )
    told = call("launch.scaling", "--exchange", "--kind=cpu", code=2)
    assert (
        "--kind=cpu has no effect with --exchange, whose devices are fixed: leave out --kind"
        in told
    )


@pytest.mark.parametrize(
    ("installed", "name", "package"),
    [("h100", "2xv5e:1x1", "libtpu"), ("v5e", "h100:8", r'"jax\[cuda12\]')],
)
def test_plan_needs_the_compiler_for_its_own_topology(monkeypatch, installed, name, package):
    monkeypatch.setattr(topology, "has_compiler", lambda kind="v5e": kind == installed)
    with pytest.raises(
        UserError,
        match=f"the compiler for --topology={name} is not installed: pip install {package}",
    ):
        claims.estimate_of(f"--config=configs/mnist_explicit.py --topology={name}", quick=True)


def test_plan_for_gpus_does_not_need_the_tpu_compiler(monkeypatch):
    monkeypatch.setattr(topology, "has_compiler", lambda kind="v5e": kind == "h100")
    prepared = []
    monkeypatch.setattr(topology, "prepare", lambda name, quick: prepared.append(name))
    monkeypatch.setattr(topology, "find", lambda name: name)
    monkeypatch.setattr(estimate, "estimate", lambda experiment, devices: devices)
    plan = "--config=configs/mnist_explicit.py --topology=h100:8"
    assert claims.estimate_of(plan, quick=True) == "h100:8" and prepared == ["h100:8"]


@pytest.mark.skipif(not topology.has_compiler(), reason="needs the TPU compiler")
def test_estimate_uses_options_of_the_plan():
    plan = "--config=configs/mnist_explicit.py --config.mesh.fsdp=4 --topology=v5e:2x4"
    one = claims.estimate_of(plan, quick=True)
    assert one.mesh.shape["fsdp"] == 4 and one.topology.name == "v5e:2x4"
    assert one.bound.seconds > 0


def test_plans_file_columns(paper):
    claims.write(paper, claims.plans_path(paper), lambda plan: found(1.0))
    with claims.plans_path(paper).open() as file:
        header, row, *_ = csv.reader(file)
    assert tuple(header) == claims.COLUMNS and row[2] == "memory" and row[3]
