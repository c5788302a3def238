"""Display units of the x-axis of a curve."""

import math
from typing import NamedTuple

from common.metrics.curve import Axis, Curve

_PREFIXES = " kMGTPEZY"


class Units(NamedTuple):
    """A display unit.

    Attributes:
      scale: units of the axis per display unit.
      unit: name of the display unit.
      label: axis label of a figure.
    """

    scale: float
    unit: str
    label: str


def units(axis: Axis, end: float) -> Units:
    """Returns a readable display unit for an axis that ends at `end`; only "seconds" and "flops" are scaled."""
    match axis:
        case "seconds" if end >= 2 * 3600:
            return Units(3600.0, "h", "training time (h)")
        case "seconds" if end >= 2 * 60:
            return Units(60.0, "min", "training time (min)")
        case "seconds":
            return Units(1.0, "s", "training time (s)")
        case "hours":
            return Units(1.0, "h", "training time (h)")
        case "step":
            return Units(1.0, "steps", "training steps")
    thousands = int(math.log10(end)) // 3 if end >= 1 else 0
    power = min(thousands, len(_PREFIXES) - 1)
    unit = f"{_PREFIXES[power]}FLOP".strip()
    return Units(1000.0**power, unit, f"training compute ({unit})")


def shown_name(curve: Curve) -> str:
    """Returns the display name of a curve's metric."""
    return "BLEU" if curve.name == "bleu" else curve.name.replace("_", " ")


def area_unit(curve: Curve, unit: str) -> str:
    """Returns the unit of the area under a curve."""
    name = shown_name(curve)
    return f"({name})·{unit}" if " " in name else f"{name}·{unit}"
