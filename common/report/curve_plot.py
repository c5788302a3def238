"""Plots of a validation metric over training time, steps or FLOPs, with the area under the convergence curve shaded."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from common.errors import check
from common.metrics.aucc import aucc, mean_outline, outline
from common.metrics.curve import Axis, Curve
from common.report.panels import COLOURS, panels
from common.report.table import digits_for, mean_std

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLES = ("-", "--", ":")
_TIMES = ((3600.0, "h"), (60.0, "min"))
_PREFIXES = " kMGTPEZY"


def plot_curve(curves: Mapping[str, Curve], path: str | Path) -> None:
    """Writes the figure of `curve_figure` over training seconds to a PNG file. `curves` maps names to curves."""
    figure = curve_figure({name: [curve] for name, curve in curves.items()})
    figure.savefig(path, format="png")


def curve_figure(
    curves: Mapping[str, Sequence[Curve]], axis: Axis = "seconds", horizon: float | None = None
) -> "Figure":
    """Returns a figure of validation curves of one metric, with the areas below the curves shaded.

    A line shows the best value so far. The area below the line is the AUCC, which the legend states. Small dots show
    the measured values, and a ring marks the best value up to the horizon. For several seeds, a thin line shows each
    seed, and a thick line the mean of the seeds.

    Args:
      curves: name -> one curve for each seed.
      axis: the quantity on the x-axis; "seconds" is shown in seconds, minutes or hours.
      horizon: end of the x-axis in units of `axis`. None takes the last point of the longest curve.

    Raises:
      UserError: `curves` is empty, a name has no curve, a curve has no points, the metrics differ, the axis is unknown,
        or the horizon is not a finite number above 0 or is before the first point of a curve.
    """
    check(
        bool(curves) and all(curves.values()),
        "there are no curves to plot: give at least one curve for each name",
    )
    flat = [curve for seeds in curves.values() for curve in seeds]
    kinds = {(curve.name, curve.mode) for curve in flat}
    metrics = ", ".join(f"{name} ({mode})" for name, mode in sorted(kinds))
    check(
        len(kinds) == 1,
        f"curves of different metrics cannot share a plot ({metrics}): give curves of one metric",
    )

    # Runs without a FLOP count end at 0 on the axis "flops". The horizon is then None, because it must be above 0.
    last = max(curve.end(axis) for curve in flat)
    horizon = last or None if horizon is None else horizon
    end = horizon or 0.0
    scale, unit, label = units(axis, end)
    # The legend of a single curve fits into the plot; a longer legend is below the plot.
    alone = len(flat) == 1
    figure, (axes,) = panels(1, 7.2, 4.2 if alone else 4.2 + 0.2 * len(curves))
    values = []
    for number, (name, seeds) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        style = {"color": colour, "linestyle": _STYLES[number // len(COLOURS) % len(_STYLES)]}
        xs, ys = np.transpose(mean_outline(seeds, axis, horizon))
        axes.fill_between(xs / scale, ys, color=colour, alpha=0.22 / len(curves), linewidth=0)
        marked = [curve.until(axis, end) for curve in seeds]
        check(
            all(curve.points for curve in marked),
            f"{name} has no validation points up to the horizon {end:g} ({axis}): choose a larger horizon",
        )
        areas = [aucc(curve, axis, horizon) / scale if horizon else 0.0 for curve in seeds]
        area = mean_std(areas, digits_for(areas)) if len(seeds) > 1 else f"{areas[0]:,.5g}"
        entry = f"AUCC {area} {area_unit(flat[0], unit)}"
        if not alone:
            best = sum(curve.best.value for curve in marked) / len(marked)
            entry = f"best {best:.4g}, {entry}"
        axes.plot(xs / scale, ys, linewidth=1.8, label=f"{name}: {entry}", **style)
        for curve, until_end in zip(seeds, marked, strict=True):
            if len(seeds) > 1:
                xs, ys = np.transpose(outline(curve, axis, horizon))
                axes.plot(xs / scale, ys, linewidth=0.8, alpha=0.45, **style)
            xs = [point.at(axis) / scale for point in until_end.points]
            ys = [point.value for point in until_end.points]
            values += ys
            # Do not clip the dots and the ring: the last point is often on the right edge of the plot.
            marks = {"linestyle": "none", "marker": "o", "clip_on": False}
            axes.plot(xs, ys, markersize=3, color=colour, alpha=0.7, **marks)
            best = (until_end.best.at(axis) / scale, until_end.best.value)
            axes.plot(*best, markersize=9, fillstyle="none", color=colour, **marks)
            # Labels of several curves would overlap.
            if alone:
                above = {"xytext": (0, 8), "textcoords": "offset points", "ha": "center"}
                axes.annotate(f"{best[1]:.4g}", best, color=colour, fontsize=9, **above)
    rising = flat[0].mode == "max"
    margin = 0.12 * (max(values) - min(values) or abs(max(values)) or 1.0)
    bottom = 0.0 if rising and min(values) >= 0 else min(values) - margin
    axes.set(xlim=(0, end / scale or None), ylim=(bottom, max(values) + margin))
    axes.set(xlabel=label, ylabel=f"validation {shown_name(flat[0])}")
    if alone:
        axes.legend(loc="lower right" if rising else "upper right", frameon=False, fontsize=9)
    else:
        figure.legend(loc="outside lower left", frameon=False, fontsize=9)
    return figure


def units(axis: Axis, end: float) -> tuple[float, str, str]:
    """Returns (scale, unit, label) for an axis from 0 to `end`, such as (3600, "h", "training time (h)") for seconds.

    Dividing values on the axis by the scale gives values in the unit.
    """
    match axis:
        case "seconds":
            scale, unit = next((time for time in _TIMES if end >= 2 * time[0]), (1.0, "s"))
            return scale, unit, f"training time ({unit})"
        case "hours":
            return 1.0, "h", "training time (h)"
        case "step":
            return 1.0, "steps", "training steps"
    power = min(int(math.log10(max(end, 1.0))) // 3, len(_PREFIXES) - 1)
    unit = f"{_PREFIXES[power]}FLOP".strip()
    return 1000.0**power, unit, f"training compute ({unit})"


def shown_name(curve: Curve) -> str:
    return "BLEU" if curve.name == "bleu" else curve.name.replace("_", " ")


def area_unit(curve: Curve, unit: str) -> str:
    """Returns the unit of the area under a curve, such as "BLEU·h": its metric times `unit`, the unit of the x-axis."""
    name = shown_name(curve)
    return f"({name})·{unit}" if " " in name else f"{name}·{unit}"
