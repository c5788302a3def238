"""Display names and units for the axes of tables and figures."""

import math
from typing import NamedTuple

from common.metrics.curve import Axis, Curve

_TIMES = ((3600.0, "h"), (60.0, "min"))
_PREFIXES = " kMGTPEZY"


class Units(NamedTuple):
    """A display unit of an axis.

    Attributes:
      scale: divisor that converts axis values to display values, such as 3600 to show seconds as hours.
      unit: name of the display unit.
      label: axis label in figures.
    """

    scale: float
    unit: str
    label: str


def units(axis: Axis, end: float) -> Units:
    """Returns a readable display unit for an axis from 0 to `end`. Only "seconds" and "flops" are scaled."""
    match axis:
        case "seconds":
            scale, unit = next((time for time in _TIMES if end >= 2 * time[0]), (1.0, "s"))
            return Units(scale, unit, f"training time ({unit})")
        case "hours":
            return Units(1.0, "h", "training time (h)")
        case "step":
            return Units(1.0, "steps", "training steps")
    power = min(int(math.log10(max(end, 1.0))) // 3, len(_PREFIXES) - 1)
    unit = f"{_PREFIXES[power]}FLOP".strip()
    return Units(1000.0**power, unit, f"training compute ({unit})")


def shown_name(curve: Curve) -> str:
    """Returns the display name of a curve's metric."""
    return "BLEU" if curve.name == "bleu" else curve.name.replace("_", " ")


def area_unit(curve: Curve, unit: str) -> str:
    """Returns the unit of the area under a curve: the curve's metric times `unit`, the unit of the x-axis."""
    name = shown_name(curve)
    return f"({name})·{unit}" if " " in name else f"{name}·{unit}"
