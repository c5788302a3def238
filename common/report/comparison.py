"""Tables that compare groups of runs: AUCC, and times until runs have nearly converged (Shen et al., Tables 1 to 7).

All rows of a call share the metric, the clock (`common.train.clock`: without compilation, evaluation and checkpoints),
the definition of the area (`common.metrics.aucc`) and the horizon.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from common.config import check
from common.errors import UserError
from common.metrics.aucc import aucc, reaching, shared_horizon
from common.metrics.curve import Axis, Curve, Point
from common.report.axis import Units, area_unit, shown_name, units
from common.report.groups import Group
from common.report.runs import runs_alternated
from common.report.table import Table, digits_for, mean_std

Horizon = float | Literal["longest", "shortest"]
"""The end of an AUCC: in units of the axis, or at the end of the longest (as in the paper) or the shortest run."""

Reference = Literal["own", "all"]
"""What percentages refer to: the run's own best value, as in the paper, or the best value of all runs."""

PERCENTS = (95, 99, 100)


@dataclass(frozen=True)
class AuccRow:
    """The areas of a group; lists have an entry per run.

    Attributes:
      best: the best validation value up to the horizon.
      raw: AUCC up to the horizon, in metric units times axis units.
      normalised: `raw` divided by the largest AUCC of all runs; NaN if all are 0.
      measured: area under the measured values instead of the best values so far.
    """

    group: Group
    best: list[float]
    raw: list[float]
    normalised: list[float]
    measured: list[float]


@dataclass(frozen=True)
class TimeRow:
    """The times of a group to a percentage of the best value.

    Attributes:
      points: the first validation point of each run that reaches it; None if the run never does.
    """

    group: Group
    percent: float
    points: list[Point | None]

    def positions(self, axis: Axis) -> list[float | None]:
        """Returns the x coordinates of the points, in units of the axis."""
        return [None if point is None else point.at(axis) for point in self.points]

    def values(self) -> list[float | None]:
        """Returns the metric at the points."""
        return [None if point is None else point.value for point in self.points]


def horizon_of(compared: Sequence[Group], axis: Axis, horizon: Horizon = "longest") -> float | None:
    """Returns the horizon in units of the axis; None if the runs have no values on the axis (FLOPs not counted).

    Raises:
      UserError: the horizon is not a positive number, or lies before the first validation of a run.
    """
    if horizon in ("longest", "shortest"):
        curves = [curve for group in compared for curve in group.curves]
        horizon = shared_horizon(curves, axis, horizon)
        if horizon is None:
            return None
    check(
        not isinstance(horizon, str) and math.isfinite(horizon) and horizon > 0,
        f"the horizon must be a positive number, longest or shortest, not {horizon}",
    )
    for group in compared:
        for run in group.runs:
            first = run.curve.points[0].at(axis)
            if first > horizon:
                raise UserError(
                    f"the horizon {horizon:g} lies before the first validation of {run.name}, at {first:g}"
                )
    return float(horizon)


def aucc_rows(
    compared: Sequence[Group], axis: Axis = "seconds", horizon: Horizon = "longest"
) -> list[AuccRow]:
    """Returns best values and areas, a row per group; raises as `horizon_of`."""
    end = horizon_of(compared, axis, horizon)
    areas = [[aucc(curve, axis, end) for curve in group.curves] for group in compared]
    largest = max(area for some in areas for area in some) or math.nan
    return [
        AuccRow(
            group,
            best=[_until(curve, axis, end).best.value for curve in group.curves],
            raw=some,
            normalised=[area / largest for area in some],
            measured=[aucc(curve, axis, end, held=False) for curve in group.curves],
        )
        for group, some in zip(compared, areas, strict=True)
    ]


def time_rows(
    compared: Sequence[Group],
    axis: Axis = "seconds",
    horizon: Horizon = "longest",
    percents: Sequence[float] = PERCENTS,
    reference: Reference = "own",
) -> list[list[TimeRow]]:
    """Returns where each run first reaches percentages of the best value: a list per group, a row per percentage.

    If the metric is minimised, 95 % of a best value of 2 is 2 / 0.95. Best values are up to the horizon.

    Raises:
      UserError: a percentage is not in (0, 100], or the reference is unknown; or as `horizon_of`.
    """
    check(reference in ("own", "all"), f"the reference must be own or all, not {reference!r}")
    end = horizon_of(compared, axis, horizon)
    curves = [[_until(curve, axis, end) for curve in group.curves] for group in compared]
    best = None
    if reference == "all":
        values = [curve.best.value for some in curves for curve in some]
        best = max(values) if curves[0][0].mode == "max" else min(values)
    return [
        [TimeRow(group, p, [reaching(c, p / 100, best) for c in some]) for p in percents]
        for group, some in zip(compared, curves, strict=True)
    ]


def aucc_table(
    compared: Sequence[Group], axis: Axis = "seconds", horizon: Horizon = "longest"
) -> Table:
    """Returns `aucc_rows` as mean ± standard deviation over seeds."""
    rows = aucc_rows(compared, axis, horizon)
    shown = _units(compared, axis, horizon)
    curve = compared[0].curves[0]
    raw = [[area / shown.scale for area in row.raw] for row in rows]
    measured = [[area / shown.scale for area in row.measured] for row in rows]
    # Seconds of runs that did not alternate on the machine have no meaningful ratio.
    ratio = comparable(compared, axis)
    best_digits = digits_for(value for row in rows for value in row.best)
    digits = digits_for(area for some in raw for area in some)
    columns = ("model", "seeds", f"best {shown_name(curve)}")
    unit = area_unit(curve, shown.unit)
    columns += (f"AUCC, {unit}", "AUCC / largest", f"as measured, {unit}")
    return Table(
        columns,
        [
            (
                row.group.name,
                len(row.raw),
                mean_std(row.best, best_digits),
                mean_std(areas, digits),
                mean_std(row.normalised, 3) if ratio else "",
                mean_std(as_measured, digits),
            )
            for row, areas, as_measured in zip(rows, raw, measured, strict=True)
        ],
    )


def time_table(
    compared: Sequence[Group],
    axis: Axis = "seconds",
    horizon: Horizon = "longest",
    percents: Sequence[float] = PERCENTS,
    reference: Reference = "own",
) -> Table:
    """Returns `time_rows` as mean ± standard deviation over the seeds that reach the value, and the metric there."""
    groups = time_rows(compared, axis, horizon, percents, reference)
    shown = _units(compared, axis, horizon)
    points = [point for rows in groups for row in rows for point in row.points if point]
    at_digits = digits_for(point.at(axis) / shown.scale for point in points)
    digits = digits_for(point.value for point in points)
    columns, name = ["model"], shown_name(compared[0].curves[0])
    for percent in percents:
        columns += [f"{percent:g} % ({shown.unit})", f"{name} there"]
    table = []
    for group, rows in zip(compared, groups, strict=True):
        cells = [group.name]
        for row in rows:
            at = [x / shown.scale for x in row.positions(axis) if x is not None]
            there = [value for value in row.values() if value is not None]
            some = "" if len(at) == len(row.points) else f" ({len(at)} of {len(row.points)})"
            cells += (
                [mean_std(at, at_digits) + some, mean_std(there, digits)] if at else ["never", ""]
            )
        table.append(tuple(cells))
    return Table(tuple(columns), table)


def seed_table(
    compared: Sequence[Group], axis: Axis = "seconds", horizon: Horizon = "longest"
) -> Table:
    """Returns a row per run with unrounded numbers."""
    areas = aucc_rows(compared, axis, horizon)
    own, every = (time_rows(compared, axis, horizon, reference=r) for r in ("own", "all"))
    rows = [
        (
            group.name,
            *(run.name, run.seed, row.best[i], run.test, row.raw[i], row.normalised[i]),
            *(times.positions(axis)[i] for times in (*own_rows, *all_rows)),
        )
        for group, row, own_rows, all_rows in zip(compared, areas, own, every, strict=True)
        for i, run in enumerate(group.runs)
    ]
    columns = ["model", "run", "seed", "best", "test", f"AUCC ({axis})", "AUCC / largest"]
    for of in ("own", "the best of all"):
        columns += [f"{axis} to {percent} % of {of}" for percent in PERCENTS]
    return Table(tuple(columns), rows)


def run_table(compared: Sequence[Group]) -> Table:
    """Returns a row per run: size, steps, time, scores, device and commit."""
    name = shown_name(compared[0].curves[0])
    columns = ("model", "run", "seed", "steps", "training (min)", "timed", f"best {name}")
    columns += (f"test {name}",)
    rows = []
    for group in compared:
        for run in group.runs:
            last, summary = run.curve.points[-1], run.summary
            params = summary["params"]
            rows.append(
                (
                    *(group.name, run.name, run.seed, last.step, f"{last.seconds / 60:.1f}"),
                    run.timing,
                    *(run.curve.best.value, run.test, params["trainable"], params["total"]),
                    *(summary.get("device"), str(summary.get("commit", ""))[:7]),
                )
            )
    return Table((*columns, "trained parameters", "all", "device", "commit"), rows)


def comparable(compared: Sequence[Group], axis: Axis) -> bool:
    """Returns whether runs can be compared on an axis: steps and FLOPs always, times only if the runs alternated."""
    return axis in ("step", "flops") or runs_alternated([group.runs for group in compared])


def _until(curve: Curve, axis: Axis, end: float | None) -> Curve:
    return curve if end is None else curve.until(axis, end)


def _units(compared: Sequence[Group], axis: Axis, horizon: Horizon) -> Units:
    return units(axis, horizon_of(compared, axis, horizon) or 0.0)
