"""Prints tables that compare groups of runs, and writes the tables and figures."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from common.errors import check
from common.metrics.kinds import MODES
from common.report import comparison, figures, groups, versus
from common.report.groups import Group
from common.report.table import publish
from common.storage.addresses import shown
from common.storage.folders import output


def write(
    compared: Sequence[Group],
    out: Path,
    *,
    margins: Mapping[str, float],
    axis: str = "seconds",
    horizon: float | str = "longest",
    reference: str = "own",
) -> None:
    """Prints tables that compare groups of runs, and writes the tables and figures to `out`.

    Verdicts compare each group with the first group. A figure over depth needs the layers of every group, and two
    groups of different depths.

    Args:
      margins: see `versus.against_first`.
      axis, horizon, reference: see `comparison.time_rows`.

    Raises:
      UserError: the runs cannot be compared, a run has no test value, the horizon or the reference is invalid, or
        `margins` has a metric by which the runs are not compared.
    """
    comparisons = versus.against_first(compared, margins)
    known = {one.metric for _, one in comparisons} & MODES.keys() | {compared[0].curves[0].name}
    for metric, margin in margins.items():
        check(
            metric in known,
            f"these runs are not compared by {metric}, only by {', '.join(sorted(known))}: leave out"
            f" --margin={metric}={margin:g}",
        )
    measure = (axis, horizon)
    tables = {
        "runs": comparison.run_table(compared),
        "differences": groups.differences(compared),
        "aucc": comparison.aucc_table(compared, *measure),
        "times": comparison.time_table(compared, *measure, reference=reference),
        "seeds": comparison.seed_table(compared, *measure),
    }
    if comparisons:
        tables["verdicts"] = versus.verdict_table(compared[0], comparisons)
        if sentences := versus.sentence_table(compared):
            tables["sentences"] = sentences
    drawn = {"curves": figures.curves_figure(compared, *measure)}
    layers = [group.layers for group in compared if group.layers]
    if len(layers) == len(compared):
        # Without frozen layers, both figures would be equal.
        for x in ("updatable", "total") if any(one.frozen for one in layers) else ("updatable",):
            if len({getattr(one, x) for one in layers}) > 1:
                drawn[f"layers_{x}"] = figures.layers_figure(compared, x, *measure)
    with output(out):
        for name, table in tables.items():
            publish(out / name, *table)
            if name == "verdicts":
                print(versus.explanation(comparisons, compared))
        for name, figure in drawn.items():
            figure.savefig(out / f"{name}.png")
    print(f"figures: {', '.join(shown(out / f'{name}.png') for name in drawn)}")
