"""Draws Figure 1: F1 of LoRA minus F1 of full training, against the number of tokens of a data set."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from common.report.panels import COLOURS, panels
from common.storage.addresses import shown
from perception import printed, richness
from perception.experiments import EMBEDDED, ExperimentSuite, f1
from perception.richness import SIZES, Line, fit, gaps, means, points, without_artefacts

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def fig1(suite: ExperimentSuite) -> None:
    """Draws Figure 1 from the paper's Table 1 and from finished runs of `table1`. Writes the numbers as tables."""
    paper = gaps(printed.table1())
    found = {
        "printed": means(paper),
        "printed, without artefacts": means(without_artefacts(paper)),
        "measured": means(gaps(_measured(suite))),
    }
    found = {name: gap for name, gap in found.items() if gap}
    rows = [
        (name, column, *_size(column), gap)
        for name, some in found.items()
        for column, gap in some.items()
    ]
    lines = {name: fit(points(some)) for name, some in found.items() if len(some) > 2}
    columns = ("from", "data set", "examples", "mean tokens", "", "tokens", "LoRA - full (F1)")
    suite.write("fig1", columns, rows)
    fits = [(name, len(found[name]), *_line(line)) for name, line in lines.items()]
    fits.append(("the paper's caption", 12, None, None, f"{printed.R_SQUARED:.3f}"))
    suite.write("fig1_fit", ("from", "data sets", "at 1M tokens", "per factor of 10", "R²"), fits)
    figure, axes = panels(len(found))
    for part, (name, some) in zip(axes, found.items(), strict=True):
        _draw(part, name, some, lines.get(name))
    figure.savefig(suite.out / "fig1.png")
    print(f"figure: {shown(suite.out / 'fig1.png')}")
    if "measured" not in found:
        print(
            "--out has no data set of Table 1 with finished runs of both LoRA and full training: run the target table1"
            " with --scale=laptop or --scale=paper first"
        )


def _measured(suite: ExperimentSuite) -> dict[tuple[str, str], dict[str, float]]:
    """Returns the mean test F1 of finished runs at the best step, by (backbone, mode) and column of Table 1."""
    table: dict[tuple[str, str], dict[str, float]] = {}
    for case in suite.cases():
        if case.dataset != EMBEDDED and (runs := suite.kept(suite.stem(case))):
            row = table.setdefault((case.backbone, case.mode), {})
            row[case.column] = float(np.mean(f1([ran.summary for ran in runs])))
    return table


def _size(column: str) -> tuple:
    size = SIZES[column]
    return size.examples, size.mean, "measured" if size.measured else "estimate", round(size.tokens)


def _line(line: Line) -> tuple:
    tenfold = line.slope * float(np.log(10))
    return f"{line.gap(1e6):.2f}", f"{tenfold:.2f}", f"{line.r_squared:.3f}"


def _draw(part: "Axes", name: str, some: Mapping[str, float], line: Line | None) -> None:
    tokens, values = zip(*richness.points(some), strict=True)
    for measured, face in ((True, COLOURS[0]), (False, "white")):
        of = [i for i, column in enumerate(some) if SIZES[column].measured == measured]
        label = "tokens measured" if measured else "tokens estimated"
        x, y = ([series[i] for i in of] for series in (tokens, values))
        part.plot(x, y, "o", color=COLOURS[0], markerfacecolor=face, label=label)
    for column, x, y in zip(some, tokens, values, strict=True):
        part.annotate(column, (x, y), textcoords="offset points", xytext=(5, 4), fontsize=7)
    if line:
        ends = np.array([min(tokens), max(tokens)])
        label = f"R² = {line.r_squared:.3f}"
        part.plot(ends, [line.gap(x) for x in ends], color=COLOURS[1], label=label)
    part.axhline(0, color="#333333", linewidth=0.8)
    part.set(xscale="log", xlabel="tokens of the training examples", title=name)
    part.set(ylabel="F1 of LoRA - F1 of full training")
    part.legend(frameon=False, fontsize=8)
