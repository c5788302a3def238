"""What the paper prints, as it prints it: mean ± standard deviation over its runs. The numbers are in printed/*.csv."""

from common.report import printed as report


def printed(table: str, keys: int = 2) -> dict[tuple[str, ...], tuple[str, ...]]:
    """The cells of a table, "table1" to "table7", by the first `keys` columns of their rows."""
    return report.printed("reservoir", table, keys)
