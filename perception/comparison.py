"""Compares methods to train a classifier on any data set: pretrained weights, random weights, or TF-IDF features."""

import math
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from ml_collections import ConfigDict

from common import experiments
from common.cached import cached_json
from common.config import check_choice, load
from common.data.labelled import LabelledText
from common.errors import check
from common.report.runs import Run, load_local
from common.report.significance import MARGINS, Comparison
from common.report.table import Table, keep
from common.storage.addresses import shown
from common.track.tracker import SUMMARY
from perception import baseline, budget, conclusions, datasets, finetuning, report_page, richness
from perception.budget import Cost, Plan, format_seconds
from perception.pretrained import open_pretrained
from perception.run import validate
from perception.ways import BASELINE, METRIC, TRAINABLE, TRAINED, find

PLAN = "plan.json"
"""File in --out that stores the plan for a time budget. The same command reads it to resume the same runs."""

PROBE_STEPS = 10
"""Number of training steps in the short run that measures the cost of a training method."""

MEASURED_TEXTS = 10_000
"""Maximum number of training examples that are tokenized to find the lengths to which texts are padded."""


@dataclass(frozen=True)
class ExperimentSuite(experiments.ExperimentSuite):
    """The runs of a comparison of training methods.

    Additional attributes:
      spec: the configuration, "FILE" or "FILE:ARGUMENT".
      margin: equivalence margin in points of weighted F1.
      only: training methods (arguments of `ways.find`) that are run; () for the methods TRAINABLE. The baseline is
        always run.
    """

    spec: str = ""
    margin: float = MARGINS[METRIC]
    only: tuple[str, ...] = ()

    def configuration(self, way: str, seed: int) -> ConfigDict:
        """Returns the configuration of a run of the training method `way`.

        With --config.pretrained, the default of `backbone` is "auto", the architecture of the pretrained model. Methods
        that train all weights get `quantize` "none". Methods that start from random weights get `pretrained` "", unless
        `backbone` or `data.tokenizer` needs the pretrained model. Other methods do not train a tokenizer.

        Raises:
          UserError: an override sets `finetune` or `seed`, `spec` or an override is invalid, or `way` is unknown.
        """
        self.check_not_overridden(
            ["finetune"], "perception.worth sets this field itself; choose methods with --ways"
        )
        fields, method = find(way).fields, find(way).method
        config = self.override(load(self.spec), seed=seed, **fields)
        if config.pretrained and not any(f.startswith("--config.backbone=") for f in self.fields):
            config.backbone = "auto"
        if method and method.trains_all:
            config.quantize = "none"
        if method and not method.pretrained:
            if config.backbone != "auto" and config.data.tokenizer != "pretrained":
                config.pretrained = ""
        elif config.data.tokenizer == "trained":
            config.data.tokenizer = "auto"
        return config

    def ways(self) -> list[str]:
        """Returns the training methods to run (arguments of `ways.find`), the baseline last.

        Without --config.pretrained, the methods of TRAINABLE that need pretrained weights are left out.

        Raises:
          UserError: a method in `only` is unknown or needs --config.pretrained, or a configuration or the pretrained
            model is invalid.
        """
        weights = self.configuration("lora", 1).pretrained
        for name in self.only:
            if ":" not in name:
                check_choice("--ways", name, (*TRAINABLE, BASELINE))
            check(
                weights or not find(name).pretrained,
                f"--ways={name} needs --config.pretrained=DIR: add this option, or leave out {name}",
            )
        order, wanted = dict.fromkeys((*TRAINABLE, *self.only)), self.only or TRAINABLE
        found = [
            n
            for n in order
            if n in wanted and n != BASELINE and (weights or not find(n).pretrained)
        ]
        for way in found:
            config = self.configuration(way, 1)
            validate(config)
            open_pretrained(config)
        return [*found, BASELINE]

    def every(
        self, ways: Sequence[str], splits: Mapping[str, LabelledText], classes: Sequence[str]
    ) -> dict[str, list[Run]]:
        """Trains missing runs. Returns the runs of each method: one for each seed, or the runs that `draws` lists."""
        found = {BASELINE: self.baseline(splits, classes)}
        if "head" in ways:
            heads = {name: self.configuration("head", seed) for seed, name in self.draws("head")}
            found["head"] = self.fit_all(heads)
        cases = {way: partial(self.configuration, way) for way in ways if find(way).random}
        if cases:
            found |= self.runs(cases)
        return {way: found[way] for way in ways}

    def baseline(self, splits: Mapping[str, LabelledText], classes: Sequence[str]) -> list[Run]:
        """Fits missing runs of the TF-IDF baseline. Returns the runs that `draws` lists."""
        found = []
        for seed, name in self.draws(BASELINE):
            print(f"\n{name}", flush=True)
            config = self.configuration(BASELINE, seed)
            drawn = datasets.load(config)[0] if config.data.shots else splits
            summary = baseline.run(config, drawn, classes, self.folder(name))
            for note in summary.get("notes", []):
                print(note, flush=True)
            found += load_local(self.folder(name))
        return found

    def draws(self, way: str) -> list[tuple[int, str]]:
        """Returns [(seed, run name)] of the baseline or "head": one run, or one for each seed if the seed matters."""
        config = self.configuration(way, 1)
        # TF-IDF does not read the embedding tables that `reinitialize` draws.
        if not config.data.shots and (way == BASELINE or not config.reinitialize):
            return [(1, way)]
        return [(seed, f"{way}_seed{seed}") for seed in range(1, 1 + self.seeds)]

    def finished(self) -> dict[str, list[Run]]:
        """Returns the finished runs of each method in --out. Reads neither data nor pretrained weights.

        Raises:
          UserError: --out has runs of another program, a damaged summary, or no finished runs of perception.worth.
        """
        names = [path.parent.name for path in (self.out / "runs").glob(f"*/{SUMMARY}")]
        ways = {re.split(r"_seed\d", name)[0] for name in names}
        others = sorted(way for way in ways if way not in (*TRAINABLE, BASELINE) and ":" not in way)
        check(
            not others,
            f"--out={shown(self.out)} has runs of another program ({shown(self.out / 'runs')} has"
            f" {', '.join(others[:3])}): name a folder that perception.worth has written",
        )
        order = [*TRAINABLE, *sorted(ways - {*TRAINABLE, BASELINE}), BASELINE]
        found = {way: self.kept(way) for way in order if way in ways}
        # If the seed has no effect (see `draws`), the baseline and "head" have one run, whose name has no seed.
        one = [way for way, runs in found.items() if way in names and not runs]
        found |= {way: load_local(self.folder(way)) for way in one}
        found = {way: runs for way, runs in found.items() if runs}
        check(
            bool(found),
            f"--out={shown(self.out)} has no finished runs of perception.worth: name the folder of a finished"
            " comparison, or remove --kept to train runs",
        )
        return found

    def measure(self, way: str, splits: Mapping[str, LabelledText], end: float) -> Cost:
        """Measures the cost of a training method in a run of PROBE_STEPS steps, which is deleted afterwards.

        For the method "head", this run trains the head by gradient descent instead of solving it.

        Raises:
          TimeLimitReached: the measurement took half of the time until `end` (a value of time.monotonic).
          UserError: preparing or training the run fails.
        """
        fields = [*self.fields, *_fields(PROBE_STEPS, PROBE_STEPS), "--config.eval.test=false"]
        probe = replace(self, out=self.out / "probe", fields=fields, turns=0)
        shutil.rmtree(probe.out, ignore_errors=True)  # remove files of an interrupted command
        begun = time.monotonic()
        print(f"\nmeasuring {way}", flush=True)
        try:
            with budget.time_limit(max((end - begun) / 2, 1e-3)):
                config = probe.configuration(way, 1)
                config.train.steps = PROBE_STEPS
                (ran,) = probe.fit_all({way: config})
        finally:
            shutil.rmtree(probe.out, ignore_errors=True)
        trained, evaluation = ran.summary["train_seconds"], ran.summary["eval_seconds"]
        step, start = trained / PROBE_STEPS, time.monotonic() - begun - trained - evaluation
        tests = len(splits["test"])
        # Take the smaller of two estimates of the test time. The first scales the measured evaluation. It is too high
        # for few validation examples (--shots), whose evaluation is mostly constant overhead. The second is an upper
        # bound: without a backward pass, a test example takes at most the time of a training example.
        selecting = len(splits[config.eval.select])
        test = min(evaluation * tests / selecting, step * tests / config.data.batch)
        return Cost(start, step, evaluation, test)

    def lengths(self, train: LabelledText) -> list[str]:
        """Returns overrides that pad or truncate texts to one or two lengths, so that a run compiles few programs.

        The lengths are the median and the 95 % quantile of the numbers of tokens in at most MEASURED_TEXTS examples,
        rounded up to multiples of 16, at most `data.max_length`. Returns [] if an override sets `data.max_length` or
        `data.buckets`.
        """
        lengths = "--config.data.max_length", "--config.data.buckets"
        if any(f.startswith(lengths) for f in self.fields):
            return []
        config = self.configuration("lora", 1)
        if not config.pretrained:
            config = self.configuration("full", 1)
        tokenizer = finetuning.make_tokenizer(config, train)
        kept = np.random.default_rng(0).permutation(len(train))[:MEASURED_TEXTS]
        some = [train.texts[i] for i in kept]
        found, _, _ = tokenizer.encode_parts(some, config.data.max_length)
        quantiles = np.quantile([len(tokens) for tokens in found], (0.5, 0.95))
        rounded = [min(16 * math.ceil(n / 16), config.data.max_length) for n in quantiles]
        buckets = ",".join(map(str, sorted(set(rounded))))
        return [f"--config.data.max_length={rounded[1]}", f"--config.data.buckets={buckets},"]

    def afford(
        self, ways: Sequence[str], splits: Mapping[str, LabelledText], seconds: float, begun: float
    ) -> Plan:
        """Plans the runs, except the baseline, that fit into `seconds` from `begun` (a value of time.monotonic).

        The costs are measured in short runs, or estimated from a measured method. A plan with at least one method is
        written to --out, and the same command reads it again.
        """
        key = [seconds, self.fields, self.spec, {k: v.fingerprint for k, v in splits.items()}]
        plan = cached_json(
            self.out / PLAN,
            key,
            lambda: self._plan(ways, splits, begun + seconds)._asdict(),
            # Do not keep an empty plan, because another try may have more time.
            keep=lambda plan: bool(plan["ways"]),
        )
        return Plan(**plan)

    def _plan(self, ways: Sequence[str], splits: Mapping[str, LabelledText], end: float) -> Plan:
        if time.monotonic() >= end:
            others = [way for way in ways if way != BASELINE]
            return Plan([], 0, 0, dict.fromkeys(others, "no time is left"), self.fields)
        suite = replace(self, fields=[*self.fields, *self.lengths(splits["train"])])
        config = self.configuration("full", 1)
        costs: dict[str, Cost] = {}
        left_out: dict[str, str] = {}
        solved: list[str] = []
        # In the order of the expected costs: the head needs no backward pass, and LoRA trains fewer parameters than the
        # other methods.
        for way in (way for way in ("head", *TRAINED) if way in ways):
            try:
                if way == "head":
                    # Computing the features of an example takes as long as evaluating the example.
                    cost = suite.measure(way, splits, end)
                    each = cost.evaluation / len(splits[config.eval.select])
                    needed = cost.start + each * sum(map(len, splits.values()))
                    needed *= len(self.draws(way))
                    if needed < (end - time.monotonic()) / 2:
                        solved, end = [way], end - needed
                    else:
                        took = format_seconds(needed)
                        left_out[way] = (
                            f"computing the features of all examples would take about {took}"
                        )
                    continue
                if not costs:
                    costs[way] = suite.measure(way, splits, end)
                # A method without a measurement gets the cost of the previous method. This estimate is too low for full
                # training from pretrained weights, so measure this method if the budget suffices for the estimate. Full
                # training from random weights costs as much as from pretrained weights.
                costs.setdefault(way, list(costs.values())[-1])
                plan = budget.make_plan(costs, end - time.monotonic(), config.train.steps)
                if way == "full_pretrained" and way in plan.ways:
                    costs[way] = suite.measure(way, splits, end)
            except budget.TimeLimitReached:
                costs.pop(way, None)
                known = (*costs, *solved, *left_out, BASELINE)
                why = f"measuring {PROBE_STEPS} steps of {way} took half of the remaining time"
                left_out |= dict.fromkeys([name for name in ways if name not in known], why)
                break
        plan = budget.make_plan(costs, end - time.monotonic(), config.train.steps)
        return plan._replace(
            ways=[*solved, *plan.ways], left_out=left_out | plan.left_out, fields=suite.fields
        )


def _fields(steps: int, interval: int) -> list[str]:
    """Returns overrides: `steps` training steps, with an evaluation and a checkpoint after every `interval` steps."""
    values = {"train.steps": steps, "eval.steps": interval, "checkpoint.steps": interval}
    return [f"--config.{name}={value}" for name, value in values.items()]


@dataclass(frozen=True)
class About:
    """Text about the data for the report.

    Attributes:
      title: heading of the report.
      places: location of the row of each test example, such as file and line; () if unknown.
      notes: sentences on how the data were prepared.
      ending: file name extension of new tables in the command that the report shows.
      options: further options of perception.classify in this command.
      warning: first sentence of the answer; "" for none.
    """

    title: str = "Is pretraining worth it on these data?"
    places: Sequence[str] = ()
    notes: Sequence[str] = ()
    ending: str = ".csv"
    options: Sequence[str] = ()
    warning: str = ""


def worth(suite: ExperimentSuite, about: About = About(), seconds: float = 0.0) -> None:
    """Trains a classifier with each method that fits the time budget. Writes tables, answer.txt and report.html.

    `seconds` is the time budget; 0 means no limit.
    """
    begun = time.monotonic()
    ways = suite.ways()  # raise errors about options before reading data
    config = suite.configuration("full", 1)
    splits, classes = datasets.load(config)
    if seconds:
        suite.baseline(splits, classes)
        plan = suite.afford(ways, splits, seconds, begun)
        ways = [way for way in ways if way in (*plan.ways, BASELINE)]
        suite = replace(suite, fields=plan.fields)
        if plan.steps:
            interval = math.ceil(plan.steps / budget.EVALUATIONS)
            fields = [*plan.fields, *_fields(plan.steps, interval)]
            sweep = {"optimizer.learning_rate": budget.LEARNING_RATES}
            suite = replace(suite, fields=fields, sweep=sweep, seeds=plan.seeds)
        planned = conclusions.describe(plan, seconds, config.eval.select)
        warning = "" if len(ways) > 1 else conclusions.only_baseline(seconds)
        about = replace(about, notes=[*about.notes, *planned], warning=warning)
        print("\n" + "\n".join(planned))
    found = suite.every(ways, splits, classes)
    publish(suite, found, splits, about)
    if seconds:
        spent = time.monotonic() - begun
        print(f"used {format_seconds(spent)} of the budget of {format_seconds(seconds)}")


def write_tables(
    suite: ExperimentSuite, found: Mapping[str, Sequence[Run]]
) -> tuple[Table, dict[tuple[str, str], Comparison], Table]:
    """Writes two tables and prints them unless empty. Returns the table `worth`, the verdicts, the table `verdicts`."""
    table = conclusions.results(found)
    suite.write("worth", *table)
    verdicts = conclusions.judge(found, suite.margin)
    compared = conclusions.verdict_table(verdicts)
    if verdicts:
        suite.write("verdicts", *compared)
    else:  # Overwrite the verdicts of an earlier comparison with an empty table, without printing the table.
        keep(suite.out / "verdicts", *compared)
    return table, verdicts, compared


def publish(
    suite: ExperimentSuite,
    found: Mapping[str, Sequence[Run]],
    splits: Mapping[str, LabelledText],
    about: About,
) -> None:
    """Writes the tables, answer.txt and report.html from finished runs. Prints the tables and answer.txt."""
    table, verdicts, compared = write_tables(suite, found)
    train = splits["train"]
    size = len(train), richness.tokens(train.texts), len(splits["test"])
    config, given = suite.configuration("full", 1), suite.configuration("lora", 1).pretrained
    select, shots = config.eval.select, config.data.shots
    lines = conclusions.answer(found, verdicts, size, select, shots, bool(given))
    lines = f"{about.warning}\n{lines}".lstrip()
    (suite.out / "answer.txt").write_text(f"{lines}\n")
    way, best = conclusions.best_run(found)
    notes = [*about.notes, *found[BASELINE][0].summary.get("notes", [])]
    use = conclusions.command(best, about.ending, about.options)
    report = report_page.Report(
        title=about.title,
        lines=lines.splitlines(),
        results=table,
        verdicts=compared,
        curves={find(name).name: [run.curve for run in runs] for name, runs in found.items()},
        best=find(way).name,
        predictions=best.predictions,
        texts=[" ".join(parts) for parts in splits["test"].texts],
        places=about.places,
        command=use,
        notes=notes,
    )
    report_page.write(report, suite.out / "report.html")
    print(f"\n{lines}\n\nwritten: {shown(suite.out / 'report.html')}\nuse it: {use}")
