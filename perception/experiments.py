"""The grid of Table 1: backbones, data sets and ways of training, and the runs of each cell."""

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
"""Configuration fields that a cell sets; overrides are rejected."""

PRINTED_MODES = ("lora", "full")
"""Values of `config.finetune` in the paper's table."""

TOKENIZER = "full_pretrained_tokenizer"
"""Full training from random weights with the pretrained tokenizer (section 2.3)."""

MODES = (*PRINTED_MODES, "full_pretrained", TOKENIZER)
"""All ways of training; the last two are not in the paper's table."""

LAPTOP = "arctic_xs"

EMBEDDED = "embedded"
"""The data set of the scale "tiny": paragraphs of the Python manual."""


def backbones() -> tuple[str, ...]:
    """Returns the backbones of Table 1 in its order."""
    return tuple(dict.fromkeys(name for name, _ in printed.table1()))


def stand_ins() -> dict[str, str]:
    """Returns family -> the backbone of Table 1 whose row holds the results of the family's small backbone."""
    return {BACKBONES[name].family: name for name in reversed(backbones())}


@dataclass(frozen=True)
class Case:
    """A cell of the table."""

    backbone: str
    dataset: str
    mode: str

    @property
    def finetune(self) -> str:
        """Value of `config.finetune`."""
        return "full" if self.mode == TOKENIZER else self.mode

    @property
    def column(self) -> str:
        """Column of Table 1."""
        return EMBEDDED if self.dataset == EMBEDDED else DATASETS[self.dataset].column


@dataclass(frozen=True)
class ExperimentSuite(experiments.ExperimentSuite):
    """The runs of Table 1 at one scale.

    Attributes beyond those of the base class:
      recipe: "fixed" or "paper".
      backbones, datasets, modes: subset of Table 1. Empty means all data sets, the printed modes, and all backbones
        ("tiny": the small backbone of each family; "laptop": the smallest).
      sources: data set -> "files:DIR" or another source.
      weights: backbone -> directory of its pretrained weights.
    """

    recipe: str = "fixed"
    backbones: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ()
    modes: tuple[str, ...] = ()
    sources: dict[str, str] = field(default_factory=dict)
    weights: dict[str, Path] = field(default_factory=dict)

    def prepare(self, config: ConfigDict) -> tuple[ConfigDict, Task]:
        return run.prepare(config, self.mesh)

    def cases(self) -> list[Case]:
        """Returns the selected cells, row by row.

        Raises:
          UserError: the scale "tiny" is combined with data sets.
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
            self.scale != "tiny" or not (self.datasets or self.sources),
            "--scale=tiny uses embedded text: remove --datasets and --data",
        )

    def missing(self, case: Case) -> str:
        """Returns the option that the cell still needs, or ""."""
        if case.dataset != EMBEDDED and case.dataset not in self.sources:
            return f"--data={case.dataset}=DIR"
        if case.mode != "full" and case.backbone not in self.weights:
            return f"--pretrained={case.backbone}=DIR"
        return ""

    def stem(self, case: Case) -> str:
        """Returns the name of a cell's runs without the seed; it depends on the recipe."""
        recipe = "" if self.recipe == "fixed" else f"_{self.recipe}"
        return f"{case.dataset}_{case.backbone}_{case.mode}{recipe}"

    def name(self, case: Case, seed: int) -> str:
        """Returns the directory name of a run."""
        return f"{self.stem(case)}_seed{seed}"

    def check(self) -> None:
        """Validates the configurations of all cells that can run.

        Raises:
          UserError: the configuration of a cell is invalid.
        """
        for case in self.cases():
            if not self.missing(case):
                run.validate(self.configuration(case, 1))

    def configuration(self, case: Case, seed: int) -> ConfigDict:
        """Returns the configuration of one run.

        Raises:
          UserError: an override sets a field that the cell sets.
        """
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
            own |= {"dataset": case.dataset, "data.source": self.sources[case.dataset]}
        fixed = tuple(f"--config.{name}=" for name in FIXED)
        overrides = [text for text in self.fields if text.startswith(fixed)]
        check(
            not overrides,
            f"{' '.join(overrides)}: each cell of the table sets this field, remove it",
        )
        return self.override(config, seed=seed, **own)

    def summaries(self, cases: Sequence[Case]) -> dict[Case, list[dict]]:
        """Trains missing runs; returns the summaries of each cell, none for cells that cannot run."""
        known = {self.stem(c): partial(self.configuration, c) for c in cases if not self.missing(c)}
        found = self.runs(known) if known else {}
        return {case: [ran.summary for ran in found.get(self.stem(case), [])] for case in cases}

    def side(self, text: str) -> Side:
        """Parses "DATASET: MODE" (backbone arctic_xs) or "DATASET@BACKBONE: MODE", such as "sst2@phi_2: full".

        The scale "tiny" replaces the data set by the embedded one and the backbone by the small one of its family.

        Raises:
          UserError: data set, backbone or mode is unknown, or the configuration is invalid.
        """
        where, _, mode = text.partition(": ")
        dataset, at, backbone = where.partition("@")
        check_choice(f"{text}: data set", dataset, DATASETS)
        check_choice(f"{text}: way", mode, MODES)
        backbone = backbone if at else LAPTOP
        check_choice(f"{text}: backbone", backbone, backbones())
        self._check_embedded()
        subsets = {
            "--datasets": (self.datasets, dataset),
            "--backbones": (self.backbones, backbone),
            "--modes": (self.modes, mode),
        }
        for option, (subset, name) in subsets.items():
            if subset and name not in subset:
                return Side("", lambda seed: ConfigDict(), f"{option} excludes it")
        if self.scale == "tiny":
            small = stand_ins()[BACKBONES[backbone].family]
            if at and backbone != small:
                return Side("", lambda seed: ConfigDict(), f"--scale=tiny has no {backbone}")
            dataset, backbone = EMBEDDED, small
        case = Case(backbone, dataset, mode)
        missing = self.missing(case)
        if not missing:
            run.validate(self.configuration(case, 1))
        return Side(self.stem(case), partial(self.configuration, case), missing)

    def finished(self, case: Case) -> list[dict]:
        """Returns the summaries of a cell's finished runs."""
        found = []
        for seed in range(1, 1 + self.seeds):
            with suppress(OSError, ValueError):  # missing or truncated
                path = self.out / "runs" / self.name(case, seed) / SUMMARY
                found.append(json.loads(path.read_text()))
        return found


def f1(summaries: list[dict], which: str = "test") -> list[float]:
    """Returns test weighted F1 in percent, at the best step ("test") or the last step ("test_last")."""
    return [summary[which]["weighted_f1"] for summary in summaries]
