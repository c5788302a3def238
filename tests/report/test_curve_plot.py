"""Figures of curves: lines, points, legends and units."""

import subprocess
import sys

import numpy as np
import pytest

from common.errors import UserError
from common.metrics.curve import Curve, Point
from common.report.curve_plot import curve_figure, plot_curve


def curve(values, seconds=3600.0, name="BLEU", mode="max"):
    points = [Point(10 * i, seconds * i, 1e15 * i, v) for i, v in enumerate(values, start=1)]
    return Curve(name, mode, points)


def figure_of(curves, **options):
    return curve_figure({name: [curve] for name, curve in curves.items()}, **options)


def legend(figure):
    """Returns the entries of the legend, which is within the axes for one curve, and below the axes for several."""
    (shown,) = [*figure.legends, *filter(None, [figure.axes[0].get_legend()])]
    return [text.get_text() for text in shown.get_texts()]


def test_plot_curve_writes_a_coloured_png(tmp_path):
    from matplotlib.image import imread

    path = tmp_path / "curve.png"
    plot_curve({"run": curve([10.0, 30.0])}, path)
    image = imread(path)
    assert image.shape[0] > 400 and image.shape[1] > 800
    flat = image[..., :3].reshape(-1, 3)
    tinted = (flat[:, 2] - flat[:, 0]) > 0.1  # shaded blue
    assert 0.2 < tinted.mean() < 0.8


def test_plot_has_line_dots_ring_and_area():
    figure = figure_of({"run": curve([10.0, 30.0, 20.0])}, horizon=4 * 3600.0)
    (axes,) = figure.axes
    line, dots, ring = axes.lines
    assert line.get_xydata().tolist() == [[0, 0], [1, 10], [2, 30], [3, 30], [4, 30]]
    assert dots.get_xydata().tolist() == [[1, 10], [2, 30], [3, 20]]
    assert ring.get_xydata().tolist() == [[2, 30]]
    (area,) = axes.collections
    corners = area.get_paths()[0].vertices
    assert corners.min(axis=0).tolist() == [0, 0] and corners.max(axis=0).tolist() == [4, 30]
    assert legend(figure) == ["run: AUCC 85 BLEU·h"]
    assert axes.get_xlim() == (0, 4) and axes.get_ylim()[0] == 0


def test_points_after_the_horizon_are_not_marked():
    figure = figure_of({"run": curve([10.0, 20.0, 30.0])}, horizon=2.5 * 3600)
    line, dots, ring = figure.axes[0].lines
    assert line.get_xydata()[-1].tolist() == [2.5, 25]
    assert dots.get_xydata()[-1].tolist() == ring.get_xydata()[0].tolist() == [2, 20]


def test_several_models_share_the_longest_horizon():
    figure = figure_of({"a": curve([10.0]), "b": curve([5.0, 10.0])})
    assert legend(figure) == ["a: best 10, AUCC 15 BLEU·h", "b: best 10, AUCC 10 BLEU·h"]
    colours = {line.get_color() for line in figure.axes[0].lines if len(line.get_xdata()) > 1}
    assert len(colours) >= 2
    assert len(figure.axes[0].collections) == 2


@pytest.mark.parametrize(
    ("axis", "seconds", "label", "end"),
    [
        ("seconds", 1.0, "training time (s)", 2.0),
        ("seconds", 60.0, "training time (min)", 2.0),
        ("seconds", 3600.0, "training time (h)", 2.0),
        ("hours", 1800.0, "training time (h)", 1.0),
        ("step", 1.0, "training steps", 20.0),
        ("flops", 1.0, "training compute (PFLOP)", 2.0),
    ],
)
def test_units(axis, seconds, label, end):
    figure = figure_of({"run": curve([1.0, 2.0], seconds)}, axis=axis)
    axes = figure.axes[0]
    assert axes.get_xlabel() == label
    assert axes.get_xlim()[1] == pytest.approx(end)
    assert axes.get_ylabel() == "validation BLEU"


def test_min_metric_legend_is_at_the_top():
    falling = curve([3.0, 1.2, 1.1], 1.0, "bits per character", "min")
    figure = figure_of({"run": falling})
    axes = figure.axes[0]
    assert legend(figure) == ["run: AUCC 6.25 (bits per character)·s"]
    assert 0 < axes.get_ylim()[0] < 1.1
    assert np.allclose(axes.lines[2].get_xydata(), [[3, 1.1]])


def test_invalid_arguments_raise_user_errors(tmp_path):
    with pytest.raises(UserError, match="no curves"):
        plot_curve({}, tmp_path / "x.png")
    assert not (tmp_path / "x.png").exists()
    with pytest.raises(UserError, match="no curves to plot: give at least one curve for each name"):
        curve_figure({"run": [curve([1.0])], "other": []})
    with pytest.raises(UserError, match="no validation points"):
        figure_of({"run": curve([])})
    with pytest.raises(UserError, match="run has no validation points up to the horizon 1 "):
        figure_of({"run": curve([1.0, 2.0], seconds=2.0)}, horizon=1.0)
    with pytest.raises(UserError, match="different metrics"):
        figure_of({"a": curve([1.0]), "b": curve([1.0], name="F1")})
    with pytest.raises(UserError, match="horizon"):
        figure_of({"a": curve([1.0])}, horizon=0.0)


@pytest.mark.medium
def test_no_global_state_and_no_heavy_imports():
    script = (
        "import sys\n"
        "import common.report.curve_plot, common.report.table, common.track.tracker\n"
        "import common.track.progress, common.metrics.translations\n"
        "import common.report.figures, common.report.runs, common.report.convergence\n"
        "heavy = {'matplotlib', 'wandb', 'sacrebleu', 'tqdm', 'jax'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "from common.metrics.curve import Curve, Point\n"
        "curve = Curve('BLEU', 'max', [Point(1, 1.0, 1.0, 1.0)])\n"
        "common.report.curve_plot.plot_curve({'a': curve}, sys.argv[1])\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script, "/dev/null"], check=True)
