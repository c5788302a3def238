"""A validation curve: one metric against steps, training time and compute."""

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from common.errors import UserError

Axis = Literal["seconds", "hours", "step", "flops"]
Mode = Literal["max", "min"]

SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True)
class Point:
    """One validation result.

    Attributes:
      step: optimizer steps done.
      seconds: wall-clock training seconds so far, without compilation, evaluation and checkpoints.
      flops: floating-point operations spent on training so far.
      value: the metric.
    """

    step: int
    seconds: float
    flops: float
    value: float

    def at(self, axis: Axis) -> float:
        """The position of this point on an axis ("hours" are `seconds` / 3600)."""
        match axis:
            case "seconds":
                return self.seconds
            case "hours":
                return self.seconds / SECONDS_PER_HOUR
            case "step":
                return float(self.step)
            case "flops":
                return self.flops
        raise UserError(f"unknown axis {axis!r}: use seconds, hours, step or flops")


@dataclass
class Curve:
    """The points of one run in the order in which they were measured.

    Attributes:
      name: what is measured, such as "BLEU".
      mode: "max" where more is better, "min" where less is.
      points: finite values only, see `add`.
    """

    name: str
    mode: Mode
    points: list[Point] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.mode not in ("max", "min"):
            raise UserError(f"the mode of {self.name!r} is 'max' or 'min', not {self.mode!r}")
        given, self.points = self.points, []
        for point in given:
            self.add(point)

    def add(self, point: Point) -> bool:
        """Appends a point; says whether it was kept.

        A value that is NaN or infinite is left out (False): an evaluation without a number has no
        place in an area or a maximum, and must not stop a run.

        Raises:
          ValueError: a coordinate is negative, not finite, or lies before the last point.
        """
        before = self.points[-1] if self.points else Point(0, 0.0, 0.0, 0.0)
        for axis in ("step", "seconds", "flops"):
            here, there = getattr(point, axis), getattr(before, axis)
            if not (math.isfinite(here) and here >= there):
                raise ValueError(f"{self.name}: {axis} must not go back: {here} after {there}")
        if not math.isfinite(point.value):
            return False
        self.points.append(point)
        return True

    def better(self, value: float, than: float) -> bool:
        """Whether a value strictly improves on another."""
        return value > than if self.mode == "max" else value < than

    def running_best(self) -> list[Point]:
        """The points, each with the best value seen until then."""
        held: list[Point] = []
        for point in self.points:
            if held and not self.better(point.value, than=held[-1].value):
                point = replace(point, value=held[-1].value)
            held.append(point)
        return held

    def until(self, axis: Axis, end: float) -> "Curve":
        """The points at most `end` far along the axis."""
        return Curve(self.name, self.mode, [p for p in self.points if p.at(axis) <= end])

    @property
    def best(self) -> Point:
        """The first point that has the best value.

        Raises:
          UserError: the curve is empty.
        """
        if not self.points:
            raise UserError(f"the {self.name} curve has no validation points")
        choose = max if self.mode == "max" else min
        return choose(self.points, key=lambda point: point.value)

    def to_json(self) -> dict[str, Any]:
        """The curve as plain values; `from_json` reads them back."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> "Curve":
        """Reads what `to_json` wrote.

        Raises:
          UserError: the record is not a curve.
        """
        try:
            points = [Point(**point) for point in record["points"]]
            return cls(record["name"], record["mode"], points)
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"not a validation curve: {error!r}") from error
