"""Tables of AUCC, and of times to 95, 99 and 100 % of the best value, as in Tables 1 to 3 and 5 to 7 of Shen et al.
(2021).

Training time excludes compilation, evaluation and checkpoints (`common.train.clock`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from common.errors import check
from common.metrics.aucc import aucc, reaching
from common.metrics.curve import Axis, Curve, Point
from common.report.curve_plot import area_unit, shown_name, units
from common.report.groups import Group
from common.report.runs import runs_alternated
from common.report.table import Table, digits_for, mean_std

Horizon = float | Literal["longest", "shortest"]
"""End of the AUCC on the x-axis: a number in units of the axis, or the last point of the longest or shortest run.

With "longest", as in the paper, shorter curves keep their best value, which assumes that their runs have converged.
"""

PERCENTS = (95, 99, 100)


@dataclass(frozen=True)
class Convergence:
    """The validation curves of groups of runs up to one horizon. All runs have the same metric.

    Every method raises a UserError if the horizon is invalid or before the first validation of a run, or if some but
    not all curves end at 0 on the axis.

    Attributes:
      groups: the groups. `curves`, `best` and the areas are lists in the order [group][run].
      axis: x-axis of the curves, AUCCs and times.
      horizon: end of the curves.
    """

    groups: Sequence[Group]
    axis: Axis = "seconds"
    horizon: Horizon = "longest"

    @cached_property
    def end(self) -> float:
        """The horizon in units of the axis.

        0 if `horizon` is not a number and all curves end at 0, as on the axis "flops" for runs without a FLOP count.
        """
        runs = [run for group in self.groups for run in group.runs]
        ends = [run.curve.end(self.axis) for run in runs]
        empty = [run.place for run, end in zip(runs, ends, strict=True) if not end]
        check(
            len(empty) in (0, len(runs)),
            f"the runs cannot be compared on the axis {self.axis}, because the curves of {', '.join(empty[:3])}"
            f"{' and others' * (len(empty) > 3)} end at 0 {self.axis}: choose another --axis, or leave out these runs",
        )
        named = {"longest": max(ends), "shortest": min(ends)}
        end = named.get(self.horizon, self.horizon)
        check(
            self.horizon in named or (not isinstance(end, str) and 0 < end < math.inf),
            f"--horizon must be a finite number above 0, longest or shortest, got {end}",
        )
        for run in runs:
            first = run.curve.points[0].at(self.axis)
            check(
                first <= end,
                f"the horizon {end:g} ({self.axis}) is before the first validation of {run.place}, at {first:g}:"
                " choose a larger --horizon, leave out this run, or train it again with a smaller --config.eval.steps",
            )
        return float(end)

    @property
    def comparable(self) -> bool:
        """Whether runs can be compared on the axis: on an axis of time, only if they took turns."""
        timed = self.axis in ("seconds", "hours")
        return not timed or runs_alternated([group.runs for group in self.groups])

    @cached_property
    def curves(self) -> list[list[Curve]]:
        """The curve of each run up to the horizon."""
        return [[c.until(self.axis, self.end) for c in group.curves] for group in self.groups]

    def best(self) -> list[list[float]]:
        """Returns the best validation value of each run up to the horizon."""
        return [[curve.best.value for curve in some] for some in self.curves]

    def areas(self, held: bool = True) -> list[list[float]]:
        """Returns the AUCC of each run up to `end`, 0 if `end` is 0; `common.metrics.aucc.outline` explains `held`."""
        if not self.end:
            return [[0.0] * len(group.runs) for group in self.groups]
        return [[aucc(c, self.axis, self.end, held) for c in g.curves] for g in self.groups]

    def normalised_areas(self) -> list[list[float]]:
        """Returns the AUCC of each run divided by the largest AUCC of all runs; NaN if the largest AUCC is 0."""
        areas = self.areas()
        largest = max(map(max, areas)) or math.nan
        return [[area / largest for area in some] for some in areas]

    def times(
        self, percents: Sequence[float] = PERCENTS, reference: Literal["own", "all"] = "own"
    ) -> list[list[list[Point | None]]]:
        """Finds the first point at which each run reaches each percentage of the best value, up to the horizon.

        If the metric is minimised, 95 % of the best value 2 is 2 / 0.95 (`common.metrics.aucc.reaching`).

        Args:
          percents: percentages of the best value, each above 0 and at most 100.
          reference: "own" if 100 % is the best value of the same run, "all" if 100 % is the best value of all runs.

        Returns:
          Lists in the order [group][percentage][run]. An entry is None if the run does not reach the percentage.
        """
        check(reference in ("own", "all"), f"--reference must be own or all, got {reference!r}")
        best = None
        if reference == "all":
            better = max if self.curves[0][0].mode == "max" else min
            best = better(map(better, self.best()))
        return [
            [[reaching(curve, percent / 100, best) for curve in some] for percent in percents]
            for some in self.curves
        ]

    def aucc_table(self) -> Table:
        """Returns a table of best values and AUCCs: a row for each group, with mean ± standard deviation over its runs.

        The column "as measured" has the areas under the measured values instead of the best values so far.
        """
        curve, empty = self.curves[0][0], [""] * len(self.groups)
        scale, unit, _ = units(self.axis, self.end)
        unit = area_unit(curve, unit)
        best, areas = self.best(), self.areas()
        best_digits = digits_for(value for values in best for value in values)
        digits = digits_for(area / scale for some in areas for area in some)

        def cells(values: list[list[float]], digits: int, scale: float = 1.0) -> list[str]:
            return [mean_std([value / scale for value in some], digits) for some in values]

        columns = {
            "model": [group.name for group in self.groups],
            "seeds": [len(group.runs) for group in self.groups],
            f"best {shown_name(curve)}": cells(best, best_digits),
            f"AUCC, {unit}": cells(areas, digits, scale),
            # On an axis of time, empty unless the runs took turns: the load of the machine may differ between runs.
            "AUCC / largest": cells(self.normalised_areas(), 3) if self.comparable else empty,
            f"as measured, {unit}": cells(self.areas(held=False), digits, scale),
        }
        return Table(tuple(columns), list(zip(*columns.values(), strict=True)))

    def time_table(self, reference: Literal["own", "all"] = "own") -> Table:
        """Returns a table of the points at which runs reach PERCENTS of the best value: a row for each group.

        Each percentage has two columns: the point's position on the axis and its metric, as mean ± standard deviation
        over the runs of the group that reach the percentage. For `reference` see `times`.
        """
        groups = self.times(reference=reference)
        scale, unit, _ = units(self.axis, self.end)
        points = [point for rows in groups for row in rows for point in row if point]
        at_digits = digits_for(point.at(self.axis) / scale for point in points)
        digits = digits_for(point.value for point in points)
        columns, name = ["model"], shown_name(self.curves[0][0])
        for percent in PERCENTS:
            columns += [f"{percent} % ({unit})", f"{name} there"]
        table = []
        for group, rows in zip(self.groups, groups, strict=True):
            cells = [group.name]
            for row in rows:
                reached = [point for point in row if point]
                if not reached:
                    cells += ["never", ""]
                    continue
                at = mean_std([point.at(self.axis) / scale for point in reached], at_digits)
                every = len(reached) == len(row)
                cells.append(at if every else f"{at} ({len(reached)} of {len(row)})")
                cells.append(mean_std([point.value for point in reached], digits))
            table.append(tuple(cells))
        return Table(tuple(columns), table)

    def seed_table(self) -> Table:
        """Returns a table with unrounded numbers and a row for each run. Also raises the error of `Run.test`.

        The last columns are the axis values at which the run first reaches each of the PERCENTS of its own best value,
        and of the best value of all runs.
        """
        best, areas, shares = self.best(), self.areas(), self.normalised_areas()
        own, of_all = self.times(), self.times(reference="all")
        rows = [
            (
                *(group.name, run.name, run.seed),
                *(best[n][i], run.test, areas[n][i], shares[n][i]),
                *(points[i] and points[i].at(self.axis) for points in (*own[n], *of_all[n])),
            )
            for n, group in enumerate(self.groups)
            for i, run in enumerate(group.runs)
        ]
        columns = ["model", "run", "seed", "best", "test", f"AUCC ({self.axis})", "AUCC / largest"]
        for of in ("own", "the best of all"):
            columns += [f"{self.axis} to {percent} % of {of}" for percent in PERCENTS]
        return Table(tuple(columns), rows)


def run_table(compared: Sequence[Group]) -> Table:
    """Returns a table of all runs: steps, time, scores, size, device, commit. Raises the error of `Run.test`."""
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
