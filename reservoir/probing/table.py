"""Tables of probing results as in Table 4 (a row per layer, a column per task), and of selected hyperparameters."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from common.report.table import mean_std, publish, write_csv
from reservoir.probing.classifier import GRIDS, Probe, probe
from reservoir.probing.data import TASKS, ProbingTask

CHOICES = ("task", "layer", "kind", "seed", "hidden", "dropout", "l2", "validation", "test")


class Table:
    """Trains the probing classifiers of each task, and collects their accuracies in percent.

    Args:
      layers: kind of each of the P layers: "embeddings", then "trained" or "reservoir".
      seeds: number of training runs of each classifier.
      grid: a key of `GRIDS`.
    """

    def __init__(self, layers: list[str], seeds: int, grid: str):
        self._layers, self._seeds, self._grid = layers, seeds, grid
        self._majority: dict[str, float] = {}
        self._probes: dict[str, list[list[Probe]]] = {}

    def add(self, task: ProbingTask, features: Mapping[str, np.ndarray]) -> None:
        """Trains the classifiers of a task with the seeds 1, 2, ..., and adds their accuracies.

        A cell of the table has the mean and the standard deviation over all seeds and calls. Call this method once for
        each run to average over runs.

        Args:
          features: split -> sentence vectors of every layer, (P, E, D).
        """
        grid = GRIDS[self._grid]
        if task.name == "word_content":  # no hidden layer, as in SentEval
            grid = replace(grid, hidden=(0,), dropout=(0.0,))
        self._majority[task.name] = 100 * task.majority()
        self._probes.setdefault(task.name, []).extend(
            probe(features, task.classes, len(task.labels), grid=grid, seed=seed)
            for seed in range(1, self._seeds + 1)
        )

    def rows(self) -> list[tuple]:
        """Returns rows (layer, kind, test accuracy of each task in percent), the first row for the majority class."""
        rows = [(None, "majority class", *(f"{value:.2f}" for value in self._majority.values()))]
        for layer, kind in enumerate(self._layers):
            tests = (
                [100 * probes[layer].test for probes in runs] for runs in self._probes.values()
            )
            rows.append((layer, kind, *(mean_std(values, digits=2) for values in tests)))
        return rows

    def choices(self) -> list[tuple]:
        """Returns a row per task, layer and seed: the selected hyperparameters and accuracies (columns `CHOICES`)."""
        return [
            (name, layer, kind, seed, p.hidden, p.dropout, p.penalty, 100 * p.valid, 100 * p.test)
            for name, runs in self._probes.items()
            for layer, kind in enumerate(self._layers)
            for seed, p in enumerate((probes[layer] for probes in runs), start=1)
        ]

    def write(self, folder: Path) -> None:
        """Prints the table and writes probing.csv, probing.md and choices.csv."""
        write_csv(folder / "choices.csv", CHOICES, self.choices())
        columns = ("layer", "kind", *(TASKS[name] for name in self._probes))
        publish(folder / "probing", columns, self.rows())
