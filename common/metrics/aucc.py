"""AUCC, the area under the convergence curve (Reservoir Transformers, section 3, eq. 1).

The paper integrates a validation metric over wall-clock training time and gives no unit. Its Table
3 does: 114.57 at a best BLEU of 34.59 over 4 hours is at most 4 * 34.59 = 138.4, so the numbers are
BLEU-hours. `aucc(curve, "hours", 4.0)` compares with them.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from common.errors import UserError
from common.metrics.curve import Axis, Curve


def outline(curve: Curve, axis: Axis, horizon: float | None = None) -> list[tuple[float, float]]:
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

    Raises:
      UserError: the curve is empty or the horizon is not a positive number.
    """
    if horizon is not None and not (math.isfinite(horizon) and horizon > 0):
        raise UserError(f"the AUCC horizon must be a positive number, not {horizon}")
    if not curve.points:
        raise UserError(f"the {curve.name} curve has no validation points")
    measured = [(point.at(axis), point.value) for point in curve.running_best()]
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


def aucc(curve: Curve, axis: Axis = "seconds", horizon: float | None = None) -> float:
    """The area under the best validation value so far, by the trapezoid rule over `outline`.

    Returns:
      The area in metric x axis units: BLEU-seconds on "seconds", the paper's BLEU-hours on "hours".
      More is better where the metric is maximised, less where it is minimised. "step" and "flops"
      do not depend on the machine.

    Raises:
      UserError: the curve is empty or the horizon is not a positive number.
    """
    line = outline(curve, axis, horizon)
    return sum((x1 - x0) * (y0 + y1) / 2 for (x0, y0), (x1, y1) in itertools.pairwise(line))


def time_to(curve: Curve, fraction: float, axis: Axis = "seconds") -> float:
    """Where the curve first reaches a fraction of its own best value (appendix, Tables 6 and 7).

    That is the first validation point at which the value is there; nothing is interpolated,
    because only there was it measured. A metric that is minimised must fall to best / fraction.

    Returns:
      The position of that point in units of the axis.

    Raises:
      UserError: the curve is empty or the fraction is not in (0, 1].
    """
    if not 0 < fraction <= 1:
        raise UserError(f"the fraction of the best value must lie in (0, 1], not {fraction}")
    best = curve.best.value
    # The easier of the two sides of the best value, whatever the signs.
    target = best * fraction if (curve.mode == "max") == (best >= 0) else best / fraction
    return next(p.at(axis) for p in curve.points if not curve.better(target, than=p.value))


@dataclass(frozen=True)
class Comparison:
    """One model beside others (the columns of Tables 1, 3, 6 and 7).

    Attributes:
      model: its name.
      best: its best validation value.
      aucc: area until the shared horizon, metric x axis units.
      normalised: `aucc` over the largest among the models; NaN where all are 0.
      to_95: position at which 95% of its own best is reached, in units of the axis.
      to_99: the same for 99%.
      to_100: the same for the best itself.
    """

    model: str
    best: float
    aucc: float
    normalised: float
    to_95: float
    to_99: float
    to_100: float


def compare(
    curves: Mapping[str, Curve], axis: Axis = "hours", horizon: float | None = None
) -> list[Comparison]:
    """Sets models side by side, in the order given.

    Args:
      curves: model name to curve, all of one metric.
      axis: what time is.
      horizon: in units of the axis; None takes the end of the longest curve, for all.

    Raises:
      UserError: there are no curves, one is empty, or they do not measure the same.
    """
    if not curves:
        raise UserError("there are no curves to compare")
    kinds = {(curve.name, curve.mode) for curve in curves.values()}
    if len(kinds) > 1:
        raise UserError(f"curves of different metrics cannot be compared: {sorted(kinds)}")
    for model, curve in curves.items():
        if not curve.points:
            raise UserError(f"the {curve.name} curve of {model!r} has no validation points")
    if horizon is None:
        horizon = shared_horizon(curves, axis)
    areas = {model: aucc(curve, axis, horizon) for model, curve in curves.items()}
    largest = max(areas.values())
    return [
        Comparison(
            model=model,
            best=curve.best.value,
            aucc=areas[model],
            normalised=areas[model] / largest if largest else math.nan,
            to_95=time_to(curve, 0.95, axis),
            to_99=time_to(curve, 0.99, axis),
            to_100=time_to(curve, 1.0, axis),
        )
        for model, curve in curves.items()
    ]


def shared_horizon(curves: Mapping[str, Curve], axis: Axis) -> float | None:
    """The end of the longest curve; None if no curve leaves 0 (such as FLOPs never counted)."""
    ends = [curve.points[-1].at(axis) for curve in curves.values() if curve.points]
    return max(ends, default=0.0) or None
