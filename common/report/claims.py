"""The claims of a paper, PAPER/claims.csv, and their verdicts.

A claim says that A is better than, worse than or equivalent to B in a metric. Its evidence is one of

- "runs": A and B are experiments of the paper, compared by `common.report.significance`;
- "confirmed: TEST" or "refuted: TEST": the test TEST, such as tests/a.py::test_b, decides without comparing runs;
- "observed: TEST": the test TEST measures the claim once, on small data, which is not enough for a verdict;
- "plan: OPTIONS": only runs at the paper's scale can decide; `launch.plan OPTIONS` estimates their cost.
"""

import csv
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.resources import files

from common.config import check_choice
from common.errors import check
from common.metrics.kinds import MODES
from common.metrics.predictions import PREDICTIONS, TEST_AGAIN
from common.report.runs import Run, check_distinct
from common.report.significance import Comparison, Sample, compare, correct, sample_of
from common.report.table import Table, digits_for, mean_std

CLAIMS, PLANS = "claims.csv", "claims_plans.csv"
"""Files in a paper's folder: the claims, and the chip-hours that `launch.plan` estimates for claims of kind "plan"."""

RESOURCES = {"flops": "training FLOPs", "parameters": "trained parameters"}
"""Metric that is a count -> display name. Smaller values are better."""

_TESTED = {
    "confirmed": "holds by arithmetic",
    "refuted": "refuted by arithmetic",
    "observed": "observed in a test, no verdict",
}
"""Kind of evidence from a test -> text in the column "verdict"."""


@dataclass(frozen=True)
class Claim:
    """A row of claims.csv.

    Attributes:
      section: section, table or figure of the paper.
      claim: the claim in the words of this project.
      metric: a metric of `common.report.significance.compare` or of RESOURCES; may be "" if the evidence is not "runs".
      a, b: texts from which the paper's `ExperimentSuite.side` makes the two compared cases. Like `metric`, may be "".
      direction: the paper's verdict on A against B: "better", "worse" or "equivalent".
      printed: numbers that the paper prints for this claim; may be "".
      evidence: see the module's docstring.
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
        """The test, or options of `launch.plan`, after the colon of `evidence`."""
        return self.evidence.partition(":")[2].strip()


def read(paper: str) -> list[Claim]:
    """Returns the claims of a paper. Raises a UserError if claims.csv is damaged."""
    path = files(paper) / CLAIMS
    names = [field.name for field in fields(Claim)]
    rows = list(csv.reader(path.read_text(encoding="utf-8").splitlines()))
    header = ", ".join(rows[0]) if rows else "nothing"
    check(rows[:1] == [names], f"{path}: the columns must be {', '.join(names)}, got {header}")
    claims: dict[str, Claim] = {}
    for number, row in enumerate(rows[1:], start=2):
        where, cells = f"{path}, line {number}", len(row)
        check(cells == len(names), f"{where}: the row must have {len(names)} cells, got {cells}")
        claim = Claim(*(cell.strip() for cell in row))
        check_choice(f"{where}: direction", claim.direction, ("better", "worse", "equivalent"))
        check_choice(f"{where}: evidence", claim.kind, ("runs", *_TESTED, "plan"))
        needed = ("metric", "a", "b") if claim.kind == "runs" else ("source",)
        empty = [name for name in ("id", "section", "claim", *needed) if not getattr(claim, name)]
        named = {"source": "the text after the colon of the evidence"}
        listed = " and ".join(named.get(name, f"the column {name}") for name in empty)
        check(not empty, f"{where}: {listed} must not be empty")
        check(
            claim.id not in claims,
            f"{where}: the id {claim.id} is used twice: rename one of the two claims",
        )
        claims[claim.id] = claim
    return list(claims.values())


def chip_hours(paper: str) -> dict[str, str]:
    """Returns {options of `launch.plan`: estimated chip-hours, as text}; {} if the paper has no estimates."""
    path = files(paper) / PLANS
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return {options: hours for options, hours, *_ in list(csv.reader(text.splitlines()))[1:]}


@dataclass(frozen=True)
class Finding:
    """A claim and its comparison.

    Attributes:
      comparison: the comparison of the runs of A and B. None if runs are missing, or if the evidence is not "runs".
      missing: reason why runs are missing, otherwise "".
    """

    claim: Claim
    comparison: Comparison | None = None
    missing: str = ""


def find(
    claims: Sequence[Claim],
    groups: Mapping[str, Sequence[Run]],
    missing: Mapping[str, str],
) -> list[Finding]:
    """Returns a finding for each claim.

    Compares A and B if the evidence of a claim is "runs" and the runs exist. Corrects these comparisons together by
    Holm's method (`correct`).

    Args:
      groups: `Claim.a` or `Claim.b` -> the runs of this case.
      missing: `Claim.a` or `Claim.b` -> reason why the runs of this case are missing.

    Raises:
      UserError: the runs of a claim lack its metric or cannot be compared, or a run is given twice.
    """
    reasons = [missing.get(claim.a) or missing.get(claim.b) or "" for claim in claims]
    ran = [c for c, reason in zip(claims, reasons, strict=True) if c.kind == "runs" and not reason]
    compared = correct([_compared(claim, groups[claim.a], groups[claim.b]) for claim in ran])
    by_id = {claim.id: comparison for claim, comparison in zip(ran, compared, strict=True)}
    return [
        Finding(claim, by_id.get(claim.id), reason)
        for claim, reason in zip(claims, reasons, strict=True)
    ]


def _compared(claim: Claim, a: Sequence[Run], b: Sequence[Run]) -> Comparison:
    check_distinct(a, b)
    if claim.metric in RESOURCES:
        return _resources(claim.metric, a, b)
    by_metric = {one.metric: one for one in compare(a, b)}
    # `compare` computes the test metrics from predictions.npz, and omits them if a run lacks this file.
    tested = claim.metric in MODES
    without = [run.place for run in (*a, *b) if tested and run.predictions is None]
    check(
        not without,
        f"claim {claim.id}: {', '.join(without[:1])} has no {PREDICTIONS}, from which {claim.metric} is computed:"
        f" restore this file, or {TEST_AGAIN}",
    )
    check(
        claim.metric in by_metric,
        f"claim {claim.id} in {CLAIMS}: its runs cannot be compared by {claim.metric}; choose one of"
        f" {', '.join([*by_metric, *RESOURCES])}",
    )
    return by_metric[claim.metric]


def _resources(metric: str, a: Sequence[Run], b: Sequence[Run]) -> Comparison:
    """Compares a metric of RESOURCES. Counts have no noise, except FLOPs after early stopping or a time limit."""
    stopped = any(run.summary.get("stopped_by", "steps") != "steps" for run in (*a, *b))
    samples = []
    for runs in (a, b):
        if metric == "flops":
            counts = [run.summary["flops"] for run in runs]
        else:
            counts = [run.summary["params"]["trainable"] for run in runs]
        varies = metric == "flops" and stopped
        mean = (sum(counts) / len(counts),)
        samples.append(sample_of(runs, counts) if varies else Sample(mean, seedless=True))
    return Comparison(RESOURCES[metric], "min", *samples)


def outcome(finding: Finding, hours: Mapping[str, str]) -> str:
    """Returns the verdict on a claim as text, or why the claim has no verdict. `hours` is the result of `chip_hours`.

    A verdict from runs begins with "holds", "does not hold" or "undecided", a verdict by a test with "holds" or
    "refuted".
    """
    claim = finding.claim
    if claim.kind in _TESTED:
        return f"{_TESTED[claim.kind]} ({claim.source})"
    if claim.kind == "plan":
        known = hours.get(claim.source)
        kind = re.search(r"--topology[= ](?:\d+x)?(\w+):", claim.source)
        cost = f"{known} chip-hours{f' on {kind[1]}' if kind else ''}"
        return f"not run: {cost if known else 'estimate its cost with launch.plan'}"
    if finding.comparison is None:
        return f"not run: {finding.missing}"
    if finding.comparison.word == claim.direction:
        return "holds"
    if finding.comparison.word == "undecided":
        return str(finding.comparison)
    return f"does not hold: {finding.comparison}"


def table(findings: Sequence[Finding], hours: Mapping[str, str], scale: str) -> Table:
    """Returns the table of claims, a row for each finding.

    Args:
      hours: the result of `chip_hours`.
      scale: the scale of the runs, such as "laptop".
    """
    columns = ("claim", "section", "what the paper says", "printed", "metric")
    columns += ("A", "B", "A - B", "95% interval", "seeds", "scale", "verdict")
    rows = []
    for finding in findings:
        claim, cells = finding.claim, ("",) * 6
        if finding.comparison:
            cells = (*_cells(claim, finding.comparison), scale)
        elif claim.kind == "runs":
            cells = (claim.a, claim.b, "", "", "", scale)
        named = (claim.id, claim.section, claim.claim, claim.printed, claim.metric)
        rows.append((*named, *cells, outcome(finding, hours)))
    return Table(columns, rows)


def _cells(claim: Claim, comparison: Comparison) -> tuple[str, ...]:
    """Returns five cells of a claim's row: A and B, each with mean ± standard deviation; A - B; interval; seeds.

    If a mean is at least a million in absolute value, the cells have no standard deviations, and A - B and the interval
    are in percent of B's mean.
    """
    samples = (comparison.a, comparison.b)
    digits = digits_for((*comparison.a.values, *comparison.b.values))
    means = [mean_std(sample.values, digits) for sample in samples]
    share, unit = 1.0, ""
    if max(abs(sample.mean) for sample in samples) >= 1e6:
        means = [f"{sample.mean:.4g}" for sample in samples]
        share, digits, unit = 100 / comparison.b.mean, 1, " %"
    difference, low, high = (
        f"{share * x:+.{digits}f}" for x in (comparison.difference, comparison.low, comparison.high)
    )
    known = not math.isnan(comparison.low) and comparison.noise != "nothing"
    interval = f"{low} to {high}{unit}" if known else ""
    seeds = " and ".join("none" if s.seedless else str(len(s.values)) for s in samples)
    sides = (f"{claim.a} {means[0]}", f"{claim.b} {means[1]}")
    return (*sides, f"{difference}{unit}", interval, seeds)


NOTE = (
    "A claim about runs says that A is better than, worse than or equivalent to B. The claim holds if the runs give"
    " this verdict, and does not hold if the runs give one of the other two verdicts, at a significance level of 5 %."
    " Otherwise the claim is undecided. The comparisons of a paper that have enough seeds are corrected together by"
    " Holm's method. Equivalent means that the difference is smaller than the margin of the metric, which requires that"
    " the whole 95 % interval lies within the margin. By arithmetic: a test decides the claim without training."
)
