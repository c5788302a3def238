"""The claims of every paper: readable, with tests that exist and plans that can be made."""

import ast
import shlex

import pytest

from common import config
from common.report import claims
from launch import plan, topology
from tests.programs import ROOT

PAPERS = sorted(path.parent.name for path in ROOT.glob(f"*/{claims.CLAIMS}"))


@pytest.mark.parametrize("paper", PAPERS)
def test_every_test_that_decides_a_claim_exists(paper):
    for claim in claims.read(paper):
        if claim.kind in ("confirmed", "refuted"):
            path, _, name = claim.source.partition("::")
            body = ast.parse((ROOT / path).read_text()).body
            functions = {part.name for part in body if isinstance(part, ast.FunctionDef)}
            assert name.startswith("test_") and name in functions, claim.id


@pytest.mark.parametrize("paper", PAPERS)
def test_every_plan_is_of_a_configuration_with_these_fields_and_of_a_slice(paper, monkeypatch):
    monkeypatch.chdir(ROOT)
    for claim in claims.read(paper):
        if claim.kind == "plan":
            fields, rest = config.split_fields(shlex.split(claim.source))
            options = plan.arguments().parse_args(rest)
            experiment = config.load(options.config)
            config.override_all(experiment, fields)
            assert experiment.paper == paper, claim.id
            assert options.topology.partition(":")[0] in topology.CHIPS, claim.id
