"""The experiments behind the paper's tables and figures, and the numbers that the paper prints."""

import itertools
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from common import experiments
from common.config import flatten
from common.errors import check
from common.experiments import Experiment, Side, evaluations
from common.report.printed import printed
from common.report.runs import Run
from common.report.table import mean_std
from common.storage.addresses import shown
from common.storage.folders import open_folder
from common.train.state import initial_params
from configs import explicit
from explicit_opt import figures
from explicit_opt.baselines import kept_baselines
from explicit_opt.digits import Digits
from explicit_opt.language import NextToken
from explicit_opt.solution import cooccurrences, from_cooccurrences, separate_intercept
from explicit_opt.start import STARTS

CONTEXTS = (1, 2, 4)
TRAINED = ("cold", "zero", "warm", "scaled")
"""Values of `config.start` with which a run takes training steps; `explicit_opt.start.STARTS` documents them."""
INPUTS = ("sum", "cat")
PRINTED = {
    (aggregate, int(context)): tuple(map(float, cells))
    for (aggregate, context), cells in printed("explicit_opt", "table1").items()
}
"""Table 1: (input, one of INPUTS; number of context tokens) -> six perplexities: training and development perplexity of
the cold start after training, of the explicit solution without training, and of the warm start after training."""

PRINTED_DIGITS = {
    (1, "explicit, no training"): 82.86,
    (1, "warm"): 92.57,
    (1, "cold"): 91.68,
    (2, "warm"): 92.93,
    (2, "cold"): 75.64,
}
"""Section 4: (layers, start) -> test accuracy in %. The start is `config.start` or "explicit, no training"."""

Points = list[tuple[float, float, float]]
"""A curve of (epoch, metric, metric), such as (epoch, training perplexity, development perplexity). The point before
training has epoch 0.5, as in Figure 1, because a log axis has no 0."""


@dataclass(frozen=True)
class ExperimentSuite(experiments.ExperimentSuite):
    """The paper's experiments at one scale, with the options of `explicit_opt.reproduce`.

    Attributes:
      protocol: "ours" stops early on held-out data and reports the best checkpoint. "printed" follows the paper and
        reports the last epoch: language models train for all epochs (Table 1), digit classifiers until the first epoch
        that does not lower the test loss (section 4).
      data: corpus ("babylm" or "mnist") -> its directory. The default is data/CORPUS, or at the scale "tiny" small data
        that need no download.
    """

    protocol: str = "ours"
    data: dict[str, Path] = field(default_factory=dict)

    def named(self, name: str) -> str:
        """Appends the protocol to the name of a run or file, except for the protocol "ours"."""
        return name if self.protocol == "ours" else f"{name}_{self.protocol}"

    def language(
        self, aggregate: str, context: int, start: str, seed: int = 1, **values: object
    ) -> ConfigDict:
        """Returns the configuration of a language model; `values` maps dotted field names to overrides."""
        config = explicit.babylm(aggregate)
        if self.scale == "tiny":
            config = explicit.tiny_text(config)
        elif self.scale == "laptop":
            # Adagrad moves a weight by about 2 x learning rate x sqrt(steps), so training from random weights (a cold
            # start) needs many steps: use small batches. The vocabulary is small because the cost of a step is
            # proportional to the number of weights.
            config.data.vocab_size, config.data.tokens, config.train.batch = 1026, 200_000, 128
        if self.protocol == "printed":
            values["eval.patience"] = 0
        values |= {"model.context": context, "start": start, "seed": seed}
        return self._override(config, "babylm", values)

    def digits(self, layers: int, start: str, seed: int, **values: object) -> ConfigDict:
        """Returns the configuration of a digit classifier; `values` maps dotted field names to overrides."""
        config = explicit.mnist()
        if self.scale == "tiny":
            config = explicit.tiny_digits(config)
        if self.protocol == "printed":
            values["data.held_out"] = 0
        values |= {"model.layers": layers, "start": start, "seed": seed}
        return self._override(config, "mnist", values)

    def _override(self, config: ConfigDict, corpus: str, values: dict[str, object]) -> ConfigDict:
        """Applies the overrides of the command line, and then the suite's fields, to `config`; returns `config`.

        The suite's fields are `values`, `eval.start` and, if `data` has a directory for `corpus`, `data.source`. Raises
        a UserError if the command line overrides one of the suite's fields, or an override is invalid.
        """
        if directory := self.data.get(corpus):
            values["data.source"] = f"files:{shown(directory)}"
        values = {"eval.start": True, **values}
        self.check_not_overridden(values, "the target or another option sets such fields")
        return self.override(config, **values)

    def language_case(self, aggregate: str, context: int, start: str) -> tuple[str, Experiment]:
        """Returns the name of a language model's runs, and a function from the seed to the configuration.

        With contexts of one token (the paper's K = 1), sum and concatenation are the same model and share their runs,
        as in the paper.
        """
        aggregate = "sum" if context == 1 else aggregate
        name = self.named(f"{aggregate}_k{context}_{start}")
        return name, partial(self.language, aggregate, context, start)

    def digits_case(self, layers: int, start: str) -> tuple[str, Experiment]:
        """Returns the name of a digit classifier's runs, and a function from the seed to the configuration."""
        return self.named(f"digits_{layers}_{start}"), partial(self.digits, layers, start)

    def side(self, text: str) -> Side:
        """Returns the side "sum K: START", "cat K: START" or "digits LAYERS: START" of a claim, such as "cat 2: warm".

        K is the number of context tokens. A language model ignores command-line overrides of fields that only digit
        classifiers have, and vice versa.

        Raises a UserError if `text` names no experiment, or an override is invalid.
        """
        known = rf"(sum|cat|digits) ([1-9]\d*): ({'|'.join(STARTS)})"
        found = re.fullmatch(known, text)
        check(
            found is not None and re.fullmatch(r"digits (?!1:).* zero", text) is None,
            f"explicit_opt/claims.csv has the unknown experiment {text!r}: use 'sum K: START', 'cat K: START' or"
            f" 'digits LAYERS: START', such as 'cat 2: warm'; K and LAYERS are at least 1, START is one of"
            f" {', '.join(STARTS)}, and digits with the start zero have 1 layer",
        )
        family, number, start = found.groups()
        corpus = "mnist" if family == "digits" else "babylm"
        suite = replace(self, fields=_fields_of(corpus, self.fields))
        case = (
            suite.digits_case(int(number), start)
            if family == "digits"
            else suite.language_case(family, int(number), start)
        )
        kind, _, directory = case[1](1).data.source.partition(":")
        missing = kind == "files" and not open_folder(os.path.expanduser(directory)).is_dir()
        return Side(*case, f"--data={corpus}=DIR" if missing else "")


def _fields_of(corpus: str, fields: Iterable[str]) -> list[str]:
    """Drops overrides "--config.a.b=VALUE" of fields that only models of the other corpus have.

    Keeps overrides of fields that no model has, so that applying them raises a UserError. Raises a UserError for an
    override of data.source, because both corpora have this field.
    """
    babylm, mnist = (set(flatten(config)) for config in (explicit.babylm("sum"), explicit.mnist()))
    others = babylm - mnist if corpus == "mnist" else mnist - babylm
    names = {text: text.removeprefix("--config.").partition("=")[0] for text in fields}
    check(
        "data.source" not in names.values(),
        "--config.data.source would apply to both corpora: use --data=babylm=DIR and --data=mnist=DIR instead",
    )
    return [text for text, name in names.items() if name not in others]


def language_runs(
    suite: ExperimentSuite, aggregates: Iterable[str] = INPUTS
) -> dict[tuple[str, int, str], list[tuple[Points, float]]]:
    """Trains missing runs. Returns {(input, context tokens, `config.start`): runs, one per seed}.

    A run is (`Points` of training and development perplexity, test perplexity at the best step).
    """
    cells = itertools.product(aggregates, CONTEXTS, TRAINED)
    cases = {cell: suite.language_case(*cell) for cell in cells}
    runs = suite.runs(dict(cases.values()))
    metrics = ("train_perplexity", "perplexity")
    return {
        cell: [(_points(ran, *metrics), ran.summary["test"]["perplexity"]) for ran in runs[name]]
        for cell, (name, _) in cases.items()
    }


def _points(ran: Run, *metrics: str) -> Points:
    """Returns two metrics of the validation split at each evaluation of a run. Evaluation n counts as epoch n."""
    found = evaluations(ran.folder, f"valid/{metrics[0]}")
    return [(epoch or 0.5, *(m[f"valid/{n}"] for n in metrics)) for epoch, m in enumerate(found)]


COLUMNS = {
    "c": ("cold", False),
    "p": ("warm", True),
    "w": ("warm", False),
    "z": ("zero", False),
    "sp": ("scaled", True),
    "sw": ("scaled", False),
}
"""Suffix of columns of Table 1 -> (`config.start`, whether the columns have perplexities before training). The paper
has the columns of the first three suffixes."""


def table1(suite: ExperimentSuite) -> None:
    """Writes training (T), development (D) and test (X) perplexities, and the paper's T and D.

    For trained models, the protocol "ours" takes the epoch with the lowest D, so D is biased downwards. X is the test
    perplexity at this epoch. The protocol "printed" takes the last epoch and has no X.
    """
    ours, every, rows = suite.protocol == "ours", language_runs(suite), []
    for aggregate in INPUTS:
        for context in CONTEXTS:
            paper = PRINTED[aggregate, context]
            results = {start: every[aggregate, context, start] for start in TRAINED}
            columns = []
            for start, untrained in COLUMNS.values():
                curves = [points for points, _ in results[start]]
                if untrained or not ours:
                    chosen = [points[0 if untrained else -1] for points in curves]
                else:
                    chosen = [min(points, key=lambda point: point[2]) for points in curves]
                columns += [mean_std([point[i] for point in chosen]) for i in (1, 2)]
            tests = [mean_std([x for _, x in results[start]]) for start in TRAINED] if ours else []
            rows.append((aggregate, context, "measured", *columns, *tests))
            empty = len(columns) + len(tests) - len(paper)
            cells = (*(f"{x:.1f}" for x in paper), *(None,) * empty)
            rows.append((aggregate, context, "printed", *cells))
    names = [f"{split}-{name}" for name in COLUMNS for split in "TD"]
    names += [f"X-{name}" for name in ("c", "z", "w", "sw")] if ours else []
    suite.write(suite.named("table1"), ("input", "K", "", *names), rows)


def fig1(suite: ExperimentSuite) -> None:
    """Draws mean co-occurrence against token count for one context token, and training perplexity of Cat by epoch.

    Cat concatenates the K previous tokens. Also writes the points as CSV files.
    """
    frequency, mean = scaling(NextToken(suite.language("sum", 1, "explicit"), suite.mesh))
    slope, _ = np.polyfit(np.log(frequency), np.log(mean), 1)
    rows = list(zip(frequency.tolist(), mean.tolist(), strict=True))
    suite.write_csv("fig1_scaling", ("f", "mean co-occurrence"), rows)
    curves = _curves(suite, "cat")["cat"]
    _write_curves(suite, "fig1_curves", curves)
    path = suite.out / f"{suite.named('fig1')}.png"
    training = {name: [(e, t) for e, t, _ in p] for name, p in curves.items()}
    figures.scaling_and_curves(frequency, mean, slope, training, path)
    print(f"slope of log mean co-occurrence over log count: {slope:.3f}\nfigure: {shown(path)}")


def scaling(task: NextToken) -> tuple[np.ndarray, np.ndarray]:
    """Returns the count and mean co-occurrence of each target token (section 2.2), for a task of one context token."""
    counts, noise = np.asarray(task.counts()[0], np.float64), task.noise
    cooccurrences = np.asarray(noise.keep_V)[:, None] * counts + np.outer(
        noise.uniform_V, np.asarray(noise.spill_V) @ counts
    )
    # Eq. (13) has a geometric mean of co-occurrences. With one-hot inputs (K = 1), this mean has a single
    # factor: the co-occurrence of the context token and the target. `mean` holds, for each target, the average of this
    # co-occurrence over all context tokens of the text.
    mean = counts.sum(1) @ cooccurrences / counts.sum()
    seen = counts.sum(0) > 0
    return counts.sum(0)[seen], mean[seen]


def fig3(suite: ExperimentSuite) -> None:
    """Draws the development perplexity of Cat, and the training and development perplexities of Sum, by epoch.

    Cat concatenates the K previous tokens, Sum adds their embeddings up. Also writes the points as CSV files.
    """
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
    print(f"figure: {shown(path)}")


def fig2(suite: ExperimentSuite) -> None:
    """Draws digit classifiers' accuracy by epoch, and the explicit solution's test accuracy by priming number K.

    The left panel has a curve of seed 1 for each number of layers and each start in `TRAINED` ("zero" for one layer
    only). Also writes the points of both panels as CSV files, and a table of test results that includes the baselines.
    """
    # `digits.validate` explains why two layers cannot start from zeros.
    trained = [(n, s) for n in (1, 2) for s in TRAINED if (n, s) != (2, "zero")]
    cases = {case: suite.digits_case(*case) for case in trained}
    runs = suite.runs(dict(cases.values()))
    results = {
        case: [digits_result(suite, r) for r in runs[name]] for case, (name, _) in cases.items()
    }
    task = Digits(suite.digits(1, "explicit", 1), suite.mesh)
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
        if layers == 1:
            path = suite.out / f"{suite.named('fig2')}_baselines.json"
            rows += [
                (1, name, f"{tested['accuracy']:.2f}", f"{tested['loss']:.3f}", None, None)
                for name, tested in kept_baselines(task, path).items()
            ]
    columns = ("layers", "start", "test accuracy %", "test cross-entropy", "epochs")
    suite.write(suite.named("fig2"), (*columns, "printed (MNIST) %"), rows)
    scan, norm = priming_scan(task)
    names = ("layers", "start", "seed", "epoch", "accuracy %", "loss")
    suite.write_csv(suite.named("fig2_curves"), names, every)
    scanned = ("K", "weights form %", "separate intercept %")
    suite.write_csv(suite.named("fig2_scan"), scanned, scan)
    path = suite.out / f"{suite.named('fig2')}.png"
    figures.digits(curves, scan, norm, path, "held-out" if suite.protocol == "ours" else "test")
    for column, name in ((1, "eq. (3)"), (2, "the separate intercept")):
        highest = max(row[column] for row in scan)
        tied = [row[0] for row in scan if row[column] == highest]
        best = f"{tied[0]:g}" if len(tied) == 1 else f"{tied[0]:g} to {tied[-1]:g}, {len(tied)} tie"
        print(f"priming number K with the best test accuracy of {name}: {best} ({highest:.2f} %)")
    print(f"mean L1 norm of the training features: {norm:.2f}\nfigure: {shown(path)}")


def digits_result(suite: ExperimentSuite, ran: Run) -> tuple[dict[str, float], Points]:
    """Returns the test metrics of a run, and its validation curve of (epoch, accuracy in %, loss).

    With the protocol "printed", the validation images are the test images, and the test metrics are those of the last
    epoch.
    """
    points = _points(ran, "accuracy", "loss")
    if suite.protocol == "ours":
        return ran.summary["test"], points
    _, accuracy, loss = points[-1]
    return {"accuracy": accuracy, "loss": loss}, points


def untrained(config: ConfigDict, suite: ExperimentSuite) -> dict[str, float]:
    """Returns the test metrics of a digit classifier before the first training step."""
    task = Digits(config, suite.mesh)
    values = task.with_parameters({})
    drawn = initial_params(task, values.abstract_model, config.seed, suite.mesh)
    return task.evaluate(replace(values, trainable=task.start(drawn, {})), "test")


def _digits_row(layers: int, start: str, tested: list[dict], epochs: list[int]) -> tuple:
    accuracy = mean_std([t["accuracy"] for t in tested], 2)
    loss = mean_std([t["loss"] for t in tested], 3)
    return layers, start, accuracy, loss, mean_std(epochs, 0), PRINTED_DIGITS.get((layers, start))


def priming_scan(task: Digits) -> tuple[list[tuple[float, float, float]], float]:
    """Measures the explicit solution's test accuracy for the priming numbers K = 1, 2, ... (section 3.2.1).

    Returns:
      First, a list of (K, accuracy of eq. (3) in %, accuracy of `separate_intercept` in %) for K up to the number of
      pixels. Second, the mean L1 norm of the training features.
    """
    features, labels = jnp.asarray(task.features("test")), task.splits["test"][1]
    train = task.features("train")
    counts = cooccurrences(train, task.splits["train"][1], task.outputs)

    def accuracy(weights, bias=0.0) -> float:
        return 100 * float(np.mean(np.argmax(features @ weights + bias, axis=1) == labels))

    rows = []
    for k in range(1, 1 + features.shape[1]):
        weights_form = accuracy(from_cooccurrences(counts, k))
        rows.append((float(k), weights_form, accuracy(*separate_intercept(counts, k))))
    return rows, float(train.sum(1).mean())


def _curves(suite: ExperimentSuite, *aggregates: str) -> dict[str, dict[str, Points]]:
    """Trains missing runs. Returns {input ("sum" or "cat"): {label, such as "K = 2, warm": curve of seed 1}}."""
    runs = language_runs(replace(suite, seeds=1), aggregates)
    curves: dict[str, dict[str, Points]] = {aggregate: {} for aggregate in aggregates}
    for (aggregate, context, start), [(points, _)] in runs.items():
        curves[aggregate][f"K = {context}, {start}"] = points
    return curves


def _write_curves(suite: ExperimentSuite, name: str, curves: dict[str, Points]) -> None:
    rows = [(run, *point) for run, points in curves.items() for point in points]
    suite.write_csv(suite.named(name), ("run", "epoch", "training", "development"), rows)
