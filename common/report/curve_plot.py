"""Validation metric over training time, with the area under the convergence curve shaded."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import UserError
from common.metrics.aucc import aucc, outline, shared_horizon
from common.metrics.curve import Axis, Curve
from common.report.panels import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK = "#333333"


def plot_curve(
    curves: Mapping[str, Curve],
    path: str | Path,
    *,
    axis: Axis = "seconds",
    horizon: float | None = None,
    title: str = "",
) -> None:
    """Draws curves of one metric into a PNG file.

    The line is the best value so far, as the AUCC integrates it; small dots are the measured
    values, the ringed one is the best until the horizon. The legend gives each AUCC in the units
    of the x-axis. Where less is better the shaded area goes on down to 0, below the picture.

    Args:
      curves: name to curve.
      path: the file; its folder is made if need be.
      axis: x; "seconds" is drawn in seconds, minutes or hours, whichever reads best.
      horizon: where x ends, in units of `axis`; None takes the end of the longest curve.
      title: above the picture.

    Raises:
      UserError: there is no curve, one is empty, they do not measure the same, or the horizon is
        not a positive number.
    """
    if not curves:
        raise UserError("there are no curves to plot")
    if len({(curve.name, curve.mode) for curve in curves.values()}) > 1:
        raise UserError("curves of different metrics cannot share a plot")

    # Figure without pyplot: no window, no figure kept alive, no backend changed.
    from matplotlib.figure import Figure

    if horizon is None:
        horizon = shared_horizon(curves, axis)
    end = 0.0 if horizon is None else horizon
    first = next(iter(curves.values()))
    scale, unit, label = _units(axis, end)
    shown_name = "BLEU" if first.name == "bleu" else first.name.replace("_", " ")
    metric = f"({shown_name})" if " " in shown_name else shown_name

    figure = Figure(figsize=(7.2, 4.2), dpi=160, layout="constrained")
    axes = figure.add_subplot()
    for number, (name, curve) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        xs, ys = zip(*outline(curve, axis, horizon), strict=True)
        xs = [x / scale for x in xs]
        area = f"{aucc(curve, axis, horizon) / scale:,.5g} {metric}·{unit}"
        axes.fill_between(xs, ys, color=colour, alpha=0.22 / len(curves), linewidth=0)
        shown = Curve(curve.name, curve.mode, [p for p in curve.points if p.at(axis) <= end])
        # The numbers of several curves would cover each other: they stand in the legend.
        several = len(curves) > 1 and shown.points
        best = f"best {shown.best.value:.4g}, " if several else ""
        axes.plot(xs, ys, color=colour, linewidth=1.8, label=f"{name}: {best}AUCC {area}")
        if shown.points:
            _mark(axes, shown, axis, scale, colour, number=not several)
    values = [point.value for curve in curves.values() for point in curve.points]
    _frame(axes, first, values)
    axes.set_xlim(0, end / scale or None)
    axes.set_xlabel(label, color=_INK)
    axes.set_ylabel(f"validation {shown_name}", color=_INK)
    axes.set_title(title, loc="left", color=_INK, fontsize=12)
    corner = "lower right" if first.mode == "max" else "upper right"
    axes.legend(loc=corner, frameon=False, fontsize=9, labelcolor=_INK)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def _units(axis: Axis, end: float) -> tuple[float, str, str]:
    """How many units of the axis one drawn unit is, its name, and the label."""
    match axis:
        case "seconds" if end >= 2 * 3600:
            return 3600.0, "h", "training time (h)"
        case "seconds" if end >= 2 * 60:
            return 60.0, "min", "training time (min)"
        case "seconds":
            return 1.0, "s", "training time (s)"
        case "hours":
            return 1.0, "h", "training time (h)"
        case "step":
            return 1.0, "steps", "training steps"
    return 1.0, "FLOPs", "training compute (FLOPs)"


def _mark(
    axes: "Axes", curve: Curve, axis: Axis, scale: float, colour: str, *, number: bool
) -> None:
    """Dots for the measured values, a ring for the best, and its value as a number if `number`."""
    # Not clipped: the last point often lies on the right edge.
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
    """Limits of y, grid and spines."""
    low, high = min(values), max(values)
    margin = 0.12 * (high - low or abs(high) or 1.0)
    bottom = 0.0 if curve.mode == "max" and low >= 0 else low - margin
    axes.set_ylim(bottom, high + margin)
    axes.grid(color="#e6e6e6", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#bbbbbb")
    axes.tick_params(colors=_INK, length=3)
