"""Tables 3 and 4 and Figure 4: their runs, and measured beside printed numbers."""

import json
import math
import os
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
from common.metrics.curve import Axis, Curve
from common.report.runs import run_of, runs_alternated
from common.report.table import mean_std
from common.tasks.language_modelling import LanguageModelling
from common.track.tracker import write_whole
from common.train.task import Task
from configs import language
from gmlp_lm import figures, run
from gmlp_lm.model import language_model

KINDS = {"gpt": "GPT", "gmlp": "gMLP", "gmlp_attn": "gMLP + attention"}

NATS_TO_BITS = 1 / math.log(2)


class Printed(NamedTuple):
    """A row of Table 3. Its "bits per character" are nats."""

    best: float
    final: float
    perplexity: float
    seconds: float


PRINTED = {
    ("enwik8", "gpt"): Printed(2.48, 2.48, 43.3, 12.91),
    ("enwik9", "gpt"): Printed(2.42, 2.42, 42.7, 14.05),
    ("wikitext2", "gpt"): Printed(2.14, 2.14, 40.6, 14.35),
    ("wikitext103", "gpt"): Printed(2.27, 2.28, 40.5, 13.45),
    ("enwik8", "gmlp"): Printed(1.10, 1.11, 33.6, 35.01),
    ("enwik9", "gmlp"): Printed(1.19, 1.25, 34.5, 35.07),
    ("wikitext2", "gmlp"): Printed(1.02, 2.39, 32.7, 34.89),
    ("wikitext103", "gmlp"): Printed(0.95, 0.96, 31.9, 34.71),
    ("enwik8", "gmlp_attn"): Printed(0.99, 1.00, 31.4, 35.37),
    ("enwik9", "gmlp_attn"): Printed(1.19, 1.25, 34.3, 36.03),
    ("wikitext2", "gmlp_attn"): Printed(1.01, 2.30, 32.5, 35.13),
    ("wikitext103", "gmlp_attn"): Printed(0.95, 0.95, 31.6, 35.80),
}

AXES: dict[str, Axis] = {"data": "step", "FLOPs": "flops", "wall-clock": "seconds"}
"""Equal quantity -> axis of the curve. A step has the same bytes for all models."""

WHOLE = "whole_valid.json"


@dataclass(frozen=True)
class ExperimentSuite(experiments.ExperimentSuite):
    """The experiments of this paper with the options of its command line.

    Attributes:
      recipe: "paper", "code" or "fixed".
      corpora: keys of `language.CORPORA`.
      data_paths: corpus -> its file or folder. A missing corpus is read from data/CORPUS.
    """

    recipe: str = "fixed"
    corpora: tuple[str, ...] = ("wikitext2",)
    data_paths: dict[str, Path] = field(default_factory=dict)

    def prepare(self, config: ConfigDict) -> tuple[ConfigDict, Task]:
        return run.prepare(config, self.mesh)

    def configuration(self, kind: str, corpus: str, seed: int) -> ConfigDict:
        """Returns the configuration of one run."""
        size = "" if self.scale == "paper" else f",{self.scale}"
        config = language.choose(kind, corpus, f"{self.recipe}{size}")
        if path := self.data_paths.get(corpus):
            single = path.is_file()
            config.data.source = f"files:{path.parent if single else path}"
            config.data.file = path.name.removesuffix(".gz").removesuffix(".zip") if single else ""
        self.override(config, seed=seed)
        # Table 4 needs samples of every run.
        config.eval.sample = config.eval.sample or min(120, config.model.length // 2)
        return config

    def cases(self, corpus: str) -> dict[str, list[tuple[dict, Path]]]:
        """Returns kind -> (summary, folder) of each seed. Trains the missing runs."""
        names = {kind: self.case_name(corpus, kind) for kind in KINDS}
        found = self.runs(
            {name: partial(self.configuration, kind, corpus) for kind, name in names.items()}
        )
        return {
            kind: [(ran.summary, ran.workdir) for ran in found[name]]
            for kind, name in names.items()
        }

    def case_name(self, corpus: str, kind: str) -> str:
        """Returns the name of a case."""
        return f"{corpus}_{kind}_{self.recipe}"

    def side(self, text: str) -> Side:
        """Returns the experiment of "CORPUS: KIND", such as "wikitext2: gmlp", in the suite's recipe."""
        known = {f"{corpus}: {kind}": (corpus, kind) for corpus, kind in PRINTED}
        check_choice("an experiment of a claim", text, known)
        corpus, kind = known[text]
        experiment = partial(self.configuration, kind, corpus)
        scheme, _, path = experiment(1).data.source.partition(":")
        missing = ""
        if corpus not in self.corpora:
            missing = f"--corpora={','.join((*self.corpora, corpus))}"
        elif scheme == "files" and not Path(os.path.expanduser(path)).is_dir():
            missing = f"--data={corpus}=PATH"
        return Side(self.case_name(corpus, kind), experiment, missing)


def table3(suite: ExperimentSuite) -> None:
    """Writes each model beside its printed row, and then all three at equal data, FLOPs and seconds."""
    rows, equal = [], []
    for corpus in suite.corpora:
        cases = suite.cases(corpus)
        for kind, runs in cases.items():
            number = 1 + list(PRINTED).index((corpus, kind))
            data = data_name(runs, corpus)
            timed = runs[0][0].get("timing", {}).get("kind", "unknown")
            kinds = (f"#{number}", KINDS[kind], data, f"measured, timed {timed}")
            rows.append((*kinds, *_measured(suite, runs)))
            rows.append((f"#{number}", KINDS[kind], corpus, "printed", *_printed(corpus, kind)))
        equal += _comparison(corpus, cases)
    columns = ("", "model", "data", "", *COLUMNS)
    suite.write("table3", columns, rows)
    values = [f"{name} {bits}" for bits in ("bits/byte", "mean") for name in KINDS.values()]
    suite.write("table3_equal", ("data", "at equal", "up to", *values), equal)


def data_name(runs: list[tuple[dict, Path]], corpus: str) -> str:
    """Returns the name of the training data. At "tiny" it is embedded text, not the corpus."""
    embedded = runs[0][0]["config"]["data"]["source"].startswith("embedded:")
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
"""Best and final are points of the curve. Valid and test are the best checkpoint on the whole split."""


def _measured(suite: ExperimentSuite, runs: list[tuple[dict, Path]]) -> tuple:
    whole = [whole_valid(suite, summary, workdir) for summary, workdir in runs]
    summaries = [summary for summary, _ in runs]
    test = [s["test"] for s in summaries]
    best, final = ([s[f"{name}_valid"] for s in summaries] for name in ("best", "final"))
    return (
        mean_std([b / NATS_TO_BITS for b in best], 3),
        mean_std([f / NATS_TO_BITS for f in final], 3),
        mean_std(best, 3),
        mean_std(final, 3),
        mean_std([math.exp(b / NATS_TO_BITS) for b in best], 2),
        mean_std([w["bits_per_byte"] for w in whole], 3),
        _if_all("perplexity_per_word", whole),
        mean_std([t["bits_per_byte"] for t in test], 3),
        _if_all("perplexity_per_word", test),
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


def _if_all(name: str, metrics: list[dict]) -> str:
    return mean_std([m[name] for m in metrics], 0) if all(name in m for m in metrics) else ""


def whole_valid(suite: ExperimentSuite, summary: dict, workdir: Path) -> dict[str, float]:
    """Returns the metrics of the best checkpoint on the whole validation split. Caches them in the run's folder."""
    path = workdir / WHOLE
    cache_key = {"best_step": summary["best_step"], "best_valid": summary["best_valid"]}
    cache_key |= {"eval": summary["config"]["eval"], "data": summary["config"]["data"]}
    found = cached_json(path, lambda found: found["asked"] == cache_key)
    if found is not None:
        return found["metrics"]
    config, values = run.load(workdir, suite.mesh)
    config.eval.update({"tokens": 0, "sample": 0})
    task = LanguageModelling(config, language_model, suite.mesh)
    metrics = task.evaluate(values, "valid")
    write_whole(path, json.dumps({"asked": cache_key, "metrics": metrics}, indent=1) + "\n")
    return metrics


def _comparison(corpus: str, cases: dict[str, list[tuple[dict, Path]]]) -> list[tuple]:
    """Returns rows with the validation bits per byte of all models at one point of each axis, and their mean up to it.

    The point is the end of the shortest curve; the mean is the AUCC divided by the point. The row of equal data also
    says "parameters" if the models' counts are within 1 %. Seconds count only for runs that were timed in turns.
    """
    counts = [runs[0][0]["params"]["total"] for runs in cases.values()]
    axes = {
        "parameters and data" if n == "data" and max(counts) < 1.01 * min(counts) else n: axis
        for n, axis in AXES.items()
    }
    curves = {
        kind: [Curve.from_json(summary["curve"]) for summary, _ in runs]
        for kind, runs in cases.items()
    }
    rows, data = [], data_name(cases["gpt"], corpus)
    if not runs_alternated([[run_of(s, w.name) for s, w in runs] for runs in cases.values()]):
        axes.pop("wall-clock")
    for name, axis in axes.items():
        horizon = min(c.points[-1].at(axis) for some in curves.values() for c in some)
        values = {k: [outline(c, axis, horizon)[-1][1] for c in some] for k, some in curves.items()}
        areas = {k: [aucc(c, axis, horizon) / horizon for c in some] for k, some in curves.items()}
        cells = [mean_std(v, 3) for some in (values, areas) for v in some.values()]
        unit = {"step": "steps", "flops": "FLOPs", "seconds": "s"}[axis]
        rows.append((data, name, f"{horizon:.4g} {unit}", *cells))
    return rows


def fig4(suite: ExperimentSuite) -> None:
    """Draws the validation curves of every corpus; writes the rise of each model's last value over its best."""
    panels, rows, every = {}, [], []
    for corpus in suite.corpora:
        cases = suite.cases(corpus)
        data = data_name(cases["gpt"], corpus)
        panels[data] = {name: [] for name in KINDS.values()}
        for kind, runs in cases.items():
            for seed, (summary, _) in enumerate(runs, 1):
                best, final = summary["best_valid"], summary["final_valid"]
                case = (data, KINDS[kind], seed)
                ends = (summary["best_step"], summary["steps"], best, final, final - best)
                printed = PRINTED[corpus, kind]
                rows.append((*case, *ends, (printed.final - printed.best) * NATS_TO_BITS))
                points = Curve.from_json(summary["curve"]).points
                every += [(*case, p.step, p.seconds, p.flops, p.value) for p in points]
                panels[data][KINDS[kind]].append([(p.step, p.value) for p in points])
    figures.validation(panels, suite.out / "fig4.png")
    names = ("data", "model", "seed", "best step", "steps", "best bits/byte", "final", "rise")
    suite.write("fig4", (*names, "printed rise"), rows)
    columns = ("data", "model", "seed", "step", "seconds", "FLOPs", "bits per byte")
    suite.write_csv("fig4_curves", columns, every)
    print(f"figure: {suite.out / 'fig4.png'}")


TABLE_4 = (0.001, 0.01, 0.1, 0.5, 1.0)
"""Fractions of the training at which the paper prints samples: "epochs" 1, 10, 100, 500 and 1000 of 1000."""


def table4(suite: ExperimentSuite) -> None:
    """Writes samples of the three models during training, all from one prompt and one random key."""
    corpus = "wikitext2" if "wikitext2" in suite.corpora else suite.corpora[0]
    written = {}
    for kind, runs in suite.cases(corpus).items():
        summary, workdir = runs[0]
        logged = {m["step"]: m["valid/sample"] for m in evaluations(workdir, "valid/sample")}
        steps = [min(logged, key=lambda s, a=a: abs(s - a * summary["steps"])) for a in TABLE_4]
        written[kind] = {step: logged[step] for step in steps}
    steps = sorted(set.intersection(*map(set, written.values())))
    rows = [(step, *(_printable(written[kind][step]) for kind in KINDS)) for step in steps]
    suite.write("table4", ("step", *KINDS.values()), rows)


def _printable(text: str) -> str:
    """Returns the text on one line, with control characters replaced."""
    return "".join(c if c.isprintable() else "·" for c in " ".join(text.split()))
