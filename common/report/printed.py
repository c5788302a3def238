"""Reads tables with the numbers that a paper prints, from PAPER/printed/*.csv."""

import csv
from importlib.resources import files


def printed(paper: str, table: str, keys: int = 2) -> dict[tuple[str, ...], tuple[str, ...]]:
    """Returns the rows of a printed table as {first `keys` cells of a row: all other cells}.

    Args:
      table: name of the file without ".csv", such as "table1".
    """
    return {tuple(row[:keys]): tuple(row[keys:]) for row in _read(paper, table)[1:]}


def columns(paper: str, table: str) -> list[str]:
    """Returns the column names of a printed table."""
    return _read(paper, table)[0]


def _read(paper: str, table: str) -> list[list[str]]:
    text = (files(paper) / "printed" / f"{table}.csv").read_text(encoding="utf-8")
    return list(csv.reader(text.splitlines()))
