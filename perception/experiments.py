"""Table 1's grid: backbones, data sets and ways of training; the runs of a cell, or why there can be none."""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ml_collections import ConfigDict

from common import experiments
from common.config import check, check_choice
from common.experiments import Side
from common.track.tracker import SUMMARY
from common.train.task import Task
from configs.perception import get_config
from perception import printed, run
from perception.backbones import BACKBONES
from perception.datasets import DATASETS

FIXED = ("finetune", "backbone", "pretrained", "dataset", "data.source")
"""Fields that a cell of the table sets itself."""

PRINTED_MODES = ("lora", "full")
"""Ways of training, by `config.finetune`, as the table has them."""

TOKENIZER = "full_pretrained_tokenizer"
"""Full training from random weights that reads with the tokenizer of the pretrained ones (section 2.3)."""

MODES = (*PRINTED_MODES, "full_pretrained", TOKENIZER)
"""With those that it lacks: LoRA and `full` differ in where they begin and in what is trained."""

LAPTOP = "arctic_xs"

EMBEDDED = "embedded"
"""The data set of the scale "tiny": paragraphs of the manual of Python."""


def backbones() -> tuple[str, ...]:
    """Those of Table 1 in its order."""
    return tuple(dict.fromkeys(name for name, _ in printed.table1()))


def stand_ins() -> dict[str, str]:
    """Family -> the backbone whose row the scale "tiny" fills with the small one of that family."""
    return {BACKBONES[name].family: name for name in reversed(backbones())}


@dataclass(frozen=True)
class Case:
    """A cell."""

    backbone: str
    dataset: str
    mode: str

    @property
    def finetune(self) -> str:
        """The field of the configuration."""
        return "full" if self.mode == TOKENIZER else self.mode

    @property
    def column(self) -> str:
        """Of Table 1."""
        return EMBEDDED if self.dataset == EMBEDDED else DATASETS[self.dataset].column


@dataclass(frozen=True)
class ExperimentSuite(experiments.ExperimentSuite):
    """Attributes beyond what all have.

    recipe: "fixed" or "paper".
    backbones, datasets, modes: some of those of Table 1; empty for all. Of the backbones the scale "tiny" then has one
      of each family, with its small stand-in, and "laptop" the smallest.
    places: data set -> "files:DIR" or another source.
    weights: backbone -> the folder of its pretrained weights.
    """

    recipe: str = "fixed"
    backbones: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ()
    modes: tuple[str, ...] = ()
    places: dict[str, str] = field(default_factory=dict)
    weights: dict[str, Path] = field(default_factory=dict)

    def prepare(self, config: ConfigDict) -> tuple[ConfigDict, Task]:
        return run.prepare(config, self.mesh)

    def cases(self) -> list[Case]:
        """All cells that were asked for, row by row.

        Raises:
          UserError: none was.
        """
        rows = columns = ()
        if self.scale == "laptop":
            rows = (LAPTOP,)
        if self.scale == "tiny":
            first = stand_ins().values()
            rows, columns = tuple(n for n in backbones() if n in first), (EMBEDDED,)
        self._check_embedded()
        return [
            Case(backbone, dataset, mode)
            for backbone in self.backbones or rows or backbones()
            for mode in self.modes or PRINTED_MODES
            for dataset in self.datasets or columns or DATASETS
        ]

    def _check_embedded(self) -> None:
        check(
            self.scale != "tiny" or not (self.datasets or self.places),
            "--scale=tiny is about embedded text: no --datasets, no --data",
        )

    def missing(self, case: Case) -> str:
        """Why a run cannot be made; "" where it can."""
        if case.dataset != EMBEDDED and case.dataset not in self.places:
            return f"--data={case.dataset}=DIR"
        if case.mode != "full" and case.backbone not in self.weights:
            return f"--pretrained={case.backbone}=DIR"
        return ""

    def stem(self, case: Case) -> str:
        """Of the names of a cell's runs; both recipes may have runs side by side."""
        recipe = "" if self.recipe == "fixed" else f"_{self.recipe}"
        return f"{case.dataset}_{case.backbone}_{case.mode}{recipe}"

    def name(self, case: Case, seed: int) -> str:
        """Of the folder of a run."""
        return f"{self.stem(case)}_seed{seed}"

    def check(self) -> None:
        """Of all that can be run, before anything is.

        Raises:
          UserError: the configuration of a cell is at fault.
        """
        for case in self.cases():
            if not self.missing(case):
                run.validate(self.configuration(case, 1))

    def configuration(self, case: Case, seed: int) -> ConfigDict:
        """Of one run."""
        size = "" if self.scale == "paper" else f",{self.scale}"
        config = get_config(f"{self.recipe}{size}")
        tiny = self.scale == "tiny"
        own = {"finetune": case.finetune, "backbone": case.backbone}
        if tiny:
            own["backbone"] = f"tiny_{BACKBONES[case.backbone].family}"
        if case.mode != "full":
            own["pretrained"] = str(self.weights[case.backbone])
            own["backbone"] = "auto" if tiny else case.backbone
        if case.mode == TOKENIZER:
            own["data.tokenizer"] = "pretrained"
        if not tiny:
            own |= {"dataset": case.dataset, "data.source": self.places[case.dataset]}
        given = [f for f in self.fields if f.startswith(tuple(f"--config.{n}=" for n in FIXED))]
        check(
            not given, f"{' '.join(given)}: the cells of the table set this themselves, run by run"
        )
        return self.override(config, seed=seed, **own)

    def summaries(self, cases: Sequence[Case]) -> dict[Case, list[dict]]:
        """Those of cells that are compared, trained where they are missing; none where that cannot be done."""
        known = {self.stem(c): partial(self.configuration, c) for c in cases if not self.missing(c)}
        found = self.runs(known) if known else {}
        return {case: [ran.summary for ran in found.get(self.stem(case), [])] for case in cases}

    def side(self, text: str) -> Side:
        """A cell of the table: "sst2: lora" of the backbone arctic_xs, "sst2@phi_2: full" of another one.

        The ways are those of `MODES`. At the scale "tiny" every data set is the embedded one, and a backbone the small
        one of its family.

        Raises:
          UserError: there is no such data set, backbone or way, or the configuration is at fault.
        """
        where, _, mode = text.partition(": ")
        dataset, at, backbone = where.partition("@")
        check_choice(f"{text}: data set", dataset, DATASETS)
        check_choice(f"{text}: way", mode, MODES)
        backbone = backbone if at else LAPTOP
        check_choice(f"{text}: backbone", backbone, backbones())
        self._check_embedded()
        asked = {
            "--datasets": (self.datasets, dataset),
            "--backbones": (self.backbones, backbone),
            "--modes": (self.modes, mode),
        }
        if out := [name for name, (some, one) in asked.items() if some and one not in some]:
            return Side("", lambda seed: ConfigDict(), f"{out[0]} leaves it out")
        if self.scale == "tiny":
            small = stand_ins()[BACKBONES[backbone].family]
            if at and backbone != small:
                return Side("", lambda seed: ConfigDict(), f"the scale tiny has no {backbone}")
            dataset, backbone = EMBEDDED, small
        case = Case(backbone, dataset, mode)
        missing = self.missing(case)
        if not missing:
            run.validate(self.configuration(case, 1))
        return Side(self.stem(case), partial(self.configuration, case), missing)

    def finished(self, case: Case) -> list[dict]:
        """The summaries of a cell that are there already."""
        found = []
        for seed in range(1, 1 + self.seeds):
            with suppress(OSError, ValueError):  # missing, or cut off
                path = self.out / "runs" / self.name(case, seed) / SUMMARY
                found.append(json.loads(path.read_text()))
        return found


def f1(summaries: list[dict], which: str = "test") -> list[float]:
    """Weighted F1 on the test examples, in percent: "test" of the best step, "test_last" of the last."""
    return [summary[which]["weighted_f1"] for summary in summaries]
