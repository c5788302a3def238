"""Draws validation curves in bits per byte, as Figure 4 of the paper draws losses."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from common.report.panels import COLOURS, panels


def validation(
    curves: Mapping[str, Mapping[str, Sequence[Sequence[tuple[int, float]]]]], path: Path
) -> None:
    """Draws one panel per corpus. A ring marks the best value of each curve.

    Args:
      curves: corpus -> model -> list of curves, one per seed; a curve is a list of (step, bits per byte).
      path: the PNG file to write.
    """
    figure, axes = panels(len(curves))
    for part, (corpus, models) in zip(axes, curves.items(), strict=True):
        for colour, (name, seeds) in zip(COLOURS, models.items(), strict=False):
            for number, points in enumerate(seeds):
                label = name if number == 0 else None
                part.plot(*zip(*points, strict=True), marker=".", color=colour, label=label)
                best = min(points, key=lambda point: point[1])
                part.plot(*best, marker="o", markersize=9, markerfacecolor="none", color=colour)
        part.set(xlabel="training steps", ylabel="validation bits per byte", title=corpus)
        part.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
