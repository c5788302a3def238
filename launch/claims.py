"""Estimates the chip-hours of the runs at the paper's scale that claims need: python -m launch.claims PAPER

A plan is the options of `launch.plan` for one run, in PAPER/claims.csv. This program compiles the training step of each
plan that PAPER/claims_plans.csv lacks, and adds the plan's chip-hours to PAPER/claims_plans.csv, for `python -m
PAPER.reproduce claims`.
"""

import csv
import shlex
import sys
from collections.abc import Callable
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from common.runtime import program

if TYPE_CHECKING:
    from launch.estimate import Estimate

COLUMNS = ("plan", "chip_hours", "binds", "commit")


def write(paper: str, path: Path, ask: Callable[[str], "Estimate"]) -> None:
    """Adds the chip-hours of a paper's plans to the table `path`, and saves the table after each new plan.

    Keeps plans that the table already has, but removes plans that no claim of the paper needs.

    Args:
      ask: function from the options of a plan to its estimate.

    Raises:
      UserError: the claims are invalid; or, after all other plans are written, a plan cannot be estimated.
    """
    from common.errors import UserError, check
    from common.report import claims
    from common.train.workdir import commit
    from launch.plan import STEPS

    plans = dict.fromkeys(claim.source for claim in claims.read(paper) if claim.kind == "plan")
    rows = {row[0]: row for row in _read(path) if row[0] in plans}

    def save() -> None:
        with path.open("w", newline="", encoding="utf-8") as file:
            ordered = [rows[name] for name in plans if name in rows]
            csv.writer(file, lineterminator="\n").writerows([COLUMNS, *ordered])

    save()
    failed = []
    for number, plan in enumerate(plans, start=1):
        if plan in rows:
            continue
        print(f"{number} of {len(plans)}: {plan}", flush=True)
        try:
            estimate = ask(plan)
            check(
                estimate.bound is not None,
                f"the speed of --topology={estimate.topology.name} is unknown: in {paper}/{claims.CLAIMS}, give the"
                " plan a TPU slice, such as v5e:4x4",
            )
            check(
                estimate.chip_hours is not None,
                f"the number of steps is 0, or unknown without data: in {paper}/{claims.CLAIMS}, add to the plan"
                f" {STEPS}",
            )
        except UserError as fault:
            print(f"error: {plan}: {fault}", file=sys.stderr, flush=True)
            failed.append(plan)
            continue
        row = (plan, f"{estimate.chip_hours:,.2f}", estimate.bound.binds, commit())
        rows[plan] = row
        save()
        print(f"  {row[1]} chip-hours, bound by {row[2]}", flush=True)
    print(f"{len(rows)} plans in {path}")
    check(
        not failed,
        f"{len(failed)} of {len(plans)} plans in {paper}/{claims.CLAIMS} could not be estimated ({'; '.join(failed)}):"
        " correct the errors above and run the command again",
    )


def plans_path(paper: str) -> Path:
    """Returns the path of PAPER/claims_plans.csv. Raises a UserError if no package of this name has a claims.csv."""
    from common.errors import check
    from common.report import claims

    spec = find_spec(paper) if paper.isidentifier() else None
    is_package = bool(spec and spec.submodule_search_locations)
    check(
        is_package and (files(paper) / claims.CLAIMS).is_file(),
        f"unknown paper {paper!r}: give the name of a package that has the file {claims.CLAIMS}, such as reservoir",
    )
    return Path(str(files(paper) / claims.PLANS))


def _read(path: Path) -> list[tuple[str, ...]]:
    if not path.is_file():
        return []
    return [tuple(row) for row in list(csv.reader(path.read_text().splitlines()))[1:] if row]


def estimate_of(plan: str, quick: bool) -> "Estimate":
    """Returns the estimate of `launch.plan` with the options in the text `plan`. `quick` adds the option --quick.

    Raises a UserError if the options are invalid, the compiler for the topology is missing, or the step cannot be
    estimated, for example because it does not fit into memory.
    """
    from common.errors import check
    from launch import plan as program
    from launch import topology
    from launch.estimate import estimate

    options, experiment = program.parse(shlex.split(plan))
    ignored = [name for name in ("sweep", "decode", "price") if getattr(options, name)]
    names = " and ".join(f"--{name}" for name in ignored)
    check(not ignored, f"a plan of a claim cannot have {names}: leave out {names}")
    missing = topology.missing_compiler(options.topology)
    check(
        not missing,
        f"the compiler for --topology={options.topology} is not installed: pip install {missing}",
    )
    topology.prepare(options.topology, quick or options.quick)
    return estimate(experiment, topology.find(options.topology))


def main() -> None:
    import os

    from common.config import parser_for

    # Suppress XLA's log messages. The variable must be set before JAX is imported.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    parser = parser_for("launch.claims", __doc__)
    parser.add_argument("paper", help="folder of a paper with claims.csv, such as reservoir")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="compile with less optimization: faster, but memory and traffic differ from a real run",
    )
    options = parser.parse_args()
    path = plans_path(options.paper)
    write(options.paper, path, lambda plan: estimate_of(plan, options.quick))


if __name__ == "__main__":
    program.run(main)
