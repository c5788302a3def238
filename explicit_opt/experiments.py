"""The experiments of the paper: which runs each table and figure needs, and the printed numbers beside them."""

from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from common import laboratory, variables
from common.laboratory import evaluations
from common.report.table import spread
from common.train.state import initial_values
from common.train.task import Values
from configs import explicit
from explicit_opt import figures, run
from explicit_opt.digits import Digits
from explicit_opt.language import NextToken
from explicit_opt.solution import (
    average_norm,
    cooccurrences,
    from_cooccurrences,
    separate_intercept,
)

CONTEXTS = (1, 2, 4)
TRAINED = ("cold", "zero", "warm", "scaled")
"""Starts of runs. Before its first step a warm one is the explicit solution, a scaled one its fitted multiple."""
PRINTED = {
    "sum": {
        1: (51.4, 56.4, 85.4, 91.8, 40.1, 45.7),
        2: (47.6, 56.3, 104.0, 121.5, 41.0, 51.3),
        4: (60.7, 75.0, 144.0, 176.9, 53.8, 72.2),
    },
    "cat": {
        1: (51.4, 56.4, 85.4, 91.8, 40.1, 45.7),
        2: (30.0, 35.6, 52.0, 61.8, 25.8, 33.0),
        4: (24.6, 31.6, 40.3, 55.4, 20.7, 31.2),
    },
}
"""Table 1: training and development perplexity of cold, explicit (-p) and warm."""

PRINTED_DIGITS = {
    (1, "explicit, no training"): 82.86,
    (1, "warm"): 92.57,
    (1, "cold"): 91.68,
    (2, "warm"): 92.93,
    (2, "cold"): 75.64,
}
"""Section 4: test accuracy in % of layers and starts."""

Points = list[tuple[float, float, float]]
"""(epoch, training value, development value); the values before training stand at epoch 0.5, as in Figure 1."""


@dataclass(frozen=True)
class Laboratory(laboratory.Laboratory):
    """The paper's configurations, tiny, laptop or paper.

    Attributes beyond those of every laboratory:
      protocol: "ours" stops early, by data that are held out for it, and reports the best checkpoint. "printed" reports
        the last values: of language models after all epochs (Table 1), of digits after the first epoch that raises the
        test loss (section 4).
    """

    protocol: str = "ours"

    def named(self, name: str) -> str:
        """The name of a run or of a file, told apart by the protocol."""
        return name if self.protocol == "ours" else f"{name}_{self.protocol}"

    def train(self, config: ConfigDict, workdir: Path) -> dict:
        return run.fit(config, workdir, self.mesh)

    def configuration(self, config: ConfigDict, **values: object) -> ConfigDict:
        """Of this scale, with the fields of the command line and of the experiment, which win."""
        if self.scale == "tiny":
            config = (explicit.tiny_text if "aggregate" in config.model else explicit.tiny_digits)(
                config
            )
        elif self.scale == "laptop" and "aggregate" in config.model:
            # Adagrad moves a weight by about 0.02 sqrt(steps): a cold start needs many steps more than many tokens,
            # and a step costs as much as its table.
            config.data.vocab_size, config.data.tokens, config.train.batch = 1026, 200_000, 128
        return self.override(config, **{"eval.start": True, **values})

    def language(
        self, aggregate: str, context: int, start: str, seed: int = 1, **values: object
    ) -> ConfigDict:
        """The fields of `values`, by their dotted names, belong to the experiment."""
        values |= {"model.context": context, "start": start, "seed": seed}
        if self.protocol == "printed":
            values["eval.patience"] = 0
        return self.configuration(explicit.babylm(aggregate), **values)

    def digits(self, layers: int, start: str, seed: int, **values: object) -> ConfigDict:
        """As `language`."""
        values |= {"model.layers": layers, "start": start, "seed": seed}
        if self.protocol == "printed":
            values["data.held_out"] = 0
        return self.configuration(explicit.mnist(), **values)


def language_run(
    lab: Laboratory, aggregate: str, context: int, start: str, seed: int
) -> tuple[Points, float]:
    """The curve of one run of the grid, and the test perplexity of its best checkpoint.

    With K = 1 sum and concatenation are one model, run once, as in the paper.
    """
    aggregate = "sum" if context == 1 else aggregate
    config = lab.language(aggregate, context, start, seed)
    name = lab.named(f"{aggregate}_k{context}_{start}_seed{seed}")
    summary, workdir = lab.fit(name, config)
    points = [
        (number or 0.5, m["valid/train_perplexity"], m["valid/perplexity"])
        for number, m in enumerate(evaluations(workdir, "valid/perplexity"))
    ]
    return points, summary["test"]["perplexity"]


COLUMNS = {
    "c": ("cold", False),
    "p": ("warm", True),
    "w": ("warm", False),
    "z": ("zero", False),
    "sp": ("scaled", True),
    "sw": ("scaled", False),
}
"""Columns of Table 1 as start and whether the values before training are meant; the paper has the first three."""


def table1(lab: Laboratory) -> None:
    """Training (T) and development (D) perplexities beside the printed ones.

    By our protocol at the epoch that is best on the development text, which makes D optimistic: X is the test
    perplexity of these checkpoints. By the printed protocol after the last epoch.
    """
    ours, seeds, rows = lab.protocol == "ours", range(1, 1 + lab.seeds), []
    for aggregate, printed in PRINTED.items():
        for context in CONTEXTS:
            found = {
                start: [language_run(lab, aggregate, context, start, seed) for seed in seeds]
                for start in TRAINED
            }
            columns = []
            for start, untrained in COLUMNS.values():
                curves = [points for points, _ in found[start]]
                if untrained or not ours:
                    chosen = [points[0 if untrained else -1] for points in curves]
                else:
                    chosen = [min(points, key=lambda point: point[2]) for points in curves]
                columns += [spread([point[i] for point in chosen]) for i in (1, 2)]
            tests = [spread([x for _, x in found[start]]) for start in TRAINED] if ours else []
            rows.append((aggregate, context, "measured", *columns, *tests))
            empty = len(columns) + len(tests) - len(printed[context])
            cells = (*(f"{x:.1f}" for x in printed[context]), *(None,) * empty)
            rows.append((aggregate, context, "printed", *cells))
    names = [f"{split}-{name}" for name in COLUMNS for split in "TD"]
    names += [f"X-{name}" for name in ("c", "z", "w", "sw")] if ours else []
    lab.write(lab.named("table1"), ("input", "K", "", *names), rows)


def fig1(lab: Laboratory) -> None:
    """Left: token counts against the mean of their co-occurrences, K = 1. Right: training perplexity of Cat."""
    task = NextToken(lab.language("sum", 1, "explicit"), lab.mesh)
    counts, noise = np.asarray(task.counts()[0], np.float64), task.noise
    found = np.asarray(noise.keep_N)[:, None] * counts + np.outer(
        noise.uniform_N, np.asarray(noise.spill_N) @ counts
    )
    # With one feature the geometric mean is the co-occurrence itself; the mean is over the M tokens (eq. 13).
    mean = counts.sum(1) @ found / counts.sum()
    seen = counts.sum(0) > 0
    frequency, mean = counts.sum(0)[seen], mean[seen]
    slope, _ = np.polyfit(np.log(frequency), np.log(mean), 1)
    rows = list(zip(frequency.tolist(), mean.tolist(), strict=True))
    lab.write_csv("fig1_scaling", ("f", "mean co-occurrence"), rows)
    curves = _of_aggregate(lab, "cat")
    _write_curves(lab, "fig1_curves", curves)
    path = lab.out / f"{lab.named('fig1')}.png"
    training = {name: [(e, t) for e, t, _ in p] for name, p in curves.items()}
    figures.scaling_and_curves(frequency, mean, slope, training, path)
    print(f"slope of log mean co-occurrence over log count: {slope:.3f}\nfigure: {path}")


def fig3(lab: Laboratory) -> None:
    """Development perplexity of Cat, training and development perplexity of Sum."""
    cat, sums = _of_aggregate(lab, "cat"), _of_aggregate(lab, "sum")
    _write_curves(lab, "fig3_cat", cat)
    _write_curves(lab, "fig3_sum", sums)
    panels = {
        "Cat, development": {name: [(e, d) for e, _, d in p] for name, p in cat.items()},
        "Sum, training": {name: [(e, t) for e, t, _ in p] for name, p in sums.items()},
        "Sum, development": {name: [(e, d) for e, _, d in p] for name, p in sums.items()},
    }
    path = lab.out / f"{lab.named('fig3')}.png"
    figures.perplexities(panels, path)
    print(f"figure: {path}")


def fig2(lab: Laboratory) -> None:
    """Digits: accuracy by epoch of one and two layers from each start; and of the explicit solution over K."""
    curves, rows, every = {}, [], []
    for layers in (1, 2):
        for start in ("explicit", "scaled"):
            found = untrained(lab.digits(layers, start, 1), lab)
            rows.append(_digits_row(layers, f"{start}, no training", [found], [0]))
        # Two layers of zeros would never differ (see digits.validate).
        for start in TRAINED if layers == 1 else [s for s in TRAINED if s != "zero"]:
            tested, epochs = [], []
            for seed in range(1, 1 + lab.seeds):
                name = lab.named(f"digits_{layers}_{start}_seed{seed}")
                found, points = digits_run(lab, name, lab.digits(layers, start, seed))
                every += [(layers, start, seed, *point) for point in points]
                curve = [(epoch, accuracy) for epoch, accuracy, _ in points]
                curves.setdefault(f"{layers} layer{'s' * (layers > 1)}, {start}", curve)
                tested.append(found)
                epochs.append(len(points) - 1)
            rows.append(_digits_row(layers, start, tested, epochs))
    columns = ("layers", "start", "test accuracy %", "test cross-entropy", "epochs")
    lab.write(lab.named("fig2"), (*columns, "printed (MNIST) %"), rows)
    scan, norm = priming_scan(Digits(lab.digits(1, "explicit", 1), lab.mesh))
    names = ("layers", "start", "seed", "epoch", "accuracy %", "loss")
    lab.write_csv(lab.named("fig2_curves"), names, every)
    scanned = ("K", "weights form %", "separate intercept %")
    lab.write_csv(lab.named("fig2_scan"), scanned, scan)
    path = lab.out / f"{lab.named('fig2')}.png"
    figures.digits(curves, scan, norm, path, "held-out" if lab.protocol == "ours" else "test")
    for column, name in ((1, "weights"), (2, "intercept")):
        highest = max(row[column] for row in scan)
        tied = [row[0] for row in scan if row[column] == highest]
        best = f"{tied[0]:g}" if len(tied) == 1 else f"{tied[0]:g} to {tied[-1]:g}, {len(tied)} tie"
        print(f"best K of the {name} form: {best} ({highest:.2f} %)")
    print(f"average norm: {norm:.2f}\nfigure: {path}")


def digits_run(lab: Laboratory, name: str, config: ConfigDict) -> tuple[dict[str, float], Points]:
    """Test metrics of a run by the protocol, and its curve (epoch, accuracy in %, loss) on the data that stop it."""
    summary, workdir = lab.fit(name, config)
    points = [
        (number or 0.5, m["valid/accuracy"], m["valid/loss"])
        for number, m in enumerate(evaluations(workdir, "valid/accuracy"))
    ]
    if lab.protocol == "ours":
        return summary["test"], points
    _, accuracy, loss = points[-1]  # nothing is held out: these are the test images
    return {"accuracy": accuracy, "loss": loss}, points


def untrained(config: ConfigDict, lab: Laboratory) -> dict[str, float]:
    """Test metrics of a start before any step."""
    task = Digits(config, lab.mesh)
    structure = variables.abstract(lambda: task.build(variables.Keys(0)))
    started = task.start(initial_values(task, structure, config.seed, lab.mesh))
    return task.evaluate(Values(structure, started, {}, lab.mesh), "test")


def _digits_row(layers: int, start: str, tested: list[dict], epochs: list[int]) -> tuple:
    accuracy = spread([t["accuracy"] for t in tested], 2)
    loss = spread([t["loss"] for t in tested], 3)
    return layers, start, accuracy, loss, spread(epochs, 0), PRINTED_DIGITS.get((layers, start))


def priming_scan(task: Digits) -> tuple[list[tuple[float, float, float]], float]:
    """(K, test accuracy of the weights form, of the separate intercept) in % for every integer K from 1 to the number
    of pixels (section 3.2), and the average norm of the features."""
    features, labels = jnp.asarray(task.features("test")), task.splits["test"][1]
    train = task.features("train")
    found = cooccurrences(train, task.splits["train"][1], task.outputs)

    def accuracy(weights, bias=0.0) -> float:
        return 100 * float(np.mean(np.argmax(features @ weights + bias, axis=1) == labels))

    rows = [
        (
            float(k),
            accuracy(from_cooccurrences(found, k)),
            accuracy(*separate_intercept(found, k)),
        )
        for k in range(1, 1 + features.shape[1])
    ]
    return rows, average_norm(train)


def _of_aggregate(lab: Laboratory, aggregate: str) -> dict[str, Points]:
    return {
        f"K = {context}, {start}": language_run(lab, aggregate, context, start, 1)[0]
        for context in CONTEXTS
        for start in TRAINED
    }


def _write_curves(lab: Laboratory, name: str, curves: dict[str, Points]) -> None:
    rows = [(run, *point) for run, points in curves.items() for point in points]
    lab.write_csv(lab.named(name), ("run", "epoch", "training", "development"), rows)
