"""Writes Tables 1 to 3 and 5 to 7, with our values and the paper's, and a table of our controls for Table 1."""

import math
from collections.abc import Mapping, Sequence
from functools import partial

from common.report.convergence import Convergence
from common.report.groups import Group
from common.report.printed import printed
from common.report.runs import runs_alternated
from common.report.table import mean_std
from reservoir.experiments import ExperimentSuite
from reservoir.targets import MODELS, PLAIN, Case

HOUR = 3600

_COLUMNS = ("model", "layers", "frozen", "")


def _convergence(suite: ExperimentSuite, name: str, unit: str) -> None:
    """Writes a table with the columns of Tables 1, 2 and 5 and a column of test BLEU.

    The column "ratio" is the mean time until the best BLEU, divided by the plain model's mean time at the same depth. A
    measured ratio is left out if the runs were not trained in turns (--turns), or if no plain model has this depth.
    """
    (groups,) = suite.groups(name).values()
    hours = {case: _hours_to_best(group) for case, group in groups.items()}
    timed = runs_alternated([group.runs for group in groups.values()])
    plain = {c.layers: _mean(hours[c]) for c in groups if c.model == PLAIN}
    paper = printed("reservoir", name) if name.startswith("table") else {}
    rows = []
    for case, group in groups.items():
        reference = plain.get(case.layers)
        ratio = None if not reference or not timed else f"{_mean(hours[case]) / reference:.2f}"
        measured = (mean_std(_best(group), 2), mean_std(hours[case], 4), ratio, _parameters(group))
        last = mean_std(_epoch(group, unit), 3), mean_std(_test(group), 2)
        rows.append(_row(case, _timed(group), *measured, *last))
        if cells := paper.get((case.model, str(case.layers))):
            rows.append(_row(case, "printed", *cells, None))
    columns = (
        "best BLEU",
        "hours to best",
        "ratio",
        "trained (all)",
        f"epoch ({unit})",
        "test BLEU",
    )
    suite.write(name, (*_COLUMNS, *columns), rows)


# Time until the best BLEU on IWSLT with 2 decoder layers (Table 1), on WMT (Table 2) and on IWSLT with 6 decoder layers
# (Table 5), and our controls for Table 1, which isolate the effects of freezing, initialization and depth.
table1 = partial(_convergence, name="table1", unit="s")
table2 = partial(_convergence, name="table2", unit="h")
table5 = partial(_convergence, name="table5", unit="s")
controls = partial(_convergence, name="controls", unit="s")


def _row(case: Case, *cells: str | None) -> tuple:
    kind, fields = MODELS[case.model]
    frozen = "0" if kind == "none" or fields.get("reservoir_trained") else str(case.reservoirs)
    if "layerdrop" in fields:
        frozen = f"{case.reservoirs} dropped"
    return case.model, case.layers, frozen, *cells


def table3(suite: ExperimentSuite) -> None:
    """Writes Table 3: backskipping with the paper's and with our reward, models without backskipping, and controls."""
    (groups,) = suite.groups("table3").values()
    areas = Convergence(list(groups.values()), "hours", suite.horizon("iwslt")).areas()
    paper = printed("reservoir", "table3")
    rows = []
    for (case, group), area in zip(groups.items(), areas, strict=True):
        best, seconds = mean_std(_best(group), 2), mean_std(_epoch(group, "s"), 2)
        rows.append(_row(case, _timed(group), best, mean_std(area, 4), seconds))
        if cells := paper.get((case.model, str(case.layers))):
            rows.append(_row(case, "printed", *cells))
    suite.write("table3", (*_COLUMNS, "best BLEU", "AUCC (BLEU hours)", "epoch (s)"), rows)


def _partial(suite: ExperimentSuite, name: str, percent: int) -> None:
    """Writes a table of the time until a run reaches `percent` % of its best BLEU."""
    paper = printed("reservoir", name, keys=3)
    rows = []
    for setting, groups in suite.groups(name).items():
        # The horizon "longest" takes the best BLEU of the whole run as 100 %. The paper's horizon limits only the AUCC.
        times = Convergence(list(groups.values()), "hours", "longest").times((percent,))
        for (case, group), (points,) in zip(groups.items(), times, strict=True):
            reached = [point for point in points if point]
            hours = [point.at("hours") for point in reached]
            cells = (mean_std(hours, 4), mean_std([point.value for point in reached], 2))
            rows.append((setting, *_row(case, _timed(group), *cells)))
            if cells := paper.get((setting, case.model, str(case.layers))):
                rows.append((setting, *_row(case, "printed", *cells)))
    columns = ("data", *_COLUMNS, f"hours to {percent} %", "BLEU there")
    suite.write(name, columns, rows)


table6 = partial(_partial, name="table6", percent=95)
table7 = partial(_partial, name="table7", percent=99)


def _timed(group: Group) -> str:
    """Returns a table cell that says how the runs of a group were timed (`Run.timing`)."""
    return f"measured, timed {', '.join(dict.fromkeys(run.timing for run in group.runs))}"


def _best(group: Group) -> list[float]:
    return [run.curve.best.value for run in group.runs]


def _test(group: Group) -> list[float]:
    """Returns each run's test BLEU (of its averaged best checkpoints, if the run keeps several); NaN without a test."""
    tests = (run.summary.get("test_mean_of_best", run.summary["test"]) for run in group.runs)
    return [test.get("bleu", math.nan) for test in tests]


def _hours_to_best(group: Group) -> list[float]:
    return [run.summary["seconds_to"]["100"] / HOUR for run in group.runs]


def _epoch(group: Group, unit: str) -> list[float]:
    """Returns the training time per epoch of each run; `unit` is "s" or "h"."""
    scale = {"s": 1, "h": HOUR}[unit]
    return [r.summary["train_seconds"] / r.summary["epochs"] / scale for r in group.runs]


def _parameters(group: Group) -> str:
    """Formats the number of trained parameters. If some are frozen, adds the total in parentheses: "30.1M (36.5M)"."""
    counts: Mapping[str, int] = group.runs[0].summary["params"]
    trained, total = (f"{counts[name] / 1e6:.1f}M" for name in ("trainable", "total"))
    return trained if trained == total else f"{trained} ({total})"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
