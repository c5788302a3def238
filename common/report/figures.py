"""Figures of groups of runs: convergence, and quality against depth (Shen et al., Figures 1, 8 to 10 and 12)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from common.errors import check
from common.report.convergence import Convergence
from common.report.curve_plot import curve_figure, shown_name
from common.report.groups import Group
from common.report.panels import COLOURS, panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LABELS = {"updatable": "trained layers", "total": "layers, including frozen layers"}


def curves_figure(convergence: Convergence) -> "Figure":
    """Returns a figure of validation curves with a mean line for each group; see `curve_figure`."""
    curves = {group.name: group.curves for group in convergence.groups}
    return curve_figure(curves, convergence.axis, convergence.end or None)


def layers_figure(
    convergence: Convergence, x: Literal["updatable", "total"] = "updatable"
) -> "Figure":
    """Returns a figure of AUCC and test metric against the number of layers, as in Figures 1 and 8 to 10.

    The AUCC is divided by the largest AUCC of all runs. Error bars are standard deviations over seeds. Groups with
    equal `Group.line` share a line.

    Args:
      x: the x-axis counts trained layers ("updatable", Figure 1) or also frozen layers ("total", Figures 8 to 10).

    Raises:
      UserError: a run has no number of layers or no test metric, `x` is invalid, or `Convergence` raises an error.
    """
    check(x in _LABELS, f"the x-axis of layers_figure must be updatable or total, got {x!r}")
    groups = convergence.groups
    for group in groups:
        name = group.runs[0].name
        check(
            group.layers is not None,
            f"the configuration of the run {name} has no number of layers: leave out its group",
        )
    curve = groups[0].curves[0]
    better = "" if curve.mode == "max" else " (less is better)"
    figure, (left, right) = panels(2)
    _lines(left, groups, convergence.normalised_areas(), x)
    _lines(right, groups, [[run.test for run in group.runs] for group in groups], x)
    left.set(xlabel=_LABELS[x], ylabel=f"validation AUCC / largest{better}")
    if not convergence.comparable:
        left.set_title("not comparable: the runs did not take turns", fontsize=8)
    right.set(xlabel=_LABELS[x], ylabel=f"test {shown_name(curve)}{better}")
    handles, names = right.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=4, frameon=False)
    return figure


def _lines(axes: "Axes", compared: Sequence[Group], values: Sequence[list[float]], x: str) -> None:
    """Draws a line for each `Group.line`: means and standard deviations of `values`, against depth."""
    depths = [getattr(group.layers, x) for group in compared]
    for number, name in enumerate(dict.fromkeys(group.line for group in compared)):
        line = sorted(
            (depth, np.mean(some), np.std(some, ddof=1) if len(some) > 1 else 0.0)
            for depth, some, group in zip(depths, values, compared, strict=True)
            if group.line == name
        )
        xs, means, deviations = zip(*line, strict=True)
        style = {"marker": "o", "markersize": 5, "capsize": 3, "linewidth": 1.6, "elinewidth": 1}
        style |= {"label": name, "color": COLOURS[number % len(COLOURS)]}
        axes.errorbar(xs, means, yerr=deviations if any(deviations) else None, **style)
    axes.set_xticks(sorted(set(depths)))
    axes.margins(x=0.08, y=0.1)
