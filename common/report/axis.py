"""Display names and units for the axes of tables and figures."""

import math

from common.metrics.curve import Axis, Curve

_TIMES = ((3600.0, "h"), (60.0, "min"))
_PREFIXES = " kMGTPEZY"


def units(axis: Axis, end: float) -> tuple[float, str, str]:
    """Returns scale, unit and label for an axis from 0 to `end`.

    Divide axis values by the scale to convert them to the unit: 3600 converts seconds to hours. The scale is 1 for the
    axes "hours" and "step".
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
    """Returns the display name of a curve's metric."""
    return "BLEU" if curve.name == "bleu" else curve.name.replace("_", " ")


def area_unit(curve: Curve, unit: str) -> str:
    """Returns the unit of the area under a curve: the curve's metric times `unit`, the unit of the x-axis."""
    name = shown_name(curve)
    return f"({name})·{unit}" if " " in name else f"{name}·{unit}"
