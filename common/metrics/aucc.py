"""AUCC, the area under the convergence curve (Shen et al., 2021, section 3, eq. 1). `outline` defines the curve."""

import itertools
from collections.abc import Sequence

import numpy as np

from common.config import check_number
from common.errors import UserError, check
from common.metrics.curve import Axis, Curve, Point


def outline(
    curve: Curve, axis: Axis, horizon: float | None = None, held: bool = True
) -> list[tuple[float, float]]:
    """Returns the points (x, value) of a line from 0 to the horizon. The area below the line is the AUCC.

    The paper does not state how to draw the line. This function makes these choices:
    - The line joins the validation points, each at the best value so far (unless `held` is False).
    - For a metric that is maximised, the line starts at (0, 0). For a metric that is minimised, such as bits per
      character, it starts at the first value, because an initial 0 would be a perfect score.
    - The line is constant after the last point.
    - A horizon between two points ends the line at an interpolated value.

    Args:
      horizon: end of the line in units of `axis`. None ends the line at the last validation point.
      held: True joins the best values so far. False joins the measured values, g_t in equation 1.

    Raises:
      UserError: the curve is empty, the axis is unknown, or the horizon is not a finite number above 0.
    """
    if horizon is not None:
        check_number("the horizon of the AUCC", horizon, positive=True)
    if not curve.points:
        raise UserError(
            f"the {curve.name} curve has no validation points: use a run in which an evaluation gave a finite value"
        )
    points = curve.running_best() if held else curve.points
    measured = [(point.at(axis), point.value) for point in points]
    start = 0.0 if curve.mode == "max" else measured[0][1]
    line = [(0.0, start), *measured]
    if horizon is None:
        return line
    kept = [(x, y) for x, y in line if x <= horizon]
    if kept[-1][0] < horizon:
        # `np.interp` extends a shorter line with its last value.
        kept.append((horizon, float(np.interp(horizon, *np.transpose(line)))))
    return kept


def aucc(
    curve: Curve, axis: Axis = "seconds", horizon: float | None = None, held: bool = True
) -> float:
    """Returns the area under a validation curve (AUCC), in metric units times axis units.

    For BLEU and the axis "hours", the unit is the paper's BLEU-hours. For the arguments and the errors see `outline`.
    Also raises a UserError if the horizon is None and the curve ends at 0 on the axis.
    """
    line = outline(curve, axis, horizon, held)
    check(line[-1][0] > 0, f"the {curve.name} curve ends at 0 {axis}: choose another axis")
    return sum((x1 - x0) * (y0 + y1) / 2 for (x0, y0), (x1, y1) in itertools.pairwise(line))


def mean_outline(
    curves: Sequence[Curve], axis: Axis, horizon: float | None = None
) -> list[tuple[float, float]]:
    """Returns the points (x, value) of a mean line: the mean of the lines (`outline`) of several curves.

    The area below the mean line is the mean AUCC. With horizon=None, all lines end at the last point of the longest
    curve. For the other arguments and the errors see `outline`.
    """
    lines = [outline(curve, axis, horizon) for curve in curves]
    if len(lines) == 1:
        return lines[0]
    xs = sorted({x for line in lines for x, _ in line})
    return [(x, float(np.mean([np.interp(x, *np.transpose(line)) for line in lines]))) for x in xs]


def reaching(curve: Curve, fraction: float, best: float | None = None) -> Point | None:
    """Returns the first validation point that reaches a fraction of the best value (appendix, Tables 6 and 7).

    The value to reach is fraction * best. If this value is better than `best`, as for a metric that is minimised and
    positive, the value to reach is best / fraction. Returns None if no point reaches the value.

    Args:
      best: value that corresponds to the fraction 1, such as the best value of several runs. None takes the best value
        of this curve.

    Raises:
      UserError: `fraction` is not in (0, 1], or the curve is empty and `best` is None.
    """
    if not 0 < fraction <= 1:
        raise UserError(
            f"the fraction of the best value to reach must be above 0 and at most 1, got {fraction}"
        )
    best = curve.best.value if best is None else best
    # The sign of the best value decides which of the two targets is easier to reach than the best value.
    target = best * fraction if (curve.mode == "max") == (best >= 0) else best / fraction
    return next((p for p in curve.points if not curve.better(target, than=p.value)), None)
