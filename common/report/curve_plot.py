"""Plots of a validation metric over training time, steps or FLOPs, with the area under the convergence curve shaded."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from common.errors import check
from common.metrics.aucc import aucc, mean_outline, outline, shared_horizon
from common.metrics.curve import Axis, Curve
from common.report.axis import area_unit, shown_name, units
from common.report.panels import COLOURS
from common.report.table import digits_for, mean_std

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INK = "#333333"
_STYLES = ("-", "--", ":")


def plot_curve(curves: Mapping[str, Curve], path: str | Path) -> None:
    """Writes a figure of curves, name -> curve, to a PNG file. See `curve_figure`."""
    figure = curve_figure({name: [curve] for name, curve in curves.items()})
    figure.savefig(path, format="png")


def curve_figure(
    curves: Mapping[str, Sequence[Curve]], axis: Axis = "seconds", horizon: float | None = None
) -> "Figure":
    """Returns a figure of validation curves of one metric, with the areas below the curves shaded.

    A line shows the best value so far. The area below the line is the AUCC, which the legend states as a number. Small
    dots show the measured values, and a ring marks the best value up to the horizon. For several seeds, a thin line
    shows each seed, a thick line shows their mean, and the numbers in the legend are means.

    Args:
      curves: name -> one curve for each seed.
      axis: the quantity on the x-axis; "seconds" is shown in seconds, minutes or hours.
      horizon: end of the x-axis in units of `axis`. None takes the end of the longest curve.

    Raises:
      UserError: `curves` or a curve is empty, the metrics differ, or the horizon is not a positive number or is before
        the first point of a curve.
    """
    flat = [curve for seeds in curves.values() for curve in seeds]
    check(bool(flat), "there are no curves to plot: give at least one curve")
    kinds = {(curve.name, curve.mode) for curve in flat}
    metrics = ", ".join(f"{name} ({mode})" for name, mode in sorted(kinds))
    check(
        len(kinds) == 1,
        f"curves of different metrics cannot share a plot ({metrics}): give curves of one metric",
    )

    # Do not use pyplot, which would keep the figure in memory and choose a backend.
    from matplotlib.figure import Figure

    horizon = shared_horizon(flat, axis) if horizon is None else horizon
    end = horizon or 0.0
    scale, unit, label = units(axis, end)
    # The legend of a single curve fits into the plot. A longer legend would cover the curves: put it below the plot.
    alone = len(flat) == 1
    height = 4.2 if alone else 4.2 + 0.2 * len(curves)
    figure = Figure(figsize=(7.2, height), dpi=160, layout="constrained")
    axes = figure.add_subplot()
    for number, (name, seeds) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        style = {"color": colour, "linestyle": _STYLES[number // len(COLOURS) % len(_STYLES)]}
        xs, ys = np.transpose(mean_outline(seeds, axis, horizon))
        axes.fill_between(xs / scale, ys, color=colour, alpha=0.22 / len(curves), linewidth=0)
        marked = [curve.until(axis, end) for curve in seeds]
        check(
            all(curve.points for curve in marked),
            f"{name} has no validation points up to the horizon {end:g} ({axis}): choose a later horizon",
        )
        areas = [aucc(curve, axis, horizon) / scale for curve in seeds]
        area = mean_std(areas, digits_for(areas)) if len(seeds) > 1 else f"{areas[0]:,.5g}"
        entry = f"AUCC {area} {area_unit(flat[0], unit)}"
        if not alone:
            best = sum(curve.best.value for curve in marked) / len(marked)
            entry = f"best {best:.4g}, {entry}"
        axes.plot(xs / scale, ys, linewidth=1.8, label=f"{name}: {entry}", **style)
        for curve, points in zip(seeds, marked, strict=True):
            if len(seeds) > 1:
                xs, ys = np.transpose(outline(curve, axis, horizon))
                axes.plot(xs / scale, ys, linewidth=0.8, alpha=0.45, **style)
            # With several curves, labels of the best values would overlap. The legend shows their mean for each name.
            _mark(axes, points, axis, scale, colour, with_value=alone)
    _frame(axes, flat[0], [p.value for curve in flat for p in curve.until(axis, end).points])
    axes.set_xlim(0, end / scale or None)
    axes.set_xlabel(label, color=_INK)
    axes.set_ylabel(f"validation {shown_name(flat[0])}", color=_INK)
    text = {"frameon": False, "fontsize": 9, "labelcolor": _INK}
    if alone:
        axes.legend(loc="lower right" if flat[0].mode == "max" else "upper right", **text)
    else:
        figure.legend(loc="outside lower left", **text)
    return figure


def _mark(
    axes: "Axes", curve: Curve, axis: Axis, scale: float, colour: str, *, with_value: bool
) -> None:
    """Draws the measured values as dots and a ring around the best value. `with_value` also writes the best value."""
    # Do not clip the dots: the last dot is often on the right edge of the plot.
    dots = {"linestyle": "none", "marker": "o", "clip_on": False}
    xs = [point.at(axis) / scale for point in curve.points]
    ys = [point.value for point in curve.points]
    axes.plot(xs, ys, markersize=3, color=colour, alpha=0.7, **dots)
    best = (curve.best.at(axis) / scale, curve.best.value)
    ring = {"markerfacecolor": "none", "markeredgecolor": colour, "markeredgewidth": 1.6}
    axes.plot(*best, markersize=9, **ring, **dots)
    if with_value:
        above = {"xytext": (0, 8), "textcoords": "offset points", "ha": "center"}
        axes.annotate(f"{best[1]:.4g}", best, color=colour, fontsize=9, **above)


def _frame(axes: "Axes", curve: Curve, values: list[float]) -> None:
    """Sets y limits, grid and spines."""
    low, high = min(values), max(values)
    margin = 0.12 * (high - low or abs(high) or 1.0)
    bottom = 0.0 if curve.mode == "max" and low >= 0 else low - margin
    axes.set_ylim(bottom, high + margin)
    axes.grid(color="#e6e6e6", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#bbbbbb")
    axes.tick_params(colors=_INK, length=3)
