"""Printed values of the paper's Table 1 (F1 in percent) and Table 2 (parameters), from printed/*.csv."""

from common.report import printed as report

R_SQUARED = 0.342
"""R² in the caption of Figure 1."""


def table1() -> dict[tuple[str, str], dict[str, float]]:
    """Returns {(backbone, "lora" or "full"): {column: F1 in percent}}, without the column of means."""
    _, _, *names, _ = report.columns("perception", "table1")
    return {
        key: dict(zip(names, map(float, cells), strict=False))
        for key, cells in report.printed("perception", "table1").items()
    }


def table2() -> dict[str, tuple[str, ...]]:
    """Returns {backbone: printed numbers of parameters, such as "312.49M"}.

    The first number includes an output layer. The other numbers are for LoRA with rank 2, 4, 8 and 16. A number that is
    illegible in our copy of the paper is "".
    """
    return {name: cells for (name,), cells in report.printed("perception", "table2", 1).items()}
