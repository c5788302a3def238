"""Figures 1, 3 to 5, 7 to 10, 12 and 13: AUCC and test scores against depth, and convergence curves."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from common.report.convergence import Convergence
from common.report.figures import curves_figure, layers_figure
from common.report.groups import Group
from common.storage.addresses import shown
from reservoir.experiments import ExperimentSuite
from reservoir.targets import Case

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def _depth(
    suite: ExperimentSuite, name: str, x: str = "updatable"
) -> Mapping[str, Mapping[Case, Group]]:
    """Writes a figure and a table for each setting. Returns {setting: {case: runs of the case}}."""
    settings = suite.groups(name)
    for setting, groups in settings.items():
        convergence = Convergence(list(groups.values()), "hours", suite.horizon(setting))
        _save(suite, f"{name}_{setting}", layers_figure(convergence, x), convergence)
    return settings


def _save_curves(suite: ExperimentSuite, name: str, setting: str, groups: Sequence[Group]) -> None:
    convergence = Convergence(groups, "hours", suite.horizon(setting))
    _save(suite, f"{name}_{setting}", curves_figure(convergence), convergence)


def _save(suite: ExperimentSuite, name: str, figure: "Figure", convergence: Convergence) -> None:
    suite.write(name, *convergence.aucc_table())
    figure.savefig(suite.out / f"{name}.png")
    print(f"figure: {shown(suite.out / name)}.png")


# AUCC and test score against the number of trained layers (of a translator: encoder layers), for the plain model and T
# and FFN reservoirs (Figures 1 and 4), for all kinds of reservoirs (Figure 3), and for the placements of appendix C
# (Figure 5).
fig1, fig3, fig4, fig5 = (partial(_depth, name=f"fig{number}") for number in (1, 3, 4, 5))

# AUCC and test score against the number of all layers, trained and frozen, of the encoder (IWSLT in Figure 8, WMT in
# Figure 9) or of the language model (enwik8 in Figure 10).
fig8, fig9, fig10 = (partial(_depth, name=f"fig{number}", x="total") for number in (8, 9, 10))


def fig7(suite: ExperimentSuite) -> None:
    """Plots AUCC and test score of masked language models against the number of trained layers.

    Also plots the validation curves of the deepest models.
    """
    for setting, groups in _depth(suite, "fig7").items():
        deepest = max(case.layers for case in groups)
        deep = [group for case, group in groups.items() if case.layers == deepest]
        _save_curves(suite, "fig7_curves", setting, deep)


def _curves(suite: ExperimentSuite, name: str) -> None:
    for setting, groups in suite.groups(name).items():
        _save_curves(suite, name, setting, list(groups.values()))


# The best validation score so far against training time, for all settings except iwslt_deep (Figure 12), and for
# backskipping on IWSLT (Figure 13). The area under such a curve is the AUCC.
fig12, fig13 = (partial(_curves, name=name) for name in ("fig12", "fig13"))
