"""Figures 1, 3 to 5, 7 to 10, 12 and 13: areas under convergence curves, test scores against depth, curves."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from common.report.comparison import aucc_table
from common.report.figures import curves_figure, layers_figure
from common.report.groups import Group
from reservoir.experiments import Case, Laboratory

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def fig1(lab: Laboratory) -> None:
    """Validation AUCC and test score against trained layers."""
    _depth(lab, "fig1")


def fig3(lab: Laboratory) -> None:
    """Other kinds of reservoir."""
    _depth(lab, "fig3")


def fig4(lab: Laboratory) -> None:
    """IWSLT with 6 decoder layers."""
    _depth(lab, "fig4")


def fig5(lab: Laboratory) -> None:
    """Where reservoirs stand."""
    _depth(lab, "fig5")


def fig7(lab: Laboratory) -> None:
    """Masked language models: areas against depth, and the curves of the deepest."""
    for setting, groups in _depth(lab, "fig7").items():
        deepest = max(case.layers for case in groups)
        _curves(lab, "fig7_curves", setting, [g for c, g in groups.items() if c.layers == deepest])


def fig8(lab: Laboratory) -> None:
    """Figure 1 for IWSLT, against all layers."""
    _depth(lab, "fig8", "total")


def fig9(lab: Laboratory) -> None:
    """The same for WMT."""
    _depth(lab, "fig9", "total")


def fig10(lab: Laboratory) -> None:
    """The same for enwik8."""
    _depth(lab, "fig10", "total")


def fig12(lab: Laboratory) -> None:
    """The validation curves that the areas are of."""
    for setting, groups in lab.groups("fig12").items():
        _curves(lab, "fig12", setting, list(groups.values()))


def fig13(lab: Laboratory) -> None:
    """Backskipping beside training through the reservoirs."""
    for setting, groups in lab.groups("fig13").items():
        _curves(lab, "fig13", setting, list(groups.values()))


def _depth(lab: Laboratory, name: str, x: str = "updatable") -> Mapping[str, Mapping[Case, Group]]:
    """A figure and a table for each setting, whose groups it returns."""
    found = lab.groups(name)
    for setting, groups in found.items():
        rows = list(groups.values())
        figure = layers_figure(rows, x, "hours", lab.horizon(setting))
        _save(lab, f"{name}_{setting}", setting, figure, rows)
    return found


def _curves(lab: Laboratory, name: str, setting: str, groups: Sequence[Group]) -> None:
    figure = curves_figure(groups, "hours", lab.horizon(setting))
    _save(lab, f"{name}_{setting}", setting, figure, groups)


def _save(
    lab: Laboratory, name: str, setting: str, figure: "Figure", groups: Sequence[Group]
) -> None:
    lab.write(name, *aucc_table(groups, "hours", lab.horizon(setting)))
    figure.savefig(lab.out / f"{name}.png")
    print(f"figure: {lab.out / name}.png")
