"""What the paper prints, as it prints it: Table 1 (F1 in percent) and Table 2 (parameters). Numbers: printed/*.csv."""

from common.report import printed as report

R_SQUARED = 0.342
"""Of Figure 1, by its caption."""


def table1() -> dict[tuple[str, str], dict[str, float]]:
    """(backbone, "lora" or "full") -> {column: F1}, the mean left out."""
    *names, _ = report.columns("perception", "table1")
    return {
        key: dict(zip(names, map(float, cells), strict=False))
        for key, cells in report.printed("perception", "table1").items()
    }


def table2() -> dict[str, tuple[str, ...]]:
    """Backbone -> its parameters with an output layer, then those of LoRA of rank 2, 4, 8, 16 ("" where unknown)."""
    return {name: cells for (name,), cells in report.printed("perception", "table2", 1).items()}
