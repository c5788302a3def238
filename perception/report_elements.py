"""Elements of the HTML report (tags, tables, charts) as `xml.etree` elements.

The HTML serializer of `xml.etree` escapes every text outside of `style` and `script`.
"""

import itertools
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple
from xml.etree import ElementTree

from common.report.panels import COLOURS

Element = ElementTree.Element


LONGEST = 400
"""Maximum number of characters of a test example's text in the table of errors, without the "..." of a longer text."""

BINS = 10
"""Number of bins of the calibration plot."""

CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


WIDTH, HEIGHT, LEFT, BOTTOM, EDGE = 420, 260, 40, 36, 10
"""Size of a chart and of its margins, in units of the SVG view box."""


class Line(NamedTuple):
    """A line of a chart: points (x, y), and whether it is dashed. The points of a solid line are marked."""

    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False


def tag(kind: str, /, *children: Element | str, **attributes: str) -> Element:
    """Returns an element. In attribute names, a trailing underscore is removed; other underscores become hyphens."""
    made = Element(kind, {n.rstrip("_").replace("_", "-"): x for n, x in attributes.items()})
    for child in children:
        if isinstance(child, str):
            text = CONTROL.sub("\ufffd", child)
            if len(made):
                made[-1].tail = (made[-1].tail or "") + text
            else:
                made.text = (made.text or "") + text
        else:
            made.append(child)
    return made


def table(columns: Sequence[str], rows: Iterable[Sequence]) -> Element:
    header = tag("tr", *(tag("th", name, scope="col") for name in columns))
    body = [tag("tr", *map(_cell, row)) for row in rows]
    return tag("div", tag("table", tag("thead", header), tag("tbody", *body)), class_="wide")


def _cell(value: object) -> Element:
    if isinstance(value, Element):
        return value
    text = f"{value:,}" if isinstance(value, int) else str(value or "")
    number = re.fullmatch(r"[-+]?[\d.,]+(e[-+]?\d+)?( %|( ±| to) [-+]?[\d.]+)?", text)
    return tag("td", text, **({"class_": "number"} if number else {}))


def shortened(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def chart(lines: Sequence[Line], x_label: str, y_label: str) -> Iterable[Element]:
    """Yields a line chart and its legend. Lines with the same name have the same colour."""
    from matplotlib.ticker import MaxNLocator

    xs, ys = zip(*(point for line in lines for point in line.points), strict=True)
    locator = MaxNLocator(5)
    x_ticks, y_ticks = (locator.tick_values(min(v), max(v)).tolist() for v in (xs, ys))

    def at(x: float, y: float) -> tuple[str, str]:
        right = (x - x_ticks[0]) / (x_ticks[-1] - x_ticks[0]) * (WIDTH - LEFT - EDGE)
        up = (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0]) * (HEIGHT - BOTTOM - EDGE)
        return f"{LEFT + right:.1f}", f"{HEIGHT - BOTTOM - up:.1f}"

    def path(points: Iterable[tuple[float, float]], **style: str) -> Element:
        return tag(
            "polyline", points=" ".join(",".join(at(*p)) for p in points), fill="none", **style
        )

    parts = []
    for x in x_ticks:
        left, low = at(x, y_ticks[0])
        parts.append(tag("text", f"{x:g}", x=left, y=str(float(low) + 14), text_anchor="middle"))
    for y in y_ticks:
        left, low = at(x_ticks[0], y)
        parts.append(path([(x_ticks[0], y), (x_ticks[-1], y)], class_="axis"))
        parts.append(
            tag("text", f"{y:g}", x=str(float(left) - 5), y=str(float(low) + 4), text_anchor="end")
        )
    parts.append(
        tag("text", x_label, x=str((WIDTH + LEFT) / 2), y=str(HEIGHT - 6), text_anchor="middle")
    )
    names = dict.fromkeys(line.name for line in lines)
    colours = dict(zip(names, itertools.cycle(COLOURS[:-1]), strict=False))
    for line in lines:
        style = {"stroke": colours[line.name], "stroke_width": "1.8"}
        if line.dashed:
            parts.append(path(line.points, **style, stroke_dasharray="5 4"))
            continue
        parts.append(path(line.points, **style))
        for x, y in line.points:
            left, low = at(x, y)
            parts.append(tag("circle", cx=left, cy=low, r="2.5", fill=colours[line.name]))
    title = tag("title", f"{y_label} against {x_label}")
    yield tag("p", y_label, class_="soft")
    yield tag("svg", title, *parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img")
    yield tag(
        "ul",
        *(
            tag("li", tag("span", class_="mark", style=f"background:{colours[n]}"), n)
            for n in colours
        ),
        class_="legend",
    )
