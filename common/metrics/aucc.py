"""AUCC, the area under the convergence curve (Shen et al., 2021, section 3, eq. 1).

The paper integrates a validation metric over wall-clock training time and does not state the unit. It must be
BLEU-hours: Table 3 has an AUCC of 114.57 for a best BLEU of 34.59 and 4 hours, and 4 * 34.59 = 138.4. So compare
`aucc(curve, "hours", 4.0)` with the paper's numbers.
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
    """Returns the points (x, value) of the line from 0 to the horizon whose area is the AUCC.

    The paper does not state these choices:
    - The line joins the validation points, each at the best value so far.
    - A metric that is maximised starts at (0, 0). A metric that is minimised (bits per character) starts with its first
      value, because an initial 0 would be a perfect score.
    - After the last point the best value is held.
    - At a horizon between two points the line is interpolated.

    Args:
      curve: at least one point.
      axis: of x.
      horizon: end of the line in units of the axis; None for the last point.
      held: False joins the measured values instead of the best values so far (eq. 1's g_t).

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
    """Returns the area under `outline`, in metric units times axis units, by the trapezoidal rule.

    "hours" gives the paper's BLEU-hours; "step" and "flops" do not depend on the machine. Larger is better for a metric
    that is maximised, smaller for a metric that is minimised.

    Raises:
      UserError: the curve is empty or the horizon is not a positive number.
    """
    line = outline(curve, axis, horizon, held)
    return sum((x1 - x0) * (y0 + y1) / 2 for (x0, y0), (x1, y1) in itertools.pairwise(line))


def mean_outline(
    curves: Sequence[Curve], axis: Axis, horizon: float | None = None
) -> list[tuple[float, float]]:
    """Returns the mean of the outlines of several seeds; its area is their mean AUCC.

    Args:
      curves: at least one.
      horizon: None for the end of the longest curve; shorter curves hold their best value.

    Raises:
      UserError: a curve is empty or the horizon is not a positive number.
    """
    lines = [outline(curve, axis, horizon) for curve in curves]
    if len(lines) == 1:
        return lines[0]
    xs = sorted({x for line in lines for x, _ in line})
    # np.interp extends a shorter line with its last value.
    return [(x, float(np.mean([np.interp(x, *np.transpose(line)) for line in lines]))) for x in xs]


def reaching(curve: Curve, fraction: float, best: float | None = None) -> Point | None:
    """Returns the first validation point that reaches a fraction of the best value (appendix, Tables 6 and 7).

    Points are not interpolated. A metric that is minimised must fall to best / fraction.

    Args:
      curve: at least one point.
      fraction: in (0, 1].
      best: the best value of several runs, for example; None for the best value of the curve.

    Returns:
      The point, or None if the curve never reaches the value.

    Raises:
      UserError: the curve is empty or the fraction is not in (0, 1].
    """
    if not 0 < fraction <= 1:
        raise UserError(f"the fraction of the best value must lie in (0, 1], not {fraction}")
    best = curve.best.value if best is None else best
    # Always the side of the best value that is easier to reach, also for negative values.
    target = best * fraction if (curve.mode == "max") == (best >= 0) else best / fraction
    return next((p for p in curve.points if not curve.better(target, than=p.value)), None)


def time_to(curve: Curve, fraction: float, axis: Axis = "seconds") -> float:
    """Returns where the curve reaches a fraction of its own best value, in units of the axis; raises as `reaching`."""
    return reaching(curve, fraction).at(axis)


def shared_horizon(
    curves: Iterable[Curve], axis: Axis, which: Literal["longest", "shortest"] = "longest"
) -> float | None:
    """Returns the end of the longest (the paper's choice) or the shortest curve; None if it is 0 (FLOPs not counted).

    "longest" assumes that shorter runs have converged, because it holds their best value.
    """
    ends = [curve.points[-1].at(axis) for curve in curves if curve.points]
    return (max if which == "longest" else min)(ends, default=0.0) or None
