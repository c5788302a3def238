"""Every test that a PAPER/claims.csv names exists, and every plan that it names is valid."""

import ast
import shlex
from importlib.resources import files
from pathlib import Path

import pytest

from common import config
from common.report import claims
from launch import plan

ROOT = Path(__file__).parents[2]
PAPERS = [
    paper
    for paper in ("reservoir", "gmlp_lm", "explicit_opt", "perception")
    if (files(paper) / claims.CLAIMS).is_file()
]


def named(paper: str, *kinds: str) -> list[str]:
    return [claim.source for claim in claims.read(paper) if claim.kind in kinds]


@pytest.mark.parametrize("paper", PAPERS)
def test_tests_named_in_claims_exist(paper: str) -> None:
    for source in named(paper, "confirmed", "refuted", "observed"):
        path, _, name = source.partition("::")
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        functions = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        assert name in functions, source


@pytest.mark.parametrize("paper", PAPERS)
def test_plans_named_in_claims_are_valid(paper: str) -> None:
    """A plan names a configuration of the paper, and fields that the configuration has."""
    for source in named(paper, "plan"):
        fields, rest = config.split_fields(shlex.split(source))
        options = plan.arguments().parse_args(rest)
        experiment = config.load(options.config)
        config.override_all(experiment, fields)
        assert experiment.paper == paper and options.topology
