"""The paper's tables and figures: the runs that each of them needs, and the printed numbers."""

import itertools
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from common import experiments, variables
from common.config import check, flatten
from common.errors import UserError
from common.experiments import Experiment, Ran, Side, evaluations
from common.report.table import mean_std
from common.train.state import initial_params
from common.train.task import ModelState, Task
from configs import explicit
from explicit_opt import figures, run
from explicit_opt.digits import Digits
from explicit_opt.language import STARTS, NextToken
from explicit_opt.solution import (
    average_norm,
    cooccurrences,
    from_cooccurrences,
    separate_intercept,
)

CONTEXTS = (1, 2, 4)
TRAINED = ("cold", "zero", "warm", "scaled")
"""Starts of trained runs: "warm" starts from the explicit solution, "scaled" from its fitted multiple."""
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
"""Table 1: K -> training and development perplexity of the cold, explicit (-p) and warm start."""

PRINTED_DIGITS = {
    (1, "explicit, no training"): 82.86,
    (1, "warm"): 92.57,
    (1, "cold"): 91.68,
    (2, "warm"): 92.93,
    (2, "cold"): 75.64,
}
"""Section 4: (layers, start) -> test accuracy in %."""

Points = list[tuple[float, float, float]]
"""(epoch, training value, development value). Values before training have epoch 0.5, as in Figure 1."""


@dataclass(frozen=True)
class ExperimentSuite(experiments.ExperimentSuite):
    """The paper's configurations at one scale.

    Attributes beyond those of the base class:
      protocol: "ours" stops early on held-out data and reports the best checkpoint. "printed" reports the last value:
        after all epochs for language models (Table 1), after the first epoch that raises the test loss for digits
        (section 4).
      data: corpus -> its directory, if not data/CORPUS.
    """

    protocol: str = "ours"
    data: dict[str, Path] = field(default_factory=dict)

    def named(self, name: str) -> str:
        """Returns the name of a run or file, with the protocol as suffix unless it is "ours"."""
        return name if self.protocol == "ours" else f"{name}_{self.protocol}"

    def prepare(self, config: ConfigDict) -> tuple[ConfigDict, Task]:
        return run.prepare(config, self.mesh)

    def configuration(self, config: ConfigDict, **values: object) -> ConfigDict:
        """Returns `config` at this scale with the overrides of the command line, then those of the experiment."""
        if self.scale == "tiny":
            config = (explicit.tiny_text if "aggregate" in config.model else explicit.tiny_digits)(
                config
            )
        elif self.scale == "laptop" and "aggregate" in config.model:
            # Adagrad moves a weight by about 0.02 sqrt(steps), so a cold start needs many steps rather than many
            # tokens. The cost of a step is proportional to the size of the table.
            config.data.vocab_size, config.data.tokens, config.train.batch = 1026, 200_000, 128
        return self.override(config, **{"eval.start": True, **values})

    def language(
        self, aggregate: str, context: int, start: str, seed: int = 1, **values: object
    ) -> ConfigDict:
        """Returns the configuration of a language model; `values` maps dotted field names to overrides."""
        values |= {"model.context": context, "start": start, "seed": seed, **self._source("babylm")}
        if self.protocol == "printed":
            values["eval.patience"] = 0
        return self.configuration(explicit.babylm(aggregate), **values)

    def digits(self, layers: int, start: str, seed: int, **values: object) -> ConfigDict:
        """Returns the configuration of a digit classifier; `values` maps dotted field names to overrides."""
        values |= {"model.layers": layers, "start": start, "seed": seed, **self._source("mnist")}
        if self.protocol == "printed":
            values["data.held_out"] = 0
        return self.configuration(explicit.mnist(), **values)

    def _source(self, corpus: str) -> dict[str, str]:
        directory = self.data.get(corpus)
        return {"data.source": f"files:{directory}"} if directory else {}

    def language_case(self, aggregate: str, context: int, start: str) -> tuple[str, Experiment]:
        """Returns the name and the configurations of a language model.

        With K = 1, sum and concatenation are the same model, which is run once, as in the paper.
        """
        aggregate = "sum" if context == 1 else aggregate
        name = self.named(f"{aggregate}_k{context}_{start}")
        return name, partial(self.language, aggregate, context, start)

    def digits_case(self, layers: int, start: str) -> tuple[str, Experiment]:
        """Returns the name and the configurations of a digit classifier."""
        return self.named(f"digits_{layers}_{start}"), partial(self.digits, layers, start)

    def side(self, text: str) -> Side:
        """Parses "sum K: START", "cat K: START" or "digits LAYERS: START", such as "cat 2: warm".

        Ignores command-line overrides of fields that only the other corpus has.

        Raises:
          UserError: `text` names no experiment.
        """
        model, _, start = text.partition(": ")
        family, _, number = model.partition(" ")
        check(
            family in ("sum", "cat", "digits")
            and number.isdecimal()
            and int(number) > 0
            and start in STARTS
            and (family, start, number == "1") != ("digits", "zero", False),
            f"unknown experiment {text!r}: use 'sum K: START', 'cat K: START' or 'digits LAYERS: START' with one of the"
            f" starts {', '.join(STARTS)} (zero: one layer only), such as 'cat 2: warm'",
        )
        corpus = "mnist" if family == "digits" else "babylm"
        suite = replace(self, fields=_fields_of(corpus, self.fields))
        case = (
            suite.digits_case(int(number), start)
            if family == "digits"
            else suite.language_case(family, int(number), start)
        )
        kind, _, directory = case[1](1).data.source.partition(":")
        missing = kind == "files" and not Path(os.path.expanduser(directory)).is_dir()
        return Side(*case, f"--data={corpus}=DIR" if missing else "")


FAMILIES: dict[str, Callable[[], ConfigDict]] = {
    "babylm": lambda: explicit.babylm("sum"),
    "mnist": explicit.mnist,
}
"""Corpus -> a function that returns a configuration of its models."""


def _fields_of(corpus: str, fields: Iterable[str]) -> list[str]:
    """Drops the overrides "--config.a.b=VALUE" of fields that only the other corpus has.

    Keeps overrides of unknown fields, which are rejected later.

    Raises:
      UserError: an override sets data.source, which would apply to both corpora.
    """
    known = {name: flatten(make()) for name, make in FAMILIES.items()}
    others = set().union(*known.values()) - set(known[corpus])
    names = {text: text.removeprefix("--config.").partition("=")[0] for text in fields}
    if "data.source" in names.values():
        raise UserError(
            "--config.data.source applies to texts and digits alike: use"
            f" {' and '.join(f'--data={name}=DIR' for name in FAMILIES)}"
        )
    return [text for text, name in names.items() if name not in others]


def language_runs(
    suite: ExperimentSuite, aggregates: Iterable[str] = PRINTED
) -> dict[tuple[str, int, str], list[tuple[Points, float]]]:
    """Returns (input, K, start) -> for each seed, the curve and the test perplexity of the best checkpoint."""
    cells = itertools.product(aggregates, CONTEXTS, TRAINED)
    cases = {cell: suite.language_case(*cell) for cell in cells}
    found = suite.runs(dict(cases.values()))
    return {
        cell: [_language_result(ran) for ran in found[name]] for cell, (name, _) in cases.items()
    }


def _language_result(ran: Ran) -> tuple[Points, float]:
    points = [
        (number or 0.5, m["valid/train_perplexity"], m["valid/perplexity"])
        for number, m in enumerate(evaluations(ran.workdir, "valid/perplexity"))
    ]
    return points, ran.summary["test"]["perplexity"]


COLUMNS = {
    "c": ("cold", False),
    "p": ("warm", True),
    "w": ("warm", False),
    "z": ("zero", False),
    "sp": ("scaled", True),
    "sw": ("scaled", False),
}
"""Columns of Table 1 -> (start, whether the value is the one before training). The paper has the first three."""


def table1(suite: ExperimentSuite) -> None:
    """Writes training (T) and development (D) perplexities beside the printed ones.

    Protocol "ours" takes the epoch with the best development perplexity, which makes D optimistic; X is the test
    perplexity of that checkpoint. Protocol "printed" takes the last epoch.
    """
    ours, every, rows = suite.protocol == "ours", language_runs(suite), []
    for aggregate, printed in PRINTED.items():
        for context in CONTEXTS:
            found = {start: every[aggregate, context, start] for start in TRAINED}
            columns = []
            for start, untrained in COLUMNS.values():
                curves = [points for points, _ in found[start]]
                if untrained or not ours:
                    chosen = [points[0 if untrained else -1] for points in curves]
                else:
                    chosen = [min(points, key=lambda point: point[2]) for points in curves]
                columns += [mean_std([point[i] for point in chosen]) for i in (1, 2)]
            tests = [mean_std([x for _, x in found[start]]) for start in TRAINED] if ours else []
            rows.append((aggregate, context, "measured", *columns, *tests))
            empty = len(columns) + len(tests) - len(printed[context])
            cells = (*(f"{x:.1f}" for x in printed[context]), *(None,) * empty)
            rows.append((aggregate, context, "printed", *cells))
    names = [f"{split}-{name}" for name in COLUMNS for split in "TD"]
    names += [f"X-{name}" for name in ("c", "z", "w", "sw")] if ours else []
    suite.write(suite.named("table1"), ("input", "K", "", *names), rows)


def fig1(suite: ExperimentSuite) -> None:
    """Draws token counts against mean co-occurrences (left, K = 1) and the training perplexity of Cat (right)."""
    frequency, mean = scaling(NextToken(suite.language("sum", 1, "explicit"), suite.mesh))
    slope, _ = np.polyfit(np.log(frequency), np.log(mean), 1)
    rows = list(zip(frequency.tolist(), mean.tolist(), strict=True))
    suite.write_csv("fig1_scaling", ("f", "mean co-occurrence"), rows)
    curves = _curves(suite, "cat")["cat"]
    _write_curves(suite, "fig1_curves", curves)
    path = suite.out / f"{suite.named('fig1')}.png"
    training = {name: [(e, t) for e, t, _ in p] for name, p in curves.items()}
    figures.scaling_and_curves(frequency, mean, slope, training, path)
    print(f"slope of log mean co-occurrence over log count: {slope:.3f}\nfigure: {path}")


def scaling(task: NextToken) -> tuple[np.ndarray, np.ndarray]:
    """Returns the count of each token that occurs and the mean of its co-occurrences (section 2.2, K = 1)."""
    counts, noise = np.asarray(task.counts()[0], np.float64), task.noise
    found = np.asarray(noise.keep_V)[:, None] * counts + np.outer(
        noise.uniform_V, np.asarray(noise.spill_V) @ counts
    )
    # For K = 1 the geometric mean is the co-occurrence itself; eq. (13) averages over the tokens of the text.
    mean = counts.sum(1) @ found / counts.sum()
    seen = counts.sum(0) > 0
    return counts.sum(0)[seen], mean[seen]


def fig3(suite: ExperimentSuite) -> None:
    """Draws the development perplexity of Cat, and the training and development perplexity of Sum."""
    cat, sums = _curves(suite, "cat", "sum").values()
    _write_curves(suite, "fig3_cat", cat)
    _write_curves(suite, "fig3_sum", sums)
    panels = {
        "Cat, development": {name: [(e, d) for e, _, d in p] for name, p in cat.items()},
        "Sum, training": {name: [(e, t) for e, t, _ in p] for name, p in sums.items()},
        "Sum, development": {name: [(e, d) for e, _, d in p] for name, p in sums.items()},
    }
    path = suite.out / f"{suite.named('fig3')}.png"
    figures.perplexities(panels, path)
    print(f"figure: {path}")


def fig2(suite: ExperimentSuite) -> None:
    """Writes and draws digit accuracy by epoch for each start and one or two layers, and the scan of K."""
    # With a zero start all outputs of a hidden layer would stay equal (see digits.validate).
    trained = [(n, s) for n in (1, 2) for s in TRAINED if (n, s) != (2, "zero")]
    cases = {case: suite.digits_case(*case) for case in trained}
    found = suite.runs(dict(cases.values()))
    results = {
        case: [digits_result(suite, r) for r in found[name]] for case, (name, _) in cases.items()
    }
    curves, rows, every = {}, [], []
    for layers in (1, 2):
        for start in ("explicit", "scaled"):
            tested = untrained(suite.digits(layers, start, 1), suite)
            rows.append(_digits_row(layers, f"{start}, no training", [tested], [0]))
        for start in [s for n, s in trained if n == layers]:
            seeds = results[layers, start]
            for seed, (_, points) in enumerate(seeds, 1):
                every += [(layers, start, seed, *point) for point in points]
            curve = [(epoch, accuracy) for epoch, accuracy, _ in seeds[0][1]]
            curves[f"{layers} layer{'s' * (layers > 1)}, {start}"] = curve
            epochs = [len(points) - 1 for _, points in seeds]
            rows.append(_digits_row(layers, start, [tested for tested, _ in seeds], epochs))
    columns = ("layers", "start", "test accuracy %", "test cross-entropy", "epochs")
    suite.write(suite.named("fig2"), (*columns, "printed (MNIST) %"), rows)
    scan, norm = priming_scan(Digits(suite.digits(1, "explicit", 1), suite.mesh))
    names = ("layers", "start", "seed", "epoch", "accuracy %", "loss")
    suite.write_csv(suite.named("fig2_curves"), names, every)
    scanned = ("K", "weights form %", "separate intercept %")
    suite.write_csv(suite.named("fig2_scan"), scanned, scan)
    path = suite.out / f"{suite.named('fig2')}.png"
    figures.digits(curves, scan, norm, path, "held-out" if suite.protocol == "ours" else "test")
    for column, name in ((1, "weights"), (2, "intercept")):
        highest = max(row[column] for row in scan)
        tied = [row[0] for row in scan if row[column] == highest]
        best = f"{tied[0]:g}" if len(tied) == 1 else f"{tied[0]:g} to {tied[-1]:g}, {len(tied)} tie"
        print(f"best K of the {name} form: {best} ({highest:.2f} %)")
    print(f"average norm: {norm:.2f}\nfigure: {path}")


def digits_result(suite: ExperimentSuite, ran: Ran) -> tuple[dict[str, float], Points]:
    """Returns the test metrics of a run and its validation curve of (epoch, accuracy in %, loss).

    With the protocol "printed" the validation data are the test data, and the metrics are the last ones.
    """
    points = [
        (number or 0.5, m["valid/accuracy"], m["valid/loss"])
        for number, m in enumerate(evaluations(ran.workdir, "valid/accuracy"))
    ]
    if suite.protocol == "ours":
        return ran.summary["test"], points
    _, accuracy, loss = points[-1]
    return {"accuracy": accuracy, "loss": loss}, points


def untrained(config: ConfigDict, suite: ExperimentSuite) -> dict[str, float]:
    """Returns the test metrics before the first training step."""
    task = Digits(config, suite.mesh)
    abstract_model = variables.abstract(lambda: task.build(variables.ParamKeys(0)))
    started = task.start(initial_params(task, abstract_model, config.seed, suite.mesh))
    return task.evaluate(ModelState(abstract_model, started, {}, suite.mesh), "test")


def _digits_row(layers: int, start: str, tested: list[dict], epochs: list[int]) -> tuple:
    accuracy = mean_std([t["accuracy"] for t in tested], 2)
    loss = mean_std([t["loss"] for t in tested], 3)
    return layers, start, accuracy, loss, mean_std(epochs, 0), PRINTED_DIGITS.get((layers, start))


def priming_scan(task: Digits) -> tuple[list[tuple[float, float, float]], float]:
    """Scans every integer K from 1 to the number of pixels (section 3.2).

    Returns:
      (K, test accuracy of eq. (3) in %, test accuracy of the separate intercept in %) for each K, and the average norm
      of the features.
    """
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


def _curves(suite: ExperimentSuite, *aggregates: str) -> dict[str, dict[str, Points]]:
    """Returns input -> curves of its models, for seed 1."""
    found = language_runs(replace(suite, seeds=1), aggregates)
    return {
        aggregate: {
            f"K = {context}, {start}": found[aggregate, context, start][0][0]
            for context in CONTEXTS
            for start in TRAINED
        }
        for aggregate in aggregates
    }


def _write_curves(suite: ExperimentSuite, name: str, curves: dict[str, Points]) -> None:
    rows = [(run, *point) for run, points in curves.items() for point in points]
    suite.write_csv(suite.named(name), ("run", "epoch", "training", "development"), rows)
