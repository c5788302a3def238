"""Figures of one or several panels in the style of this project."""

from typing import Any

import numpy as np

# Colours of Okabe and Ito (2008), which colour-blind readers can distinguish.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def panels(count: int, width: float = 5.2, height: float = 4.2) -> tuple[Any, np.ndarray]:
    """Returns a matplotlib figure and an array of its `count` axes side by side, each `width` x `height` inches.

    Does not use pyplot, which would keep the figure in memory and choose a backend.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * count, height), dpi=150, layout="constrained")
    axes = np.atleast_1d(figure.subplots(1, count))
    for panel in axes:
        panel.grid(color="#e6e6e6", linewidth=0.7)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    return figure, axes
