"""Figures 1, 3 to 5, 7 to 10, 12 and 13: AUCC and test scores against depth, and convergence curves."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from common.report.comparison import aucc_table
from common.report.figures import curves_figure, layers_figure
from common.report.groups import Group
from common.storage.addresses import shown
from reservoir.experiments import ExperimentSuite
from reservoir.targets import Case

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def fig1(suite: ExperimentSuite) -> None:
    """Plots validation AUCC and test score against the number of trained layers."""
    _depth(suite, "fig1")


def fig3(suite: ExperimentSuite) -> None:
    """Plots AUCC and test BLEU of all kinds of reservoirs against the number of trained layers."""
    _depth(suite, "fig3")


def fig4(suite: ExperimentSuite) -> None:
    """Plots AUCC and test BLEU on IWSLT, with 6 decoder layers, against the number of trained encoder layers."""
    _depth(suite, "fig4")


def fig5(suite: ExperimentSuite) -> None:
    """Plots AUCC and test BLEU of the placements of appendix C against the number of trained layers."""
    _depth(suite, "fig5")


def fig7(suite: ExperimentSuite) -> None:
    """Plots AUCC and test score of masked language models against the number of trained layers.

    Also plots the validation curves of the deepest models.
    """
    for setting, groups in _depth(suite, "fig7").items():
        deepest = max(case.layers for case in groups)
        _curves(
            suite, "fig7_curves", setting, [g for c, g in groups.items() if c.layers == deepest]
        )


def fig8(suite: ExperimentSuite) -> None:
    """Plots AUCC and test BLEU on IWSLT against the number of encoder layers, trained and frozen."""
    _depth(suite, "fig8", "total")


def fig9(suite: ExperimentSuite) -> None:
    """Plots AUCC and test BLEU on WMT against the number of encoder layers, trained and frozen."""
    _depth(suite, "fig9", "total")


def fig10(suite: ExperimentSuite) -> None:
    """Plots AUCC and test score on enwik8 against the total number of layers (trained plus frozen)."""
    _depth(suite, "fig10", "total")


def fig12(suite: ExperimentSuite) -> None:
    """Plots the best validation score so far against training time. The area under such a curve is the AUCC."""
    for setting, groups in suite.groups("fig12").items():
        _curves(suite, "fig12", setting, list(groups.values()))


def fig13(suite: ExperimentSuite) -> None:
    """Plots validation curves with backskipping, and of three comparisons.

    The comparisons are backpropagation through the reservoirs, the identity gradient, and a model without reservoirs.
    """
    for setting, groups in suite.groups("fig13").items():
        _curves(suite, "fig13", setting, list(groups.values()))


def _depth(
    suite: ExperimentSuite, name: str, x: str = "updatable"
) -> Mapping[str, Mapping[Case, Group]]:
    """Writes a figure and a table for each setting. Returns {setting: {case: runs of the case}}."""
    settings = suite.groups(name)
    for setting, groups in settings.items():
        rows = list(groups.values())
        figure = layers_figure(rows, x, "hours", suite.horizon(setting))
        _save(suite, f"{name}_{setting}", setting, figure, rows)
    return settings


def _curves(suite: ExperimentSuite, name: str, setting: str, groups: Sequence[Group]) -> None:
    figure = curves_figure(groups, "hours", suite.horizon(setting))
    _save(suite, f"{name}_{setting}", setting, figure, groups)


def _save(
    suite: ExperimentSuite, name: str, setting: str, figure: "Figure", groups: Sequence[Group]
) -> None:
    suite.write(name, *aucc_table(groups, "hours", suite.horizon(setting)))
    figure.savefig(suite.out / f"{name}.png")
    print(f"figure: {shown(suite.out / name)}.png")
