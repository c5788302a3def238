"""The paper's question on any data: what pretrained weights, training from random ones, and counting words reach."""

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
    """One side of the comparison.

    Attributes:
      name: for people to read.
      fields: of the configuration, that make it.
      pretrained: it begins with pretrained weights.
      random: its result depends on the seed.
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
"""Fields that the comparison sets itself."""


@dataclass(frozen=True)
class ExperimentSuite(experiments.ExperimentSuite):
    """Attributes beyond what all have.

    spec: the configuration, "FILE" or "FILE:ARGUMENT".
    margin: the largest difference of weighted F1 (points) that does not matter.
    """

    spec: str = ""
    margin: float = field(default=MARGINS[METRIC])

    def prepare(self, config: ConfigDict) -> tuple[ConfigDict, Task]:
        return run.prepare(config, self.mesh)

    def configuration(self, way: str, seed: int) -> ConfigDict:
        """Of one run. Without another wish the backbone is that of the weights, where they are given."""
        for name in FIXED:
            given = [f for f in self.fields if f.startswith(f"--config.{name}=")]
            check(not given, f"{''.join(given)}: the comparison sets this itself, run by run")
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
        """Those that can be run: without weights none that begins with them.

        Raises:
          UserError: a configuration or the weights are at fault; before anything is trained.
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
        """The runs of all ways, trained where they are missing: one for each seed, or one where nothing is random."""
        ways = self.ways()
        cases = {way: partial(self.configuration, way) for way in ways if WAYS[way].random}
        found = {way: [ran.run for ran in some] for way, some in self.runs(cases).items()}
        if "head" in ways:
            _, folder = self.fit("head", self.configuration("head", 1))
            found["head"] = load_local(folder)
        folder = self.out / "runs" / BASELINE
        print(f"\n{BASELINE}", flush=True)
        baseline.run(self.configuration(BASELINE, 1), splits, classes, folder)
        return {way: found.get(way) or load_local(folder) for way in ways}


def worth(suite: ExperimentSuite) -> None:
    """Everything side by side, what the rule of comparisons says of it, and the answer in sentences."""
    suite.ways()  # whatever is at fault is known before the data are read
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
    """Of the table of all ways; mean ± standard deviation over seeds."""
    of = [run.summary for run in runs]
    last, best = ([summary[which][METRIC] for summary in of] for which in ("test_last", "test"))
    flops = float(np.mean([summary["flops"] for summary in of]))
    seconds = [summary["train_seconds"] + summary["start_seconds"] for summary in of]
    trained = of[0]["params"]["trainable"]
    shown = f"{flops:.3g}" if flops else None  # a regression counts none
    return (
        WAYS[way].name,
        mean_std(last, 2),
        mean_std(best, 2),
        trained,
        shown,
        mean_std(seconds, 1),
    )


def choose(found: Mapping[str, Sequence[Run]]) -> str | None:
    """The way with pretrained weights that was best where the best step is chosen: on the validation examples, never
    on the test, but in a recipe that chooses by the test. None where there are no pretrained weights."""

    def valid(way: str) -> float:
        return float(np.mean([run.curve.best.value for run in found[way]]))

    return max((way for way in found if WAYS[way].pretrained), key=valid, default=None)


def judge(
    found: Mapping[str, Sequence[Run]], chosen: str | None, margin: float
) -> dict[tuple[str, str], Comparison]:
    """Weighted F1 on the test of pairs of ways, by the rule of `common.report.verdict`, corrected for their number.

    The chosen way against random weights says what the pretrained weights give in the way that suits them; all weights
    from pretrained ones against all from random ones differ in where they begin, and in the tokenizer that each has.
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
    """Of a difference; "" where a single seed gives none."""
    return "" if np.isnan(one.low) else f"{one.low:+.1f} to {one.high:+.1f}"


def answer(
    found: Mapping[str, Sequence[Run]],
    chosen: str | None,
    verdicts: Mapping[tuple[str, str], Comparison],
    size: tuple[int, float, int],
    select: str,
) -> str:
    """What was reached, what the rule says of it, and what the paper's table lets one expect; a line each.

    Args:
      size: training examples, their tokens, test examples.
      select: what the best step was chosen by, and `chosen`: "valid" or "test".
    """
    examples, tokens, tests = size
    reached = ", ".join(f"{WAYS[way].name} {_mean(runs)}" for way, runs in found.items())
    lines = [
        f"Weighted F1 on {tests:,} test examples, learned from {examples:,} (about {tokens:,.0f} tokens): {reached}."
    ]
    if chosen:
        lines.append(
            f"Of the ways to use pretrained weights {WAYS[chosen].name} is taken, chosen by"
            f" {'the test examples, as the recipe does' if select == 'test' else 'the validation examples'}."
        )
    for (a, b), one in verdicts.items():
        interval = _interval(one)
        lines.append(
            f"{WAYS[a].name} against {WAYS[b].name}: {one.difference:+.1f}"
            f"{f' ({interval})' if interval else ''}: {one}."
        )
    line = richness.expectation()
    expected = f"{line.gap(tokens):+.1f} ± {line.margin(tokens):.1f}"
    untried = "" if chosen else "; here pretrained weights were not tried (--config.pretrained=DIR)"
    lines.append(
        "For LoRA against all weights from random ones the paper's data sets of this size let one expect"
        f" {expected} ({CONFIDENCE:.0%} prediction interval){untried}."
    )
    return "\n".join(lines)


def _mean(runs: Sequence[Run]) -> str:
    values = [run.test for run in runs]
    return (
        mean_std(values)
        if len(values) > 1 or runs[0].seed is None
        else f"{mean_std(values)} (one seed)"
    )
