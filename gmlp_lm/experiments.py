"""Trains the runs of Tables 3 and 4 and Figure 4, and writes the tables and the figure."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ml_collections import ConfigDict

from common import experiments
from common.cached import cached_json
from common.config import check_choice
from common.experiments import Side, evaluations
from common.metrics.aucc import aucc, outline
from common.metrics.curve import Axis
from common.report.panels import COLOURS, panels
from common.report.printed import printed
from common.report.runs import Run, runs_alternated
from common.report.table import mean_std
from common.storage.addresses import shown
from common.storage.folders import open_folder
from common.train.workdir import has_checkpoints
from configs import language
from gmlp_lm import loading, run

KINDS = {"gpt": "GPT", "gmlp": "gMLP", "gmlp_attn": "gMLP + attention"}

NATS_TO_BITS = 1 / math.log(2)


class Printed(NamedTuple):
    """A row of the paper's Table 3.

    Attributes:
      best, final: lowest and last validation loss in nats per byte. (The paper's heading says bits per character.)
      perplexity: as printed. It is the exponential of neither loss of the row.
      seconds: training time of 100 steps.
    """

    best: float
    final: float
    perplexity: float
    seconds: float


PRINTED = {key: Printed(*map(float, cells)) for key, cells in printed("gmlp_lm", "table3").items()}
"""(corpus, key of KINDS) -> row of Table 3, in the order of the rows."""

AXES: dict[str, Axis] = {"data": "step", "FLOPs": "flops", "wall-clock": "seconds"}
"""Quantity held equal in a comparison of models -> curve axis. Equal data means equal numbers of training steps."""

WHOLE = "whole_valid.json"


@dataclass(frozen=True)
class ExperimentSuite(experiments.ExperimentSuite):
    """The experiments of the gMLP paper, with the options of `gmlp_lm.reproduce`.

    Attributes:
      recipe: "paper" (the paper's text), "code" (the authors' program) or "fixed" (nearly equal parameter counts).
      corpora: keys of `language.CORPORA`.
      data_paths: corpus -> file or folder of its text. The default is the source in `language.CORPORA`, or at the scale
        "tiny" the Python manual (embedded:python).
    """

    recipe: str = "fixed"
    corpora: tuple[str, ...] = ("wikitext2",)
    data_paths: dict[str, Path] = field(default_factory=dict)

    def configuration(self, kind: str, corpus: str, seed: int) -> ConfigDict:
        """Returns the configuration of one run. `kind` is a key of KINDS."""
        size = "" if self.scale == "paper" else f",{self.scale}"
        config = language.choose(kind, corpus, f"{self.recipe}{size}")
        if path := self.data_paths.get(corpus):
            single = path.is_file()
            config.data.source = f"files:{shown(path.parent if single else path)}"
            config.data.file = path.name.removesuffix(".gz").removesuffix(".zip") if single else ""
        self.override(config, seed=seed)
        # Table 4 shows text samples, so every run writes text samples.
        config.eval.sample = config.eval.sample or min(120, config.model.length // 2)
        return config

    def cases(self, corpus: str) -> dict[str, list[Run]]:
        """Trains missing runs; returns {model kind: runs, one per seed}."""
        names = {kind: self.case_name(corpus, kind) for kind in KINDS}
        runs = self.runs(
            {name: partial(self.configuration, kind, corpus) for kind, name in names.items()}
        )
        return {kind: runs[name] for kind, name in names.items()}

    def case_name(self, corpus: str, kind: str) -> str:
        """Returns the name of a model's runs on a corpus, without the seed."""
        return f"{corpus}_{kind}_{self.recipe}"

    def side(self, text: str) -> Side:
        """Returns the side "CORPUS: KIND" of a claim, such as "wikitext2: gmlp". Other texts raise a UserError."""
        known = {f"{corpus}: {kind}": (corpus, kind) for corpus, kind in PRINTED}
        check_choice("gmlp_lm/claims.csv: experiment", text, known)
        corpus, kind = known[text]
        experiment = partial(self.configuration, kind, corpus)
        scheme, _, path = experiment(1).data.source.partition(":")
        missing = ""
        if corpus not in self.corpora:
            missing = f"--corpora={','.join((*self.corpora, corpus))}"
        elif scheme == "files" and not open_folder(os.path.expanduser(path)).is_dir():
            missing = f"--data={corpus}=PATH"
        return Side(self.case_name(corpus, kind), experiment, missing)


def table3(suite: ExperimentSuite) -> None:
    """Writes Table 3, and a second table that compares the models at equal amounts of training (`_comparison`)."""
    rows, equal = [], []
    for corpus in suite.corpora:
        cases = suite.cases(corpus)
        for kind, runs in cases.items():
            number = 1 + list(PRINTED).index((corpus, kind))
            data = data_name(runs, corpus)
            kinds = (f"#{number}", KINDS[kind], data, f"measured, timed {runs[0].timing}")
            rows.append((*kinds, *_measured(suite, runs)))
            rows.append((f"#{number}", KINDS[kind], corpus, "printed", *_printed(corpus, kind)))
        equal += _comparison(corpus, cases)
    columns = ("", "model", "data", "", *COLUMNS)
    suite.write("table3", columns, rows)
    values = [f"{name} {bits}" for bits in ("bits/byte", "mean") for name in KINDS.values()]
    suite.write("table3_equal", ("data", "at equal", "up to", *values), equal)


def data_name(runs: list[Run], corpus: str) -> str:
    """Returns the name of the training text for tables: `corpus`, or "Python manual" for embedded:python."""
    embedded = runs[0].config["data"]["source"].startswith("embedded:")
    return "Python manual" if embedded else corpus


COLUMNS = (
    "best nats/byte",
    "final nats/byte",
    "best bits/byte",
    "final bits/byte",
    "byte perplexity",
    "valid bits/byte",
    "valid word perplexity",
    "test bits/byte",
    "test word perplexity",
    "s/100 steps",
    "parameters",
    "printed perplexity",
)
"""Columns of Table 3. "best" and "final" are values of the validation curve. "byte perplexity" is the perplexity of
"best". "valid" and "test" evaluate the best checkpoint on the whole split."""


def _measured(suite: ExperimentSuite, runs: list[Run]) -> tuple:
    whole = [whole_valid(suite, one.summary, one.folder) for one in runs]
    summaries = [one.summary for one in runs]
    test = [s["test"] for s in summaries]
    best, final = ([s[f"{name}_valid"] for s in summaries] for name in ("best", "final"))
    return (
        mean_std([b / NATS_TO_BITS for b in best], 3),
        mean_std([f / NATS_TO_BITS for f in final], 3),
        mean_std(best, 3),
        mean_std(final, 3),
        mean_std([math.exp(b / NATS_TO_BITS) for b in best], 2),
        _if_all("bits_per_byte", whole, 3),
        _if_all("perplexity_per_word", whole, 0),
        _if_all("bits_per_byte", test, 3),
        _if_all("perplexity_per_word", test, 0),
        mean_std([100 * s["train_seconds"] / s["steps"] for s in summaries], 1),
        f"{summaries[0]['params']['total']:,}",
        None,
    )


def _printed(corpus: str, kind: str) -> tuple:
    row = PRINTED[corpus, kind]
    nats = (row.best, row.final)
    return (
        *(f"{value:.2f}" for value in nats),
        *(f"{value * NATS_TO_BITS:.2f}" for value in nats),
        f"{math.exp(row.best):.2f}",
        *(None,) * 4,
        f"{row.seconds:.2f}",
        None,
        f"{row.perplexity:.1f}",
    )


def _if_all(name: str, metrics: list[dict], digits: int) -> str:
    """Returns the mean and the standard deviation of a metric over runs, or "" if a run lacks the metric."""
    return mean_std([m[name] for m in metrics], digits) if all(name in m for m in metrics) else ""


def whole_valid(suite: ExperimentSuite, summary: dict, workdir: Path) -> dict[str, float]:
    """Returns the metrics of the best checkpoint on the whole validation split, cached in the run's folder.

    Returns {} if the folder has neither a checkpoint nor the cache file.
    """
    if not has_checkpoints(workdir) and not (workdir / WHOLE).exists():
        return {}
    key = {name: summary[name] for name in ("best_step", "best_valid")}
    key |= {name: summary["config"][name] for name in ("eval", "data")}

    def evaluate() -> dict[str, float]:
        trained = loading.load_run(workdir, mesh=suite.mesh)
        trained.config.eval.update({"tokens": 0, "sample": 0})
        return run.Task(trained.config, suite.mesh).evaluate(trained.values, "valid")

    return cached_json(workdir / WHOLE, key, evaluate)


def _comparison(corpus: str, cases: dict[str, list[Run]]) -> list[tuple]:
    """Returns table rows that compare validation bits per byte at equal data and at equal FLOPs.

    If the models were trained in turns (--turns), a third row compares them at equal seconds. The horizon of a row is
    the end of the shortest curve on its axis. A row has two numbers per model: the best value so far at the horizon,
    interpolated between evaluations, and AUCC / horizon, the average of the best value so far up to the horizon.
    """
    counts = [runs[0].summary["params"]["total"] for runs in cases.values()]
    axes = {
        "parameters and data" if n == "data" and max(counts) < 1.01 * min(counts) else n: axis
        for n, axis in AXES.items()
    }
    curves = {kind: [one.curve for one in runs] for kind, runs in cases.items()}
    rows, data = [], data_name(cases["gpt"], corpus)
    if not runs_alternated(list(cases.values())):
        axes.pop("wall-clock")
    for name, axis in axes.items():
        horizon = min(c.points[-1].at(axis) for some in curves.values() for c in some)
        values = {k: [outline(c, axis, horizon)[-1][1] for c in some] for k, some in curves.items()}
        means = {k: [aucc(c, axis, horizon) / horizon for c in some] for k, some in curves.items()}
        cells = [mean_std(v, 3) for some in (values, means) for v in some.values()]
        unit = {"step": "steps", "flops": "FLOPs", "seconds": "s"}[axis]
        rows.append((data, name, f"{horizon:.4g} {unit}", *cells))
    return rows


def fig4(suite: ExperimentSuite) -> None:
    """Draws Figure 4, the validation curves. Writes the points, and the last minus the best value of each curve."""
    curves, rows, every = {}, [], []
    for corpus in suite.corpora:
        cases = suite.cases(corpus)
        data = data_name(cases["gpt"], corpus)
        curves[data] = {name: [] for name in KINDS.values()}
        for kind, runs in cases.items():
            for seed, one in enumerate(runs, 1):
                summary, points = one.summary, one.curve.points
                best, final = summary["best_valid"], summary["final_valid"]
                case = (data, KINDS[kind], seed)
                ends = (summary["best_step"], summary["steps"], best, final, final - best)
                paper = PRINTED[corpus, kind]
                rows.append((*case, *ends, (paper.final - paper.best) * NATS_TO_BITS))
                every += [(*case, p.step, p.seconds, p.flops, p.value) for p in points]
                curves[data][KINDS[kind]].append([(p.step, p.value) for p in points])
    _draw(curves, suite.out / "fig4.png")
    names = ("data", "model", "seed", "best step", "steps", "best bits/byte", "final", "rise")
    suite.write("fig4", (*names, "printed rise"), rows)
    columns = ("data", "model", "seed", "step", "seconds", "FLOPs", "bits per byte")
    suite.write_csv("fig4_curves", columns, every)
    print(f"figure: {shown(suite.out / 'fig4.png')}")


def _draw(
    curves: Mapping[str, Mapping[str, Sequence[Sequence[tuple[int, float]]]]], path: Path
) -> None:
    """Draws {corpus: {model: one curve per seed}}, a panel per corpus. A ring marks the best value of each curve.

    A curve is a list of (step, bits per byte).
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


TABLE_4 = (0.001, 0.01, 0.1, 0.5, 1.0)
"""Fractions of the training steps: epochs 1, 10, 100, 500 and 1000 of 1000 in the paper's Table 4. `table4` writes the
samples of the nearest evaluations."""


def table4(suite: ExperimentSuite) -> None:
    """Writes Table 4: text samples of seed 1 during training.

    The corpus is wikitext2 if the suite has it, otherwise the suite's first corpus. All samples continue the same
    prompt with the same random key. Steps without a sample of every model are left out.
    """
    corpus = "wikitext2" if "wikitext2" in suite.corpora else suite.corpora[0]
    written = {}
    for kind, runs in suite.cases(corpus).items():
        logged = {m["step"]: m["valid/sample"] for m in evaluations(runs[0].folder, "valid/sample")}
        marks = [fraction * runs[0].summary["steps"] for fraction in TABLE_4]
        steps = [min(logged, key=lambda step, mark=mark: abs(step - mark)) for mark in marks]
        written[kind] = {step: logged[step] for step in steps}
    steps = sorted(set.intersection(*map(set, written.values())))
    rows = [(step, *(_printable(written[kind][step]) for kind in KINDS)) for step in steps]
    suite.write("table4", ("step", *KINDS.values()), rows)


def _printable(text: str) -> str:
    """Returns the text on one line, with single spaces, and "·" for each character that is not printable."""
    return "".join(c if c.isprintable() else "·" for c in " ".join(text.split()))
