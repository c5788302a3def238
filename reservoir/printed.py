"""What the paper prints, as it prints it: mean ± standard deviation over its runs. The numbers are in printed/*.csv."""

import csv
from importlib.resources import files


def printed(table: str, keys: int = 2) -> dict[tuple[str, ...], tuple[str, ...]]:
    """The cells of a table, "table1" to "table7", by the first `keys` columns of their rows."""
    text = (files("reservoir") / "printed" / f"{table}.csv").read_text(encoding="utf-8")
    _, *rows = csv.reader(text.splitlines())
    return {tuple(row[:keys]): tuple(row[keys:]) for row in rows}
