"""Small tables as Markdown, CSV and aligned text."""

import csv
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

_NUMBER = re.compile(r"[-+]?\.?\d|nan|[-+]?inf|$")


class Table(NamedTuple):
    """Columns and rows: pass them as `text(*table)`. Jupyter displays the table."""

    columns: tuple[str, ...]
    rows: list[tuple]

    def _repr_markdown_(self) -> str:
        return markdown(*self)


def markdown(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Returns an aligned Markdown table; columns of numbers are right-aligned.

    Integers get thousands separators. Floats get two decimals, or four significant digits below 1 and from a million
    on. None is empty.

    Raises:
      ValueError: a row and the header have different lengths.
    """
    escaped = [[cell.replace("|", "\\|") for cell in line] for line in _lines(columns, rows)]
    header, *body = _pad(escaped)
    right = _right_aligned(escaped[1:], len(columns))
    rule = ["-" * (len(h) - 1) + (":" if r else "-") for h, r in zip(header, right, strict=True)]
    return "".join(f"| {' | '.join(line)} |\n" for line in [header, rule, *body])


def text(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Returns a table for the terminal, with the cells of `markdown`.

    Raises:
      ValueError: a row and the header have different lengths.
    """
    header, *body = _pad(_lines(columns, rows))
    rule = ["-" * len(cell) for cell in header]
    return "".join("  ".join(line).rstrip() + "\n" for line in [header, rule, *body])


def write_csv(path: str | Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Writes a CSV file with unrounded numbers; None is empty.

    Raises:
      ValueError: a row and the header have different lengths.
    """
    rows = _checked(columns, rows)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([columns, *rows])


def keep(stem: Path, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Writes a table to STEM.csv and STEM.md.

    Raises:
      ValueError: a row and the header have different lengths.
    """
    write_csv(f"{stem}.csv", columns, rows)
    Path(f"{stem}.md").write_text(markdown(columns, rows), encoding="utf-8")


def publish(stem: Path, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Writes a table to STEM.csv and STEM.md and prints it."""
    keep(stem, columns, rows)
    print(f"\n{text(columns, rows)}\nwritten: {stem}.csv, .md")


def mean_std(values: Sequence[float], digits: int = 1) -> str:
    """Returns "mean ± standard deviation", or the mean of a single value."""
    mean = f"{np.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {np.std(values, ddof=1):.{digits}f}"


def digits_for(values: Iterable[float]) -> int:
    """Returns the number of decimals for a column: 3 below 10, 2 below 1,000, else 0."""
    largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    return 3 if largest < 10 else 2 if largest < 1000 else 0


def _checked(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[Sequence[Any]]:
    """Returns the rows after checking their lengths."""
    rows = list(rows)
    for row in rows:
        if len(row) != len(columns):
            raise ValueError(
                f"a row has {len(row)} cells, but the table has {len(columns)} columns: {row}"
            )
    return rows


def _lines(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[list[str]]:
    """Returns header and rows as strings without line breaks."""
    cells = [[_cell(value) for value in row] for row in _checked(columns, rows)]
    return [[" ".join(cell.split()) for cell in line] for line in [list(columns), *cells]]


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.2f}" if value == 0 or 1 <= abs(value) < 1e6 else f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def _right_aligned(body: Sequence[Sequence[str]], width: int) -> list[bool]:
    """Returns for each column whether all cells begin with a number."""
    return [bool(body) and all(_NUMBER.match(line[i]) for line in body) for i in range(width)]


def _pad(lines: Sequence[Sequence[str]]) -> list[list[str]]:
    """Pads cells to the width of their column; the first line is the header."""
    right = _right_aligned(lines[1:], len(lines[0]))
    # Markdown needs three dashes below a header.
    widths = [max(3, *(len(line[i]) for line in lines)) for i in range(len(lines[0]))]
    return [
        [c.rjust(w) if r else c.ljust(w) for c, w, r in zip(line, widths, right, strict=True)]
        for line in lines
    ]
