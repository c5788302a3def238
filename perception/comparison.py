"""The paper's question on any data: what pretrained weights, training from random ones, and counting words reach."""

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

from common import laboratory
from common.config import load, require
from common.data.labelled import LabelledText
from common.report.table import spread
from common.track.tracker import write_whole
from common.train.task import Task
from perception import baseline, datasets, finetuning, richness, run
from perception.experiments import f1

WAYS = {
    "lora": "LoRA on pretrained weights",
    "full_pretrained": "all weights, from pretrained ones",
    "head": "the head alone, on pretrained weights",
    "full": "all weights, from random ones",
}
"""By `config.finetune`."""

BASELINE = "TF-IDF and logistic regression"

FIXED = ("finetune", "seed")
"""Fields that the comparison sets itself."""


class Reached(NamedTuple):
    """What one way reached, by seed: F1 on the test examples at the last and at the best step, and what it took."""

    last: list[float]
    best: list[float]
    trained: int
    flops: float | None
    seconds: list[float]


@dataclass(frozen=True)
class Laboratory(laboratory.Laboratory):
    """Attributes beyond what all have.

    spec: the configuration, "FILE" or "FILE:ARGUMENT".
    """

    spec: str = ""

    def prepare(self, config: ConfigDict) -> tuple[ConfigDict, Task]:
        return run.prepare(config, self.mesh)

    def configuration(self, way: str, seed: int) -> ConfigDict:
        """Of one run. Without another wish the backbone is that of the weights, where they are given."""
        for name in FIXED:
            given = [f for f in self.fields if f.startswith(f"--config.{name}=")]
            require(not given, f"{''.join(given)}: the comparison sets this itself, run by run")
        config = self.override(load(self.spec), finetune=way, seed=seed)
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
        """Those that can be run: without weights only the last one.

        Raises:
          UserError: a configuration or the weights are at fault; before anything is trained.
        """
        weights = self.configuration("lora", 1).pretrained
        found = list(WAYS) if weights else ["full"]
        for way in found:
            config = self.configuration(way, 1)
            run.validate(config)
            finetuning.open_pretrained(config)
        return found

    def reached(self, way: str) -> Reached:
        """Trained for all seeds where that is missing."""
        found = [
            self.fit(f"{way}_seed{seed}", self.configuration(way, seed))[0]
            for seed in range(1, 1 + self.seeds)
        ]
        return Reached(
            f1(found, "test_last"),
            f1(found),
            found[0]["params"]["trainable"],
            float(np.mean([summary["flops"] for summary in found])),
            [summary["train_seconds"] for summary in found],
        )


def worth(lab: Laboratory) -> None:
    """Everything side by side, and the answer in a sentence."""
    ways = lab.ways()
    config = lab.configuration("full", 1)
    splits, classes = datasets.load(config)
    tokens = richness.tokens(splits["train"].texts)
    found = {way: lab.reached(way) for way in ways}
    found["baseline"] = _baseline(lab, splits, len(classes))
    rows = [
        (
            {**WAYS, "baseline": BASELINE}[way],
            spread(one.last, 2),
            spread(one.best, 2),
            one.trained,
            None if one.flops is None else f"{one.flops:.3g}",
            spread(one.seconds, 1),
        )
        for way, one in found.items()
    ]
    columns = ("", "F1, last step", "F1, best step", "parameters trained", "FLOPs", "training (s)")
    lab.write("worth", columns, rows)
    sentence = answer(found, len(splits["train"]), tokens, len(splits["test"]))
    (lab.out / "answer.txt").write_text(f"{sentence}\n")
    print(f"\n{sentence}")


def _baseline(lab: Laboratory, splits: dict[str, LabelledText], classes: int) -> Reached:
    """Computed once for the same examples, as a run is trained once."""
    path = lab.out / "baseline.json"  # not among the runs, which can be compared
    asked = {name: text.fingerprint for name, text in splits.items()}
    result = None
    with suppress(OSError, ValueError, KeyError, TypeError):  # missing, or damaged
        kept = json.loads(path.read_text())
        if kept["asked"] == asked:
            result = baseline.Baseline(**kept["result"])
    if result is None:
        print(f"\n{BASELINE}", flush=True)
        result = baseline.fit(splits)
        lab.out.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"asked": asked, "result": result._asdict()}, indent=2)
        write_whole(path, text + "\n")
    trained = result.features * (classes if classes > 2 else 1)
    return Reached([result.f1], [result.f1], trained, None, [result.seconds])


def noise(one: Sequence[float], other: Sequence[float], examples: int) -> float:
    """Two standard errors of the difference of two mean F1 (%): of the choice of test examples and of the seeds.

    The first as of two shares measured on examples of their own, which is more than on the same ones.
    """
    share = min(max((np.mean(one) + np.mean(other)) / 200, 0.0), 1.0)
    variance = 2 * 100**2 * share * (1 - share) / examples
    for some in (one, other):
        variance += np.var(some, ddof=1) / len(some) if len(some) > 1 else 0.0
    return 2 * math.sqrt(variance)


def answer(found: dict[str, Reached], examples: int, tokens: float, tests: int) -> str:
    """One sentence: what pretraining is worth here, in points of F1 at the best steps."""
    line = richness.expectation()
    expected = f"{line.gap(tokens):+.1f} ± {line.margin(tokens):.1f}"
    best = {way: float(np.mean(one.best)) for way, one in found.items()}
    size = f"On these {examples:,} training examples (about {tokens:,.0f} tokens)"
    others = f"all weights from random ones {best['full']:.1f}, {BASELINE} {best['baseline']:.1f}"
    weights = [way for way in ("lora", "full_pretrained", "head") if way in found]
    if not weights:
        return (
            f"{size} F1 is: {others}; pretrained weights were not tried (--config.pretrained=DIR), and what the"
            f" paper's data sets of this size let one expect of them is {expected}."
        )
    way = max(weights, key=best.__getitem__)
    gap = best[way] - best["full"]
    doubt = noise(found[way].best, found["full"].best, tests)
    verdict = "is worth" if gap > 0 else "costs"
    if abs(gap) <= doubt:
        verdict = "shows no worth beyond the noise,"
    beaten = best["baseline"] > max(best[way], best["full"])
    return (
        f"{size} F1 is: {WAYS[way]} {best[way]:.1f}, {others}; so pretraining {verdict} {gap:+.1f} points (give or"
        f" take {doubt:.1f}), where the paper's data sets of this size let one expect {expected}"
        + (", and counting words beats every network." if beaten else ".")
    )
