"""The claims of a paper, PAPER/claims.csv, and their verdicts.

A claim says that A is better than, worse than or equivalent to B in a metric. Its evidence is one of

- runs: A and B are experiments of the paper, compared by `common.report.verdict`;
- "confirmed: TEST" or "refuted: TEST": a test decides by arithmetic, such as tests/a.py::test_b;
- "plan: OPTIONS": only the paper's scale can decide; OPTIONS of `launch.plan` estimate its cost.

`python -m common.report.claims` writes results/CLAIMS.md, the claims of all papers.
"""

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path

from common.config import check, check_choice, parser_for
from common.errors import UserError
from common.report.runs import Run
from common.report.table import Table, digits_for, mean_std
from common.report.verdict import MARGINS, Comparison, Sample, check_runs, compare, correct
from common.runtime import program

CLAIMS, PLANS = "claims.csv", "claims_plans.csv"
"""Files in the folder of a paper: its claims, and the chip-hours that `launch.plan` estimates for its "plan" claims."""

DIRECTIONS = ("better", "worse", "equivalent")
EVIDENCE = ("runs", "confirmed", "refuted", "plan")

RESOURCES = {"flops": "training FLOPs", "parameters": "trained parameters"}
"""Metrics of claims that are counted instead of measured, with their display names; fewer are better."""


@dataclass(frozen=True)
class Claim:
    """A row of claims.csv.

    Attributes:
      section: section, table or figure of the paper.
      claim: the claim in our words.
      metric: a metric of `common.report.verdict.compare`, or one of RESOURCES; empty if a test decides.
      a, b: the sides, in the syntax of the paper's `ExperimentSuite.side`.
      direction: the paper's verdict on A against B.
      printed: the numbers that the paper prints.
      evidence: "runs", "confirmed: TEST", "refuted: TEST", or "plan: OPTIONS".
    """

    id: str
    section: str
    claim: str
    metric: str
    a: str
    b: str
    direction: str
    printed: str
    evidence: str

    @property
    def kind(self) -> str:
        return self.evidence.partition(":")[0].strip()

    @property
    def source(self) -> str:
        """The test, or the options of `launch.plan`."""
        return self.evidence.partition(":")[2].strip()


def read(paper: str) -> list[Claim]:
    """Returns the claims of a paper.

    Raises:
      UserError: the file is damaged, an id is not unique, or a row lacks a side, direction or evidence.
    """
    path = files(paper) / CLAIMS
    names = [field.name for field in fields(Claim)]
    rows = list(csv.reader(path.read_text(encoding="utf-8").splitlines()))
    check(bool(rows) and rows[0] == names, f"{path}: the columns must be {', '.join(names)}")
    claims = []
    for number, row in enumerate(rows[1:], start=2):
        where = f"{path}, line {number}"
        check(
            len(row) == len(names), f"{where}: the row has {len(row)} cells instead of {len(names)}"
        )
        claim = Claim(*(cell.strip() for cell in row))
        check_choice(f"{where}: direction", claim.direction, DIRECTIONS)
        check_choice(f"{where}: evidence", claim.kind, EVIDENCE)
        check(bool(claim.claim and claim.section), f"{where}: the claim or section is empty")
        check(
            claim.kind != "runs" or bool(claim.metric and claim.a and claim.b),
            f"{where}: evidence runs needs a metric and the sides a and b",
        )
        check(
            claim.kind == "runs" or bool(claim.source),
            f"{where}: evidence {claim.kind} needs a source: '{claim.kind}: SOURCE'",
        )
        check(
            all(claim.id != other.id for other in claims),
            f"{where}: the id {claim.id} is used twice",
        )
        claims.append(claim)
    return claims


def chip_hours(paper: str) -> dict[str, str]:
    """Returns the estimated chip-hours by options of `launch.plan`; empty if the file does not exist."""
    path = files(paper) / PLANS
    if not path.is_file():
        return {}
    rows = csv.reader(path.read_text(encoding="utf-8").splitlines())
    return {options: hours for options, hours, *_ in list(rows)[1:]}


@dataclass(frozen=True)
class Finding:
    """The evidence of a claim.

    Attributes:
      comparison: None without runs.
      missing: why there are no runs.
    """

    claim: Claim
    comparison: Comparison | None = None
    missing: str = ""


def find(
    claims: Sequence[Claim],
    groups: Mapping[str, Sequence[Run]],
    missing: Mapping[str, str],
    margins: Mapping[str, float] = MARGINS,
) -> list[Finding]:
    """Compares the sides of every claim, with Holm's correction over all claims.

    Args:
      groups: the runs of each side.
      missing: why a side has no runs.

    Raises:
      UserError: the runs lack the metric of a claim; or as `verdict.check_runs`.
    """
    found = []
    for claim in claims:
        if claim.kind != "runs":
            found.append(Finding(claim))
        elif reason := missing.get(claim.a) or missing.get(claim.b):
            found.append(Finding(claim, missing=reason))
        else:
            found.append(Finding(claim, _compared(claim, groups, margins)))
    corrected = iter(correct([one.comparison for one in found if one.comparison]))
    return [
        Finding(one.claim, next(corrected) if one.comparison else None, one.missing)
        for one in found
    ]


def _compared(
    claim: Claim, groups: Mapping[str, Sequence[Run]], margins: Mapping[str, float]
) -> Comparison:
    a, b = groups[claim.a], groups[claim.b]
    check_runs(a, b)
    if claim.metric in RESOURCES:
        return _resources(claim.metric, a, b)
    every = compare(a, b, margins)
    found = next((one for one in every if one.metric == claim.metric), None)
    if found is None:
        known = ", ".join([*(one.metric for one in every), *RESOURCES])
        raise UserError(
            f"claim {claim.id}: its runs have no metric {claim.metric}; they have {known}"
        )
    return found


def _resources(metric: str, a: Sequence[Run], b: Sequence[Run]) -> Comparison:
    """Compares counts, which have no noise; only FLOPs of runs that stopped early have the noise of seeds."""

    def value(run: Run) -> float:
        summary = run.summary
        return summary["flops"] if metric == "flops" else summary["params"]["trainable"]

    stopped = {run.summary.get("stopped_by", "steps") for run in (*a, *b)}
    if metric == "flops" and stopped != {"steps"}:
        samples = [
            Sample(tuple(map(value, g)), seedless=all(run.seed is None for run in g))
            for g in (a, b)
        ]
        return Comparison(RESOURCES[metric], "min", *samples, 0.0, 0.0, "seeds")
    samples = [Sample((sum(map(value, g)) / len(g),), seedless=True) for g in (a, b)]
    return Comparison(RESOURCES[metric], "min", *samples, 0.0, 0.0, "nothing: counted")


def outcome(finding: Finding, hours: Mapping[str, str]) -> str:
    """Returns "holds", "does not hold", "undecided", or why there is no verdict."""
    claim = finding.claim
    match claim.kind:
        case "confirmed":
            return f"holds by arithmetic ({claim.source})"
        case "refuted":
            return f"refuted by arithmetic ({claim.source})"
        case "plan":
            known = hours.get(claim.source)
            cost = f"{known} chip-hours on v5e" if known else "ask launch.plan for its cost"
            return f"not run: {cost}"
    if finding.comparison is None:
        return f"not run: {finding.missing}"
    word = finding.comparison.word
    if word == "undecided":
        return str(finding.comparison)
    if word == claim.direction:
        return "holds"
    return f"does not hold: {finding.comparison}"


COLUMNS = (
    *("claim", "section", "what the paper says", "printed", "metric"),
    *("A", "B", "A - B", "95% interval", "seeds", "scale", "verdict"),
)


def table(findings: Sequence[Finding], hours: Mapping[str, str], scale: str) -> Table:
    """Returns a row per claim."""
    rows = []
    for one in findings:
        claim, found = one.claim, one.comparison
        cells: tuple = ("",) * 6
        if found:
            digits = digits_for((*found.a.values, *found.b.values))
            large = max(abs(found.a.mean), abs(found.b.mean)) >= 1e6
            means = [
                f"{s.mean:.4g}" if large else mean_std(s.values, digits) for s in (found.a, found.b)
            ]
            share, digits, unit = (100 / found.b.mean, 1, " %") if large else (1, digits, "")
            difference = f"{share * found.difference:+.{digits}f}{unit}"
            interval = f"{share * found.low:+.{digits}f} to {share * found.high:+.{digits}f}{unit}"
            if math.isnan(found.low) or found.noise.startswith("nothing"):
                interval = ""
            seeds = " and ".join(
                "none" if s.seedless else str(len(s.values)) for s in (found.a, found.b)
            )
            sides = [f"{side} {mean}" for side, mean in zip((claim.a, claim.b), means, strict=True)]
            cells = (*sides, difference, interval, seeds, scale)
        elif claim.kind == "runs":
            cells = (claim.a, claim.b, "", "", "", scale)
        rows.append(
            (
                *(claim.id, claim.section, claim.claim, claim.printed, claim.metric),
                *cells,
                outcome(one, hours),
            )
        )
    return Table(COLUMNS, rows)


NOTE = (
    "A claim holds, or does not, where the difference of A and B over seeds and test examples says so at 5 %, all"
    " claims of a paper corrected together by Holm's method; equivalent means that the whole 95 % interval lies within"
    " the margin of its metric. Everything else is undecided."
)


SCALES = ("paper", "laptop", "tiny")


def page(results: Path) -> str:
    """Returns the claims of all papers as Markdown, from the files RESULTS/PAPER/SCALE/claims.md.

    Raises:
      UserError: there are no such files.
    """
    found = sorted(
        results.glob("*/*/claims.md"),
        key=lambda path: (path.parts[-3], SCALES.index(path.parts[-2])),
    )
    check(bool(found), f"{results} has no claims: write them with python -m PAPER.reproduce claims")
    parts = ["# Claims\n", f"{NOTE}\n"]
    for path in found:
        paper, scale = path.parts[-3:-1]
        out = path.parent.relative_to(results.parent)
        command = f"python -m {paper}.reproduce claims --scale={scale} --kept --out={out}"
        parts += [f"## {paper}, {scale}\n", f"`{command}`\n", path.read_text(encoding="utf-8")]
    return "\n".join(parts)


def main() -> None:
    parser = parser_for("common.report.claims")
    parser.add_argument("--results", type=Path, default=Path("results"), metavar="DIR")
    options = parser.parse_args()
    path = options.results / "CLAIMS.md"
    path.write_text(page(options.results), encoding="utf-8")
    print(f"written: {path}")


if __name__ == "__main__":
    program.run(main)
