"""Plots of a validation metric over training time, with the area under the convergence curve shaded."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import UserError
from common.metrics.aucc import aucc, mean_outline, outline, shared_horizon
from common.metrics.curve import Axis, Curve
from common.report.axis import Units, area_unit, shown_name, units
from common.report.panels import COLOURS
from common.report.table import digits_for, mean_std

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INK = "#333333"
_STYLES = ("-", "--", ":")


def plot_curve(
    curves: Mapping[str, Curve],
    path: str | Path,
    *,
    axis: Axis = "seconds",
    horizon: float | None = None,
    title: str = "",
) -> None:
    """Writes `curve_figure`, with one curve per name, to a PNG file; makes the folder of `path`."""
    several = {name: [curve] for name, curve in curves.items()}
    figure = curve_figure(several, axis=axis, horizon=horizon, title=title)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def curve_figure(
    curves: Mapping[str, Sequence[Curve]],
    *,
    axis: Axis = "seconds",
    horizon: float | None = None,
    title: str = "",
) -> "Figure":
    """Returns a figure of curves of one metric, with the areas under them shaded.

    The line is the best value so far, whose area is the AUCC. Small dots are the measured values; a ring marks the best
    value up to the horizon. For several seeds the line is their mean, and thin lines are the seeds. The legend has the
    AUCC in units of the x-axis.

    Args:
      curves: name -> curves of its seeds.
      axis: of x; "seconds" is shown in seconds, minutes or hours.
      horizon: end of x in units of `axis`; None for the end of the longest curve.

    Raises:
      UserError: there are no curves, a curve is empty, the metrics differ, or the horizon is not a positive number.
    """
    every = [curve for seeds in curves.values() for curve in seeds]
    if not every:
        raise UserError("there are no curves to plot")
    if len({(curve.name, curve.mode) for curve in every}) > 1:
        raise UserError("curves of different metrics cannot share a plot")

    # Not pyplot, which would keep the figure alive and choose a backend.
    from matplotlib.figure import Figure

    if horizon is None:
        horizon = shared_horizon(every, axis)
    end = 0.0 if horizon is None else horizon
    shown = units(axis, end)
    # The legend of one curve fits into the plot; a longer legend would cover the curves and goes below.
    alone = len(every) == 1
    below = 0 if alone else len(curves)
    figure = Figure(figsize=(7.2, 4.2 + 0.2 * below), dpi=160, layout="constrained")
    axes = figure.add_subplot()
    for number, (name, seeds) in enumerate(curves.items()):
        style = {"color": COLOURS[number % len(COLOURS)]}
        style["linestyle"] = _STYLES[number // len(COLOURS) % len(_STYLES)]
        xs, ys = _line(mean_outline(seeds, axis, horizon), shown.scale)
        axes.fill_between(xs, ys, color=style["color"], alpha=0.22 / len(curves), linewidth=0)
        marked = [curve.until(axis, end) for curve in seeds]
        label = _label(name, seeds, marked, axis, horizon, shown, alone=alone)
        axes.plot(xs, ys, linewidth=1.8, label=label, **style)
        if len(seeds) > 1:
            for curve, points in zip(seeds, marked, strict=True):
                line = _line(outline(curve, axis, horizon), shown.scale)
                axes.plot(*line, linewidth=0.8, alpha=0.45, **style)
                if points.points:
                    _mark(axes, points, axis, shown.scale, style["color"], number=False)
        elif marked[0].points:
            # The best values of several curves would overlap; they are in the legend.
            _mark(axes, marked[0], axis, shown.scale, style["color"], number=alone)
    values = [point.value for curve in every for point in curve.until(axis, end).points]
    _frame(axes, every[0], values or [point.value for curve in every for point in curve.points])
    axes.set_xlim(0, end / shown.scale or None)
    axes.set_xlabel(shown.label, color=_INK)
    axes.set_ylabel(f"validation {shown_name(every[0])}", color=_INK)
    axes.set_title(title, loc="left", color=_INK, fontsize=12)
    style = {"frameon": False, "fontsize": 9, "labelcolor": _INK}
    if alone:
        axes.legend(loc="lower right" if every[0].mode == "max" else "upper right", **style)
    else:
        figure.legend(loc="outside lower left", **style)
    return figure


def _line(
    points: Sequence[tuple[float, float]], scale: float
) -> tuple[list[float], tuple[float, ...]]:
    xs, ys = zip(*points, strict=True)
    return [x / scale for x in xs], ys


def _label(
    name: str,
    seeds: Sequence[Curve],
    marked: Sequence[Curve],
    axis: Axis,
    horizon: float | None,
    shown: Units,
    *,
    alone: bool,
) -> str:
    """Returns the legend entry: name, best value (if the plot does not show it) and AUCC."""
    areas = [aucc(curve, axis, horizon) / shown.scale for curve in seeds]
    unit = area_unit(seeds[0], shown.unit)
    area = mean_std(areas, digits_for(areas)) if len(seeds) > 1 else f"{areas[0]:,.5g}"
    if alone or not all(curve.points for curve in marked):
        return f"{name}: AUCC {area} {unit}"
    best = sum(curve.best.value for curve in marked) / len(marked)
    return f"{name}: best {best:.4g}, AUCC {area} {unit}"


def _mark(
    axes: "Axes", curve: Curve, axis: Axis, scale: float, colour: str, *, number: bool
) -> None:
    """Draws the measured values as dots and a ring around the best; with `number` also writes its value."""
    # Not clipped: the last point is often on the right edge.
    dots = {"linestyle": "none", "marker": "o", "clip_on": False}
    xs = [point.at(axis) / scale for point in curve.points]
    ys = [point.value for point in curve.points]
    axes.plot(xs, ys, markersize=3, color=colour, alpha=0.7, **dots)
    best = (curve.best.at(axis) / scale, curve.best.value)
    ring = {"markerfacecolor": "none", "markeredgecolor": colour, "markeredgewidth": 1.6}
    axes.plot(*best, markersize=9, **ring, **dots)
    if not number:
        return
    axes.annotate(
        f"{best[1]:.4g}",
        best,
        xytext=(0, 8),
        textcoords="offset points",
        ha="center",
        color=colour,
        fontsize=9,
    )


def _frame(axes: "Axes", curve: Curve, values: list[float]) -> None:
    """Sets the limits of y, grid and spines."""
    low, high = min(values), max(values)
    margin = 0.12 * (high - low or abs(high) or 1.0)
    bottom = 0.0 if curve.mode == "max" and low >= 0 else low - margin
    axes.set_ylim(bottom, high + margin)
    axes.grid(color="#e6e6e6", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#bbbbbb")
    axes.tick_params(colors=_INK, length=3)
