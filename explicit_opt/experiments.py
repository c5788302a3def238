"""The experiments of the paper: which runs each table and figure needs, and the printed numbers beside them."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from common import laboratory
from common.laboratory import evaluations
from common.report.table import spread
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
    (1, "explicit"): 82.86,
    (1, "warm"): 92.57,
    (1, "cold"): 91.68,
    (2, "explicit"): None,
    (2, "warm"): 92.93,
    (2, "cold"): 75.64,
}
"""Section 4: test accuracy in % of layers and starts."""

Points = list[tuple[float, float, float]]
"""(epoch, training value, development value); the values before training stand at epoch 0.5, as in Figure 1."""


class Laboratory(laboratory.Laboratory):
    """The paper's configurations, tiny, laptop or paper."""

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

    def language(self, aggregate: str, context: int, start: str, seed: int = 1) -> ConfigDict:
        values = {"model.context": context, "start": start, "seed": seed}
        return self.configuration(explicit.babylm(aggregate), **values)

    def digits(self, layers: int, start: str, seed: int) -> ConfigDict:
        values = {"model.layers": layers, "start": start, "seed": seed}
        return self.configuration(explicit.mnist(), **values)


def language_curve(lab: Laboratory, aggregate: str, context: int, start: str, seed: int) -> Points:
    """One run of the grid. With K = 1 sum and concatenation are one model, run once, as in the paper."""
    aggregate = "sum" if context == 1 else aggregate
    config = lab.language(aggregate, context, start, seed)
    _, workdir = lab.fit(f"{aggregate}_k{context}_{start}_seed{seed}", config)
    logged = evaluations(workdir, "valid/perplexity")
    return [
        (number or 0.5, m["valid/train_perplexity"], m["valid/perplexity"])
        for number, m in enumerate(logged)
    ]


def grid(lab: Laboratory) -> dict[tuple[str, int, str, int], Points]:
    """Every run of Table 1; a warm one is an explicit one before its first step, and its seed orders the batches."""
    keys = [
        (aggregate, context, start, seed)
        for context in CONTEXTS
        for aggregate in PRINTED
        for start in ("cold", "warm")
        for seed in range(1, 1 + lab.seeds)
    ]
    return {key: language_curve(lab, *key) for key in keys}


def table1(lab: Laboratory) -> None:
    """Perplexities at the epoch that is best on the development text, beside the printed ones."""
    curves = grid(lab)
    rows = []
    for aggregate, printed in PRINTED.items():
        for context in CONTEXTS:
            columns = []
            for start, at in (("cold", None), ("warm", 0), ("warm", None)):
                points = [curves[aggregate, context, start, s] for s in range(1, 1 + lab.seeds)]
                chosen = [p[at] if at is not None else min(p, key=lambda q: q[2]) for p in points]
                columns += [spread([c[i] for c in chosen]) for i in (1, 2)]
            rows.append((aggregate, context, "measured", *columns))
            rows.append((aggregate, context, "printed", *(f"{x:.1f}" for x in printed[context])))
    names = ("T-c", "D-c", "T-p", "D-p", "T-w", "D-w")
    lab.write("table1", ("input", "K", "", *names), rows)


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
    figures.scaling_and_curves(
        frequency, mean, slope, {name: [(e, t) for e, t, _ in p] for name, p in curves.items()},
        lab.out / "fig1.png",
    )  # fmt: skip
    print(
        f"slope of log mean co-occurrence over log count: {slope:.3f}\nfigure: {lab.out / 'fig1.png'}"
    )


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
    figures.perplexities(panels, lab.out / "fig3.png")
    print(f"figure: {lab.out / 'fig3.png'}")


def fig2(lab: Laboratory) -> None:
    """Digits: accuracy by epoch of one and two layers, warm and cold; and of the explicit solution over K."""
    curves, rows, every = {}, [], []
    for layers in (1, 2):
        accuracies: dict[str, list[float]] = {"explicit": [], "warm": [], "cold": []}
        epochs: dict[str, list[int]] = {"warm": [], "cold": []}
        for start in ("warm", "cold"):
            for seed in range(1, 1 + lab.seeds):
                config = lab.digits(layers, start, seed)
                name = f"digits_{layers}_{start}_seed{seed}"
                summary, workdir = lab.fit(name, config)
                logged = evaluations(workdir, "valid/accuracy")
                points = [(n or 0.5, m["valid/accuracy"]) for n, m in enumerate(logged)]
                losses = [m["valid/loss"] for m in logged]
                run_of = (layers, start, seed)
                every += [(*run_of, *p, loss) for p, loss in zip(points, losses, strict=True)]
                curves.setdefault(f"{layers} layer{'s' * (layers > 1)}, {start}", points)
                accuracies[start].append(summary["test"]["accuracy"])
                epochs[start].append(len(points) - 1)
                if start == "warm":
                    accuracies["explicit"].append(points[0][1])
        for start, values in accuracies.items():
            printed = PRINTED_DIGITS[layers, start]
            trained = spread(epochs[start], 0) if start in epochs else "0"
            rows.append((layers, start, spread(values), trained, printed))
    columns = ("layers", "start", "test accuracy %", "epochs", "printed (MNIST) %")
    lab.write("fig2", columns, rows)
    scan, norm = priming_scan(Digits(lab.digits(1, "explicit", 1), lab.mesh))
    names = ("layers", "start", "seed", "epoch", "accuracy %", "loss")
    lab.write_csv("fig2_curves", names, every)
    lab.write_csv("fig2_scan", ("K", "weights form %", "separate intercept %"), scan)
    figures.digits(curves, scan, norm, lab.out / "fig2.png")
    best = {name: max(scan, key=lambda r: r[i]) for i, name in ((1, "weights"), (2, "intercept"))}
    for name, row in best.items():
        print(f"best K of the {name} form: {row[0]:g}")
    print(f"average norm: {norm:.2f}\nfigure: {lab.out / 'fig2.png'}")


def priming_scan(task: Digits) -> tuple[list[tuple[float, float, float]], float]:
    """(K, accuracy of the weights form, of the separate intercept) in %, and the average norm of the features."""
    features, labels = jnp.asarray(task.features("test")), task.splits["test"][1]
    train = task.features("train")
    found = cooccurrences(train, task.splits["train"][1], task.outputs)

    def accuracy(weights, bias=0.0) -> float:
        return 100 * float(np.mean(np.argmax(features @ weights + bias, axis=1) == labels))

    largest = features.shape[1]
    primings = sorted({*range(1, 21), *np.geomspace(20, largest, 60).round().astype(int).tolist()})
    rows = [
        (
            float(k),
            accuracy(from_cooccurrences(found, k)),
            accuracy(*separate_intercept(found, k)),
        )
        for k in primings
    ]
    return rows, average_norm(train)


def _of_aggregate(lab: Laboratory, aggregate: str) -> dict[str, Points]:
    return {
        f"K = {context}, {start}": language_curve(lab, aggregate, context, start, 1)
        for context in CONTEXTS
        for start in ("cold", "warm")
    }


def _write_curves(lab: Laboratory, name: str, curves: dict[str, Points]) -> None:
    rows = [(run, *point) for run, points in curves.items() for point in points]
    lab.write_csv(name, ("run", "epoch", "training", "development"), rows)
