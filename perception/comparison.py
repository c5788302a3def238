"""Compares pretrained weights, training from random weights, and TF-IDF on any data set (perception.worth)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

from common import experiments
from common.config import check, load
from common.data.labelled import LabelledText
from common.report.runs import Run, load_local
from common.report.table import mean_std
from common.report.verdict import CONFIDENCE, MARGINS, Comparison, compare, correct
from common.train.task import Task
from perception import baseline, datasets, finetuning, richness, run

METRIC = "weighted_f1"


class Way(NamedTuple):
    """A way of training that the comparison includes.

    Attributes:
      name: display name.
      fields: configuration overrides.
      pretrained: whether training starts from pretrained weights.
      random: whether the result depends on the seed.
    """

    name: str
    fields: Mapping[str, object]
    pretrained: bool = False
    random: bool = True


WAYS = {
    "lora": Way("LoRA on pretrained weights", {"finetune": "lora"}, pretrained=True),
    "full_pretrained": Way(
        "all weights, from pretrained ones", {"finetune": "full_pretrained"}, pretrained=True
    ),
    "head": Way(
        "the head alone, on pretrained weights",
        {"finetune": "head", "train.steps": 0},
        pretrained=True,
        random=False,
    ),
    "full": Way("all weights, from random ones", {"finetune": "full"}),
    "tf_idf": Way("TF-IDF and logistic regression", {}, random=False),
}

BASELINE = "tf_idf"

FIXED = ("finetune", "seed")
"""Configuration fields that the comparison sets; overrides are rejected."""


@dataclass(frozen=True)
class ExperimentSuite(experiments.ExperimentSuite):
    """The runs of the comparison.

    Attributes beyond those of the base class:
      spec: the configuration, "FILE" or "FILE:ARGUMENT".
      margin: equivalence margin in points of weighted F1.
    """

    spec: str = ""
    margin: float = field(default=MARGINS[METRIC])

    def prepare(self, config: ConfigDict) -> tuple[ConfigDict, Task]:
        return run.prepare(config, self.mesh)

    def configuration(self, way: str, seed: int) -> ConfigDict:
        """Returns the configuration of one run. The backbone defaults to that of the pretrained weights.

        Raises:
          UserError: an override sets a field that the comparison sets.
        """
        for name in FIXED:
            overrides = [f for f in self.fields if f.startswith(f"--config.{name}=")]
            check(
                not overrides, f"{''.join(overrides)}: perception.worth sets this field, remove it"
            )
        config = self.override(load(self.spec), seed=seed, **WAYS[way].fields)
        if config.pretrained and not any(f.startswith("--config.backbone=") for f in self.fields):
            config.backbone = "auto"
        if way in finetuning.TRAINS_ALL:
            config.quantize = "none"
        if way == "full":
            if config.backbone != "auto" and config.data.tokenizer != "pretrained":
                config.pretrained = ""
        elif config.data.tokenizer == "trained":
            config.data.tokenizer = "auto"
        return config

    def ways(self) -> list[str]:
        """Returns the ways that can run; ways with pretrained weights need --config.pretrained.

        Raises:
          UserError: a configuration or the pretrained weights are invalid.
        """
        weights = self.configuration("lora", 1).pretrained
        found = [name for name, way in WAYS.items() if weights or not way.pretrained]
        for way in found:
            if way == BASELINE:
                continue
            config = self.configuration(way, 1)
            run.validate(config)
            finetuning.open_pretrained(config)
        return found

    def every(
        self, splits: Mapping[str, LabelledText], classes: Sequence[str]
    ) -> dict[str, list[Run]]:
        """Trains missing runs; returns the runs of each way, one per seed, or one if the seed does not matter."""
        ways = self.ways()
        cases = {way: partial(self.configuration, way) for way in ways if WAYS[way].random}
        found = {way: [ran.run for ran in runs] for way, runs in self.runs(cases).items()}
        if "head" in ways:
            _, folder = self.fit("head", self.configuration("head", 1))
            found["head"] = load_local(folder)
        folder = self.out / "runs" / BASELINE
        print(f"\n{BASELINE}", flush=True)
        baseline.run(self.configuration(BASELINE, 1), splits, classes, folder)
        return {way: found.get(way) or load_local(folder) for way in ways}


def worth(suite: ExperimentSuite) -> None:
    """Trains all ways; writes the tables of results and verdicts, and the answer in sentences."""
    suite.ways()  # validate before reading the data
    config = suite.configuration("full", 1)
    splits, classes = datasets.load(config)
    found = suite.every(splits, classes)
    columns = ("", "F1, last step", "F1, best step", "parameters trained", "FLOPs", "training (s)")
    suite.write("worth", columns, [_row(way, runs) for way, runs in found.items()])
    chosen = choose(found)
    verdicts = judge(found, chosen, suite.margin)
    columns = ("weighted F1 of", "against", "difference", f"{CONFIDENCE:.0%} interval", "verdict")
    rows = [
        (WAYS[a].name, WAYS[b].name, f"{one.difference:+.2f}", _interval(one), str(one))
        for (a, b), one in verdicts.items()
    ]
    suite.write(
        "verdicts",
        (*columns, "noise of"),
        [(*r, v.noise) for r, v in zip(rows, verdicts.values(), strict=True)],
    )
    tokens = richness.tokens(splits["train"].texts)
    size = len(splits["train"]), tokens, len(splits["test"])
    lines = answer(found, chosen, verdicts, size, config.eval.select)
    (suite.out / "answer.txt").write_text(f"{lines}\n")
    print(f"\n{lines}")


def _row(way: str, runs: Sequence[Run]) -> tuple:
    """Returns a row of the table of results: mean ± standard deviation over seeds."""
    summaries = [run.summary for run in runs]
    last, best = ([s[which][METRIC] for s in summaries] for which in ("test_last", "test"))
    flops = float(np.mean([s["flops"] for s in summaries]))
    seconds = [s["train_seconds"] + s["start_seconds"] for s in summaries]
    return (
        WAYS[way].name,
        mean_std(last, 2),
        mean_std(best, 2),
        summaries[0]["params"]["trainable"],
        f"{flops:.3g}" if flops else None,  # FLOPs of a regression are not counted
        mean_std(seconds, 1),
    )


def choose(found: Mapping[str, Sequence[Run]]) -> str | None:
    """Returns the way with pretrained weights that has the best F1 on the examples that select the best step.

    These are the validation examples, or the test examples with `eval.select=test`. Returns None without pretrained
    weights.
    """

    def valid(way: str) -> float:
        return float(np.mean([run.curve.best.value for run in found[way]]))

    return max((way for way in found if WAYS[way].pretrained), key=valid, default=None)


def judge(
    found: Mapping[str, Sequence[Run]], chosen: str | None, margin: float
) -> dict[tuple[str, str], Comparison]:
    """Compares test F1 of pairs of ways with the rule of `common.report.verdict`, corrected for multiple comparisons.

    Pairs: the chosen way against random weights; full training from pretrained against random weights, which differ in
    initialization and tokenizer only; TF-IDF against both.
    """
    pairs = [("tf_idf", "full")]
    if chosen:
        own = [(chosen, "full"), ("full_pretrained", "full"), ("tf_idf", chosen)]
        pairs = list(dict.fromkeys([*own, *pairs]))
    compared = [
        next(c for c in compare(found[a], found[b], {METRIC: margin}) if c.metric == METRIC)
        for a, b in pairs
    ]
    return dict(zip(pairs, correct(compared), strict=True))


def _interval(one: Comparison) -> str:
    """Formats the interval of a difference; "" for a single seed."""
    return "" if np.isnan(one.low) else f"{one.low:+.1f} to {one.high:+.1f}"


def answer(
    found: Mapping[str, Sequence[Run]],
    chosen: str | None,
    verdicts: Mapping[tuple[str, str], Comparison],
    size: tuple[int, float, int],
    select: str,
) -> str:
    """Returns the answer, one line each for the results, the verdicts and the expectation from the paper's Table 1.

    Args:
      size: (training examples, their tokens, test examples).
      select: split that selected the best steps and `chosen`: "valid" or "test".
    """
    examples, tokens, tests = size
    reached = ", ".join(f"{WAYS[way].name} {_mean(runs)}" for way, runs in found.items())
    lines = [
        f"Weighted F1 on {tests:,} test examples, trained on {examples:,} (about {tokens:,.0f} tokens): {reached}."
    ]
    if chosen:
        lines.append(
            f"Best use of the pretrained weights: {WAYS[chosen].name}, selected on"
            f" {'the test examples, as in the recipe' if select == 'test' else 'the validation examples'}."
        )
    for (a, b), one in verdicts.items():
        interval = _interval(one)
        lines.append(
            f"{WAYS[a].name} against {WAYS[b].name}: {one.difference:+.1f}"
            f"{f' ({interval})' if interval else ''}: {one}."
        )
    line = richness.expectation()
    expected = f"{line.gap(tokens):+.1f} ± {line.margin(tokens):.1f}"
    untried = "" if chosen else "; no pretrained weights were tried here (--config.pretrained=DIR)"
    lines.append(
        "Expected difference between LoRA and full training from random weights, from the paper's data sets at this"
        f" size: {expected} ({CONFIDENCE:.0%} prediction interval){untried}."
    )
    return "\n".join(lines)


def _mean(runs: Sequence[Run]) -> str:
    values = [run.test for run in runs]
    return (
        mean_std(values)
        if len(values) > 1 or runs[0].seed is None
        else f"{mean_std(values)} (one seed)"
    )
