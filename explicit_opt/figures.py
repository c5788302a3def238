"""Draws Figures 1, 2 and 3 from measured values."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from common.report.panels import COLOURS, panels

Curves = Mapping[str, Sequence[tuple[float, float]]]
"""Label -> points (epoch, value). A label ends with `config.start` of the run, such as "K = 2, warm"."""

STYLES = {"cold": "--", "zero": ":", "warm": "-", "scaled": "-."}


def scaling_and_curves(
    frequency: np.ndarray, mean: np.ndarray, slope: float, curves: Curves, path: Path
) -> None:
    """Draws Figure 1: mean co-occurrence against token count, and training perplexity of the model Cat by epoch.

    The left panel also has a line of slope 1, because the paper's theorem assumes this slope.
    """
    figure, (left, right) = panels(2)
    left.plot(frequency, mean, ".", markersize=3, alpha=0.4, color=COLOURS[0])
    ends = np.array([frequency.min(), frequency.max()])
    middle = np.exp(np.mean(np.log(mean)) - np.mean(np.log(frequency)))
    left.plot(ends, middle * ends, color="#333333", linewidth=1, label="slope 1")
    left.set(xscale="log", yscale="log", xlabel="count f of the token")
    left.set(ylabel="mean co-occurrence", title=f"K = 1, fitted slope {slope:.2f}")
    left.legend(frameon=False)
    _draw(right, curves, "perplexity", "Cat, training")
    figure.savefig(path)


def perplexities(curves: Mapping[str, Curves], path: Path) -> None:
    """Draws Figure 3: one panel of perplexities for each entry of `curves`."""
    figure, axes = panels(len(curves))
    for part, (title, shown) in zip(axes, curves.items(), strict=True):
        _draw(part, shown, "perplexity", title)
    figure.savefig(path)


def digits(
    curves: Curves, scan: Sequence[tuple[float, float, float]], norm: float, path: Path, split: str
) -> None:
    """Draws Figure 2: accuracy on `split` by epoch, and the explicit solution's test accuracy by priming number K."""
    figure, (left, right) = panels(2)
    _draw(left, curves, f"{split} accuracy (%)", "trained", log_y=False)
    primings, weights, intercept = zip(*scan, strict=True)
    right.plot(primings, weights, color=COLOURS[0], label="weights, eq. (3)")
    right.plot(primings, intercept, color=COLOURS[1], label="separate intercept")
    right.axvline(norm, color="#333333", linewidth=1, linestyle=":", label=f"norm {norm:.1f}")
    right.set(xscale="log", xlabel="priming number K", ylabel="test accuracy (%)")
    right.set(title="explicit solution, one layer")
    _plain(right.xaxis)
    right.legend(frameon=False)
    figure.savefig(path)


def _draw(part, curves: Curves, value: str, title: str, log_y: bool = True) -> None:
    """Plots curves: a line style per `config.start`, a colour per model. Epoch 0.5 has the value before training."""
    groups = list(dict.fromkeys(name.split(",")[0] for name in curves))
    for name, points in curves.items():
        colour = COLOURS[groups.index(name.split(",")[0]) % len(COLOURS)]
        style = STYLES[name.split(", ")[-1]]
        part.plot(*zip(*points, strict=True), style, marker=".", color=colour, label=name)
    part.set(xscale="log", yscale="log" if log_y else "linear", xlabel="epoch")
    part.set(ylabel=value, title=title)
    _plain(part.xaxis)
    part.legend(frameon=False, fontsize=8)


def _plain(axis) -> None:
    """Labels a log axis with 1, 2, 5, 10, 20 instead of powers of ten."""
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(ScalarFormatter())
    axis.set_minor_formatter(NullFormatter())
