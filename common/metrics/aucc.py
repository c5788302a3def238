"""AUCC, the area under the convergence curve (Reservoir Transformers, section 3, eq. 1).

The paper integrates a validation metric over wall-clock training time and gives no unit. Its Table
3 does: 114.57 at a best BLEU of 34.59 over 4 hours is at most 4 * 34.59 = 138.4, so the numbers are
BLEU-hours. `aucc(curve, "hours", 4.0)` compares with them.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np

from common.errors import UserError
from common.metrics.curve import Axis, Curve, Point


def outline(
    curve: Curve, axis: Axis, horizon: float | None = None, held: bool = True
) -> list[tuple[float, float]]:
    """The line (x, value) from 0 to the horizon whose area is the AUCC.

    It joins the validation points, each at the best value so far. Where the metric is to be
    maximised it starts at (0, 0); where it is to be minimised (bits per character) an untrained
    value of 0 would be a reward, so the first value is held back to 0. Past the last point the
    best value is held; a curve that is longer than the horizon is cut there, by interpolation.
    The paper states none of these four choices, they are our reading.

    Args:
      curve: at least one point.
      axis: what x is.
      horizon: where to end, in units of the axis; None ends at the last point.
      held: False joins the values as they were measured, eq. 1's g_t: a curve that collapses loses its area.

    Raises:
      UserError: the curve is empty or the horizon is not a positive number.
    """
    if horizon is not None and not (math.isfinite(horizon) and horizon > 0):
        raise UserError(f"the AUCC horizon must be a positive number, not {horizon}")
    if not curve.points:
        raise UserError(f"the {curve.name} curve has no validation points")
    points = curve.running_best() if held else curve.points
    measured = [(point.at(axis), point.value) for point in points]
    start = 0.0 if curve.mode == "max" else measured[0][1]
    line = [(0.0, start), *measured]
    if horizon is None:
        return line
    kept = [(x, y) for x, y in line if x <= horizon]
    (x0, y0) = kept[-1]
    if x0 == horizon:
        return kept
    (x1, y1) = line[len(kept)] if len(kept) < len(line) else (horizon, y0)
    return [*kept, (horizon, y0 + (y1 - y0) * (horizon - x0) / (x1 - x0))]


def aucc(
    curve: Curve, axis: Axis = "seconds", horizon: float | None = None, held: bool = True
) -> float:
    """The area under the best validation value so far (or under what was measured, see `outline`), by trapezoids.

    Returns:
      The area in metric x axis units: BLEU-seconds on "seconds", the paper's BLEU-hours on "hours".
      More is better where the metric is maximised, less where it is minimised. "step" and "flops"
      do not depend on the machine.

    Raises:
      UserError: the curve is empty or the horizon is not a positive number.
    """
    line = outline(curve, axis, horizon, held)
    return sum((x1 - x0) * (y0 + y1) / 2 for (x0, y0), (x1, y1) in itertools.pairwise(line))


def mean_outline(
    curves: Sequence[Curve], axis: Axis, horizon: float | None = None
) -> list[tuple[float, float]]:
    """The mean of the outlines of several seeds; the area under it is the mean of their AUCCs.

    Args:
      curves: at least one.
      horizon: None ends at the last point of the longest, up to which the others are held.

    Raises:
      UserError: a curve is empty or the horizon is not a positive number.
    """
    lines = [outline(curve, axis, horizon) for curve in curves]
    if len(lines) == 1:
        return lines[0]
    xs = sorted({x for line in lines for x, _ in line})
    # np.interp holds the last value of a shorter line.
    return [(x, float(np.mean([np.interp(x, *np.transpose(line)) for line in lines]))) for x in xs]


def reaching(curve: Curve, fraction: float, best: float | None = None) -> Point | None:
    """The first validation point at a fraction of a best value (appendix, Tables 6 and 7).

    Nothing is interpolated, because only there was it measured. A metric that is minimised must
    fall to best / fraction.

    Args:
      curve: at least one point.
      fraction: in (0, 1].
      best: what it is a fraction of, such as the best of several runs; None takes the curve's own.

    Returns:
      The point; None where the curve does not get there, which cannot be with its own best.

    Raises:
      UserError: the curve is empty or the fraction is not in (0, 1].
    """
    if not 0 < fraction <= 1:
        raise UserError(f"the fraction of the best value must lie in (0, 1], not {fraction}")
    best = curve.best.value if best is None else best
    # The easier of the two sides of the best value, whatever the signs.
    target = best * fraction if (curve.mode == "max") == (best >= 0) else best / fraction
    return next((p for p in curve.points if not curve.better(target, than=p.value)), None)


def time_to(curve: Curve, fraction: float, axis: Axis = "seconds") -> float:
    """Where the curve reaches a fraction of its own best value, in units of the axis.

    Errors are those of `reaching`.
    """
    return reaching(curve, fraction).at(axis)


def shared_horizon(
    curves: Iterable[Curve], axis: Axis, which: Literal["longest", "shortest"] = "longest"
) -> float | None:
    """The end of the longest curve, as in the paper, or of the shortest; None where that is 0 (FLOPs never counted).

    Up to the longest, a run that was ended early is taken to have converged: its best value is held.
    """
    ends = [curve.points[-1].at(axis) for curve in curves if curve.points]
    return (max if which == "longest" else min)(ends, default=0.0) or None
