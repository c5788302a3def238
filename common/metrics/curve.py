"""Validation curves: a metric over steps, training time and FLOPs."""

import itertools
import math
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

from common.errors import UserError, check

Axis = Literal["seconds", "hours", "step", "flops"]


@dataclass(frozen=True)
class Point:
    """One validation result.

    Attributes:
      step: number of optimizer steps.
      seconds: wall-clock training seconds up to this step, without compilation, evaluation and checkpoints; or 0.
      flops: training FLOPs up to this step; 0 if they are not counted.
      value: value of the validation metric.
    """

    step: int
    seconds: float
    flops: float
    value: float

    def at(self, axis: Axis) -> float:
        """Returns the x coordinate of this point on an axis. Raises a UserError if the axis is unknown."""
        if axis not in get_args(Axis):
            raise UserError(f"unknown axis {axis!r}: choose one of {', '.join(get_args(Axis))}")
        return self.seconds / 3600 if axis == "hours" else float(getattr(self, axis))


@dataclass
class Curve:
    """The validation points of one run, ordered by step.

    Attributes:
      name: name of the metric, such as "bleu".
      mode: "max" if larger values are better, "min" if smaller values are better.
      points: the validation points, without points whose value is NaN or infinite.
    """

    name: str
    mode: Literal["max", "min"]
    points: list[Point] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.mode not in ("max", "min"):
            raise UserError(
                f"the mode of the metric {self.name!r} must be 'max' or 'min', got {self.mode!r}"
            )
        given, self.points = self.points, []
        for point in given:
            self.add(point)

    def add(self, point: Point) -> bool:
        """Appends a point and returns True. Ignores a point with a NaN or infinite value and returns False.

        Raises:
          UserError: a field is not a number, step, seconds or FLOPs are negative, not finite, or less than at the
            previous point, or the step is that of the previous point.
        """
        values = vars(point).items()
        point = Point(**{n: as_number(f"{n} of the {self.name} curve", x) for n, x in values})
        before = self.points[-1] if self.points else Point(0, 0.0, 0.0, 0.0)
        for axis in ("step", "seconds", "flops"):
            here, there = getattr(point, axis), getattr(before, axis)
            if not (math.isfinite(here) and here >= there):
                raise UserError(
                    f"{axis} of the {self.name} curve must be finite, at least 0, and must not decrease: got {here}"
                    + f" after {there}" * bool(self.points)
                )
        again = bool(self.points) and point.step == before.step
        check(not again, f"the {self.name} curve has two points at step {point.step}: omit one")
        if not math.isfinite(point.value):
            return False
        self.points.append(point)
        return True

    def end(self, axis: Axis) -> float:
        """Returns the position of the last point on an axis; 0 without points."""
        return self.points[-1].at(axis) if self.points else 0.0

    def better(self, value: float, than: float) -> bool:
        """Returns whether `value` is strictly better than `than`."""
        return value > than if self.mode == "max" else value < than

    def running_best(self) -> list[Point]:
        """Returns the points, with each point's value replaced by the best value so far."""
        better = max if self.mode == "max" else min
        values = itertools.accumulate((point.value for point in self.points), better)
        return [replace(point, value=x) for point, x in zip(self.points, values, strict=True)]

    def until(self, axis: Axis, end: float) -> "Curve":
        """Returns the curve without the points after `end`, which is in units of the axis."""
        return Curve(self.name, self.mode, [p for p in self.points if p.at(axis) <= end])

    @property
    def best(self) -> Point:
        """The first point with the best value. Raises a UserError if the curve is empty."""
        if not self.points:
            raise UserError(
                f"the {self.name} curve has no validation points: use a run in which an evaluation gave a finite value"
            )
        choose = max if self.mode == "max" else min
        return choose(self.points, key=lambda point: point.value)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> "Curve":
        """Inverse of `to_json`; missing seconds and FLOPs are 0. Raises a UserError if `record` is not a curve."""
        try:
            zeros, needed = {"seconds": 0.0, "flops": 0.0}, ("step", "value")
            points = [Point(**zeros | {n: p[n] for n in needed} | p) for p in record["points"]]
            return cls(record["name"], record["mode"], points)
        except KeyError as error:
            raise UserError(f"the validation curve lacks the field {error}") from error
        except (TypeError, ValueError) as error:
            raise UserError(f"the JSON value is not a validation curve ({error})") from error


def as_number(name: str, value: Any) -> int | float:
    """Converts a number or a scalar of NumPy or JAX to a Python number. Raises a UserError for other values."""
    with suppress(TypeError, ValueError):  # `item` refuses an array of several numbers.
        value = value.item() if hasattr(value, "item") else value
    real = isinstance(value, int | float) and not isinstance(value, bool)
    check(real, f"{name} must be a number, got {value!r:.80}")
    return value
