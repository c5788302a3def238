"""Figures of groups of runs: means and seeds of curves, and scores by depth."""

import numpy as np
import pytest

from common.errors import UserError
from common.metrics.aucc import aucc, mean_outline
from common.report.convergence import Convergence
from common.report.figures import curves_figure, layers_figure
from common.report.groups import groups
from tests.report.helpers import made


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_mean_line_has_the_mean_area():
    seeds = [made(v, seconds=s).curve for v, s in (([3.0, 9.0], 1.0), ([5.0, 4.0, 8.0], 1.5))]
    for horizon in (1.2, 2.5, 7.0):
        xs, ys = zip(*mean_outline(seeds, "seconds", horizon), strict=True)
        areas = [aucc(curve, "seconds", horizon) for curve in seeds]
        assert np.trapezoid(ys, xs) == pytest.approx(np.mean(areas))
    assert mean_outline(seeds, "seconds")[-1] == (4.5, 8.5)


def test_seeds_are_thin_lines_around_their_mean():
    compared = groups(
        [made([10.0], seed=1), made([20.0], seed=2), made([5.0, 6.0], reservoir="ffn")]
    )
    figure = curves_figure(Convergence(compared, horizon="shortest"))
    drawn = figure.axes[0].lines
    mean, *thin = [line for line in drawn if line.get_linestyle() != "None"][:3]
    assert mean.get_xydata().tolist() == [[0, 0], [1, 15]]
    # Lines show the best values so far, markers the measured values.
    dots = [line.get_xydata().tolist() for line in drawn if line.get_markersize() == 3]
    assert [[1, 10]] in dots and [[1, 20]] in dots
    assert [line.get_xydata()[-1].tolist() for line in thin] == [[1, 10], [1, 20]]
    assert all(line.get_linewidth() < mean.get_linewidth() for line in thin)
    assert legend(figure) == [
        "transformer, 6 layers: best 15, AUCC 7.50 ± 3.54 BLEU·s",
        "FFN, 2 of 6: best 5, AUCC 2.5 BLEU·s",
    ]


@pytest.fixture
def depths():
    tests = {("none", 6): (30.0, 31.0), ("none", 8): (33.0,), ("ffn", 8): (32.0, 34.0)}
    return groups(
        [
            made([10.0 * seed], seed=seed, reservoir=reservoir, layers=layers, test=test)
            for (reservoir, layers), scores in reversed(tests.items())
            for seed, test in enumerate(scores, start=1)
        ]
    )


@pytest.mark.parametrize(("x", "places"), [("updatable", [6.0]), ("total", [8.0])])
def test_layers_figure(depths, x, places):
    figure = layers_figure(Convergence(depths), x)
    areas, scores = figure.axes
    assert legend(figure) == ["FFN, 2 frozen", "transformer"]
    ffn, plain = scores.containers
    assert ffn[0].get_xdata().tolist() == places and ffn[0].get_ydata().tolist() == [33.0]
    assert plain[0].get_xydata().tolist() == [[6, 30.5], [8, 33.0]]  # Sorted by depth.
    bars = [bar.tolist() for bar in plain[2][0].get_segments()]
    assert bars[0] == pytest.approx(np.array([[6, 30.5 - 0.5**0.5], [6, 30.5 + 0.5**0.5]]))
    assert areas.containers[0][0].get_ydata().tolist() == [0.75]  # mean of AUCC 5 / 10 and 10 / 10
    assert scores.get_ylabel() == "test BLEU"


def test_layers_figure_errors(depths):
    with pytest.raises(UserError, match="updatable or total"):
        layers_figure(Convergence(depths), "all")
    with pytest.raises(UserError, match="digits has no number of layers"):
        layers_figure(Convergence(groups([made([1.0], "digits", layers=None)])))
