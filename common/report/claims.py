"""The claims of a paper as data, PAPER/claims.csv, and what runs or arithmetic say of each.

A claim has two sides and a direction: A is better than B, worse, or equivalent, in one metric. Its evidence is one of

- runs: both sides are experiments of the paper; the rule of `common.report.verdict` decides;
- test: arithmetic decides, in a test that is named: "confirmed: tests/a.py::test_b" or "refuted: tests/a.py::test_b";
- plan: only the paper's own scale decides; options of `launch.plan` say what that would cost.

`python -m common.report.claims` writes results/CLAIMS.md, the claims of all papers on one page.
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
"""In the folder of a paper; the second has what `launch.plan` said of the first one's plans."""

DIRECTIONS = ("better", "worse", "equivalent")
EVIDENCE = ("runs", "confirmed", "refuted", "plan")

RESOURCES = {"flops": "training FLOPs", "parameters": "trained parameters"}
"""What is counted, by how a claim names it: fewer are better."""


@dataclass(frozen=True)
class Claim:
    """A row of claims.csv.

    Attributes:
      section: of the paper, with its table or figure.
      claim: in our own words.
      metric: as `common.report.verdict.compare` names it, or one of RESOURCES; empty where a test decides.
      a, b: the sides, as the paper's `ExperimentSuite.side` reads them.
      direction: what the paper says of A against B.
      printed: the numbers that it prints.
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
    """The claims of a paper.

    Raises:
      UserError: the file is damaged, two claims have one id, or a row names no side, direction or evidence.
    """
    path = files(paper) / CLAIMS
    names = [field.name for field in fields(Claim)]
    rows = list(csv.reader(path.read_text(encoding="utf-8").splitlines()))
    check(bool(rows) and rows[0] == names, f"{path}: the columns must be {', '.join(names)}")
    claims = []
    for number, row in enumerate(rows[1:], start=2):
        where = f"{path}, line {number}"
        check(len(row) == len(names), f"{where}: {len(row)} cells, not {len(names)}")
        claim = Claim(*(cell.strip() for cell in row))
        check_choice(f"{where}: direction", claim.direction, DIRECTIONS)
        check_choice(f"{where}: evidence", claim.kind, EVIDENCE)
        check(bool(claim.claim and claim.section), f"{where}: no claim, or no section")
        check(
            claim.kind != "runs" or bool(claim.metric and claim.a and claim.b),
            f"{where}: runs need a metric and two sides",
        )
        check(claim.kind == "runs" or bool(claim.source), f"{where}: {claim.kind} of what?")
        check(all(claim.id != other.id for other in claims), f"{where}: {claim.id} is there twice")
        claims.append(claim)
    return claims


def chip_hours(paper: str) -> dict[str, str]:
    """What `launch.plan` said of each plan, by its options; empty where it was not asked."""
    path = files(paper) / PLANS
    if not path.is_file():
        return {}
    rows = csv.reader(path.read_text(encoding="utf-8").splitlines())
    return {options: hours for options, hours, *_ in list(rows)[1:]}


@dataclass(frozen=True)
class Finding:
    """What is known of a claim.

    Attributes:
      comparison: None where no runs decide.
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
    """Compares the sides of every claim, all claims corrected together.

    Args:
      groups: the runs of each side.
      missing: why a side has none.

    Raises:
      UserError: a claim names a metric that its runs do not have, or see `verdict.check_runs`.
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
        raise UserError(f"claim {claim.id}: its runs have no metric {claim.metric}, but {known}")
    return found


def _resources(metric: str, a: Sequence[Run], b: Sequence[Run]) -> Comparison:
    """Exact numbers without noise; FLOPs of runs that something else than their steps ended have the noise of seeds."""

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
    """holds, does not hold, undecided; or why nobody knows."""
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
    """A row per claim."""
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
    """The claims of all papers on one page of Markdown, from what `reproduce claims` wrote to RESULTS/PAPER/SCALE.

    Raises:
      UserError: there are none.
    """
    found = sorted(
        results.glob("*/*/claims.md"),
        key=lambda path: (path.parts[-3], SCALES.index(path.parts[-2])),
    )
    check(bool(found), f"{results} has no claims: python -m PAPER.reproduce claims writes them")
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
