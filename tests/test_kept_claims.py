"""The tables of claims in results/ equal the tables that the current code computes from the runs kept in results/."""

import importlib
import sys
from pathlib import Path

import pytest

from common.report import claims

RESULTS = Path(__file__).parents[1] / "results"
KEPT = sorted(path.parent for path in RESULTS.glob("*/*/claims.csv"))


@pytest.mark.medium
@pytest.mark.parametrize("folder", KEPT, ids=lambda path: "-".join(path.parts[-2:]))
def test_claims_table_equals_its_kept_runs(folder, tmp_path, monkeypatch):
    paper, scale = folder.parts[-2:]
    reproduce = importlib.import_module(f"{paper}.reproduce")
    if (folder / "runs").exists():
        (tmp_path / "runs").symlink_to(folder / "runs")
    # The command line of `make claims`: the defaults of its options differ from the defaults of `ExperimentSuite`.
    arguments = ["claims", f"--scale={scale}", "--kept", f"--out={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["reproduce", *arguments])
    reproduce.main()
    for name in ("claims.csv", "claims.md"):
        assert (tmp_path / name).read_text() == (folder / name).read_text(), "run `make claims`"


def test_claims_page_equals_the_tables_of_all_papers():
    assert {path.parts[-2] for path in KEPT} == {
        "explicit_opt",
        "gmlp_lm",
        "perception",
        "reservoir",
    }
    assert (RESULTS / "CLAIMS.md").read_text() == claims.page(RESULTS), "run `make claims`"
