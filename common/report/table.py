"""Writes small tables as Markdown, CSV and aligned text."""

import csv
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common.storage.addresses import shown

_NUMBER = re.compile(r"[-+]?\.?\d|nan|[-+]?inf|$")


class Table(NamedTuple):
    """Column names and rows of a table. `text(*table)` formats the table for the terminal."""

    columns: tuple[str, ...]
    rows: list[tuple]

    def _repr_markdown_(self) -> str:
        return markdown(*self)


def markdown(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Returns a Markdown table with aligned columns; columns of numbers are right-aligned. None becomes an empty cell.

    Integers get thousands separators. Floats get two decimals, or four significant digits if their absolute value is
    below 1 (except 0) or at least a million.
    """
    cells = [[cell.replace("|", "\\|") for cell in line] for line in _cells(columns, rows)]
    (header, *body), right = _aligned(cells)
    rule = ["-" * (len(h) - 1) + (":" if r else "-") for h, r in zip(header, right, strict=True)]
    return "".join(f"| {' | '.join(line)} |\n" for line in [header, rule, *body])


def text(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Returns an aligned table for the terminal. Formats numbers as `markdown` does."""
    (header, *body), _ = _aligned(_cells(columns, rows))
    rule = ["-" * len(cell) for cell in header]
    return "".join("  ".join(line).rstrip() + "\n" for line in [header, rule, *body])


def write_csv(path: str | Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Writes a CSV file with unrounded numbers. None becomes an empty cell."""
    rows = _checked(columns, rows)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([columns, *rows])


def keep(stem: Path, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Writes a table to the files `stem`.csv and `stem`.md."""
    write_csv(f"{stem}.csv", columns, rows)
    Path(f"{stem}.md").write_text(markdown(columns, rows), encoding="utf-8")


def publish(stem: Path, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Writes a table to the files `stem`.csv and `stem`.md, and prints the table."""
    keep(stem, columns, rows)
    print(f"\n{text(columns, rows)}\nwritten: {shown(stem)}.csv, .md")


def mean_std(values: Sequence[float], digits: int = 1) -> str:
    """Returns "mean ± standard deviation" with `digits` decimals; for a single value, only the value."""
    mean = f"{np.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {np.std(values, ddof=1):.{digits}f}"


def digits_for(values: Iterable[float]) -> int:
    """Returns the decimals of a column: 3 if all finite absolute values are below 10, 2 if below 1,000, else 0."""
    largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    return 3 if largest < 10 else 2 if largest < 1000 else 0


def _checked(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[Sequence[Any]]:
    rows = list(rows)
    for row in rows:
        if len(row) != len(columns):
            raise ValueError(
                f"a table row must have {len(columns)} cells, one for each column, got {len(row)}: {row}"
            )
    return rows


def _cells(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[list[str]]:
    lines = [list(columns), *([_cell(value) for value in row] for row in _checked(columns, rows))]
    return [[" ".join(cell.split()) for cell in line] for line in lines]


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.2f}" if value == 0 or 1 <= abs(value) < 1e6 else f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def _aligned(lines: Sequence[Sequence[str]]) -> tuple[list[list[str]], list[bool]]:
    """Pads the cells of each column to equal width. Returns the padded lines, and whether each column is right-aligned.

    A column is right-aligned if all cells below its header are empty or begin with a number.
    """
    padded, right = [], []
    for header, *body in zip(*lines, strict=True):
        numbers = bool(body) and all(_NUMBER.match(cell) for cell in body)
        # The rule below a header needs at least three characters: --- or --:.
        width = max(3, *map(len, (header, *body)))
        align = str.rjust if numbers else str.ljust
        padded.append([align(cell, width) for cell in (header, *body)])
        right.append(numbers)
    return [list(line) for line in zip(*padded, strict=True)], right
