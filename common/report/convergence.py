"""Tables that compare groups of runs: AUCC, and times until runs have nearly converged.

Shen et al. (2021) print such tables (Tables 1 to 3 and 5 to 7). All runs of a table have the same metric and horizon.
Training time excludes compilation, evaluation and checkpoints (`common.train.clock`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from common.errors import check
from common.metrics.aucc import aucc, reaching
from common.metrics.curve import Axis, Point
from common.report.curve_plot import area_unit, shown_name, units
from common.report.groups import Group
from common.report.runs import runs_alternated
from common.report.table import Table, digits_for, mean_std

Horizon = float | Literal["longest", "shortest"]
"""End of the AUCC on the x-axis: a number in units of the axis, or the last point of the longest or shortest run.

The paper takes the longest run. Shorter curves are then extended with their best value, which assumes that their runs
have converged.
"""

PERCENTS = (95, 99, 100)


@dataclass(frozen=True)
class AuccRow:
    """Best values and AUCCs of a group. Each list has an entry for each run.

    Attributes:
      best: the best validation value up to the horizon.
      raw: AUCC up to the horizon, in metric units times axis units.
      normalised: `raw` divided by the largest AUCC of all compared runs; NaN if the largest AUCC is 0.
      measured: area under the measured values up to the horizon. (The AUCC is the area under the best values so far.)
    """

    group: Group
    best: list[float]
    raw: list[float]
    normalised: list[float]
    measured: list[float]


def horizon_of(compared: Sequence[Group], axis: Axis, horizon: Horizon = "longest") -> float | None:
    """Returns the end of the AUCC in units of the axis.

    Returns None if `horizon` is "longest" or "shortest" and all curves end at 0 on the axis, as on the axis "flops" for
    runs without a FLOP count.

    Raises:
      UserError: the horizon is not a finite number above 0, or is before the first validation of a run, or some but not
        all curves end at 0 on the axis.
    """
    runs = [run for group in compared for run in group.runs]
    ends = [run.curve.points[-1].at(axis) for run in runs]
    empty = [run.place for run, end in zip(runs, ends, strict=True) if not end]
    check(
        len(empty) in (0, len(runs)),
        f"the runs cannot be compared on the axis {axis}, because some have no {axis}: choose another --axis, or leave"
        f" out {', '.join(empty[:3])}{' ...' * (len(empty) > 3)}",
    )
    if horizon in ("longest", "shortest"):
        horizon = max(ends) if horizon == "longest" else min(ends)
        if not horizon:
            return None
    check(
        not isinstance(horizon, str) and 0 < horizon < math.inf,
        f"--horizon={horizon} must be a finite number above 0, longest or shortest",
    )
    for run in runs:
        first = run.curve.points[0].at(axis)
        check(
            first <= horizon,
            f"the horizon {horizon:g} ({axis}) is before the first validation of {run.place}, at {first:g}:"
            " choose a later horizon, leave out this run, or train it with a smaller --config.eval.steps",
        )
    return float(horizon)


def aucc_rows(
    compared: Sequence[Group], axis: Axis = "seconds", horizon: Horizon = "longest"
) -> list[AuccRow]:
    """Returns a row for each group, with the best value and the AUCC of each run. For the errors see `horizon_of`."""
    end = horizon_of(compared, axis, horizon)
    areas = [[aucc(curve, axis, end) for curve in group.curves] for group in compared]
    largest = max(area for some in areas for area in some) or math.nan
    return [
        AuccRow(
            group,
            best=[curve.until(axis, end or 0.0).best.value for curve in group.curves],
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
    reference: Literal["own", "all"] = "own",
) -> list[list[list[Point | None]]]:
    """Finds the first point at which each run reaches each percentage of the best value, up to the horizon.

    If the metric is minimised, 95 % of the best value 2 is 2 / 0.95 (`common.metrics.aucc.reaching`).

    Args:
      axis: x-axis of the horizon.
      horizon: end of the curves, see `Horizon`.
      percents: percentages of the best value.
      reference: "own" if 100 % is the best value of the same run, "all" if 100 % is the best value of all runs.

    Returns:
      Lists in the order [group][percentage][run]. An entry is None if the run does not reach the percentage.

    Raises:
      UserError: a percentage is not in (0, 100], or the reference or the horizon is invalid.
    """
    check(reference in ("own", "all"), f"--reference must be own or all, got {reference!r}")
    end = horizon_of(compared, axis, horizon) or 0.0
    curves = [[curve.until(axis, end) for curve in group.curves] for group in compared]
    best = None
    if reference == "all":
        values = [curve.best.value for some in curves for curve in some]
        best = max(values) if curves[0][0].mode == "max" else min(values)
    return [
        [[reaching(curve, percent / 100, best) for curve in some] for percent in percents]
        for some in curves
    ]


def aucc_table(
    compared: Sequence[Group], axis: Axis = "seconds", horizon: Horizon = "longest"
) -> Table:
    """Returns a table of best values and AUCCs: a row for each group, with mean ± standard deviation over its runs.

    The cells "AUCC / largest" are empty if the runs cannot be compared on the axis (`comparable`). For the errors see
    `horizon_of`.
    """
    rows = aucc_rows(compared, axis, horizon)
    scale, unit, _ = units(axis, horizon_of(compared, axis, horizon) or 0.0)
    curve = compared[0].curves[0]
    unit = area_unit(curve, unit)
    # Show ratios of AUCCs over time only if the runs took turns on the machine, because the load of the machine may
    # otherwise differ between runs.
    ratio = comparable(compared, axis)
    best_digits = digits_for(value for row in rows for value in row.best)
    digits = digits_for(area / scale for row in rows for area in row.raw)
    columns = ("model", "seeds", f"best {shown_name(curve)}", f"AUCC, {unit}", "AUCC / largest")
    return Table(
        (*columns, f"as measured, {unit}"),
        [
            (
                row.group.name,
                len(row.raw),
                mean_std(row.best, best_digits),
                mean_std([area / scale for area in row.raw], digits),
                mean_std(row.normalised, 3) if ratio else "",
                mean_std([area / scale for area in row.measured], digits),
            )
            for row in rows
        ],
    )


def time_table(
    compared: Sequence[Group],
    axis: Axis = "seconds",
    horizon: Horizon = "longest",
    reference: Literal["own", "all"] = "own",
) -> Table:
    """Returns a table of the points at which runs reach percentages of the best value: a row for each group.

    Each percentage has two columns: the position of the point on the axis, and the metric there. The cells are mean ±
    standard deviation over the runs that reach the percentage. For the arguments and the errors see `time_rows`.
    """
    groups = time_rows(compared, axis, horizon, PERCENTS, reference)
    scale, unit, _ = units(axis, horizon_of(compared, axis, horizon) or 0.0)
    points = [point for rows in groups for row in rows for point in row if point]
    at_digits = digits_for(point.at(axis) / scale for point in points)
    digits = digits_for(point.value for point in points)
    columns, name = ["model"], shown_name(compared[0].curves[0])
    for percent in PERCENTS:
        columns += [f"{percent} % ({unit})", f"{name} there"]
    table = []
    for group, rows in zip(compared, groups, strict=True):
        cells = [group.name]
        for row in rows:
            reached = [point for point in row if point]
            if not reached:
                cells += ["never", ""]
                continue
            at = mean_std([point.at(axis) / scale for point in reached], at_digits)
            every = len(reached) == len(row)
            cells.append(at if every else f"{at} ({len(reached)} of {len(row)})")
            cells.append(mean_std([point.value for point in reached], digits))
        table.append(tuple(cells))
    return Table(tuple(columns), table)


def seed_table(
    compared: Sequence[Group], axis: Axis = "seconds", horizon: Horizon = "longest"
) -> Table:
    """Returns a table with unrounded numbers and a row for each run.

    The last columns are the axis values at which the run first reaches each of the PERCENTS of its own best value, and
    of the best value of all runs; None if the run does not reach the percentage. Raises the errors of `horizon_of` and
    `Run.test`.
    """
    areas = aucc_rows(compared, axis, horizon)
    own, best = (time_rows(compared, axis, horizon, reference=r) for r in ("own", "all"))
    rows = [
        (
            *(group.name, run.name, run.seed),
            *(row.best[i], run.test, row.raw[i], row.normalised[i]),
            *(points[i] and points[i].at(axis) for points in (*own_rows, *all_rows)),
        )
        for group, row, own_rows, all_rows in zip(compared, areas, own, best, strict=True)
        for i, run in enumerate(group.runs)
    ]
    columns = ["model", "run", "seed", "best", "test", f"AUCC ({axis})", "AUCC / largest"]
    for of in ("own", "the best of all"):
        columns += [f"{axis} to {percent} % of {of}" for percent in PERCENTS]
    return Table(tuple(columns), rows)


def run_table(compared: Sequence[Group]) -> Table:
    """Returns a table of runs: a row for each run with size, steps, time, scores, device and commit.

    Raises the error of `Run.test`.
    """
    name = shown_name(compared[0].curves[0])
    columns = ("model", "run", "seed", "steps", "training (min)", "timed", f"best {name}")
    columns += (f"test {name}", "trained parameters", "all", "device", "commit")
    rows = []
    for group in compared:
        for run in group.runs:
            last, summary, params = run.curve.points[-1], run.summary, run.summary["params"]
            rows.append(
                (
                    *(group.name, run.name, run.seed, last.step, f"{last.seconds / 60:.1f}"),
                    *(run.timing, run.curve.best.value, run.test),
                    *(params["trainable"], params["total"]),
                    *(summary.get("device"), str(summary.get("commit", ""))[:7]),
                )
            )
    return Table(columns, rows)


def comparable(compared: Sequence[Group], axis: Axis) -> bool:
    """Returns whether runs can be compared on an axis. On an axis of time, the runs must have taken turns."""
    return axis in ("step", "flops") or runs_alternated([group.runs for group in compared])
