"""What a paper prints, as it prints it. The numbers are in PAPER/printed/*.csv."""

import csv
from importlib.resources import files


def printed(paper: str, table: str, keys: int = 2) -> dict[tuple[str, ...], tuple[str, ...]]:
    """The cells of a table, such as "table1", by the first `keys` columns of their rows."""
    return {tuple(row[:keys]): tuple(row[keys:]) for row in _read(paper, table)[1:]}


def columns(paper: str, table: str, keys: int = 2) -> tuple[str, ...]:
    """The names of the cells of its rows."""
    return tuple(_read(paper, table)[0][keys:])


def _read(paper: str, table: str) -> list[list[str]]:
    text = (files(paper) / "printed" / f"{table}.csv").read_text(encoding="utf-8")
    return list(csv.reader(text.splitlines()))
