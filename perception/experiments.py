"""Defines the cells of Table 1 (backbone, data set, training method) and their runs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ml_collections import ConfigDict

from common import experiments
from common.config import check_choice
from common.errors import check
from common.experiments import Side
from configs.perception import get_config
from perception import printed, run
from perception.backbones import BACKBONES
from perception.datasets import DATASETS

FIXED = ("finetune", "backbone", "pretrained", "dataset", "data.source", "data.tokenizer")
"""Configuration fields that a cell of Table 1 sets. Overriding them on the command line is an error."""

PRINTED_MODES = ("lora", "full")
"""Values of `config.finetune` in Table 1."""

TOKENIZER = "full_pretrained_tokenizer"
"""Name of a training method: full training from random weights with the pretrained tokenizer (section 2.3)."""

MODES = (*PRINTED_MODES, "full_pretrained", TOKENIZER)
"""Names of the training methods of cells. The last two methods are not in Table 1."""

LAPTOP = "arctic_xs"
"""Default backbone of the cells at the scale "laptop", and of experiments whose names contain no backbone (`side`)."""

EMBEDDED = "embedded"
"""Name of the data set at the scale "tiny": paragraphs of the Python manual."""


def backbones() -> tuple[str, ...]:
    """Returns the names of the backbones in Table 1, in the order of the rows."""
    return tuple(dict.fromkeys(name for name, _ in printed.table1()))


def stand_ins() -> dict[str, str]:
    """Returns {family: first backbone of the family in Table 1}.

    At the scale "tiny", the row of this backbone shows results of the small backbone tiny_FAMILY or, for methods that
    need a pretrained model, of the model that --pretrained names for this backbone.
    """
    return {BACKBONES[name].family: name for name in reversed(backbones())}


@dataclass(frozen=True)
class Case:
    """A cell: a backbone, a data set and a training method (`mode`, one of MODES)."""

    backbone: str
    dataset: str
    mode: str

    @property
    def finetune(self) -> str:
        """The value of `config.finetune` in this cell's runs."""
        return "full" if self.mode == TOKENIZER else self.mode

    @property
    def column(self) -> str:
        """The name of the cell's column in Table 1, or EMBEDDED for the Python manual, which Table 1 lacks."""
        return EMBEDDED if self.dataset == EMBEDDED else DATASETS[self.dataset].column


@dataclass(frozen=True)
class ExperimentSuite(experiments.ExperimentSuite):
    """The runs of Table 1 at one scale.

    Attributes:
      recipe: "paper" follows the authors' program, including its mistakes; "fixed" corrects the mistakes.
      datasets: selected data sets; () means all, or the Python manual at the scale "tiny".
      modes: selected training methods; () means the methods of Table 1.
      backbones: selected backbones. () means all backbones at the scale "paper", arctic_xs at "laptop", and one small
        backbone per family at "tiny".
      sources: value of `config.data.source` for each data set, such as "files:DIR".
      weights: directory or hub name of the pretrained model for each backbone.
    """

    recipe: str = "fixed"
    backbones: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ()
    modes: tuple[str, ...] = ()
    sources: dict[str, str] = field(default_factory=dict)
    weights: dict[str, Path] = field(default_factory=dict)

    def cases(self) -> list[Case]:
        """Returns the selected cells, row by row.

        Raises:
          UserError: --datasets or --data is used at the scale "tiny", which has only the Python manual.
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
        given = {"--datasets": self.datasets, "--data": self.sources}
        check(
            self.scale != "tiny" or not any(given.values()),
            "--scale=tiny, the default, always uses the Python manual (embedded:python): remove"
            f" {' and '.join(option for option, value in given.items() if value)}, or set --scale=laptop or paper",
        )

    def missing(self, case: Case) -> str:
        """Returns the option that is missing to train `case`, such as "--data=sst2=DIR"; "" if none is missing."""
        if case.dataset != EMBEDDED and case.dataset not in self.sources:
            return f"--data={case.dataset}=DIR"
        if case.mode != "full" and case.backbone not in self.weights:
            return f"--pretrained={case.backbone}=DIR"
        return ""

    def stem(self, case: Case) -> str:
        """Returns the name of a cell's runs, without the seed."""
        recipe = "" if self.recipe == "fixed" else f"_{self.recipe}"
        return f"{case.dataset}_{case.backbone}_{case.mode}{recipe}"

    def check(self) -> None:
        """Raises a UserError if `cases` fails or a configuration is invalid. Skips cells that lack an option."""
        for case in self.cases():
            if not self.missing(case):
                run.validate(self.configuration(case, 1))

    def configuration(self, case: Case, seed: int) -> ConfigDict:
        """Returns the configuration of one run of a cell. `missing` must return "" for the cell.

        Raises:
          UserError: the command line overrides a field of FIXED or the seed, or an override is invalid.
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
        self.check_not_overridden(
            FIXED,
            f"each cell of the table sets the fields {', '.join(FIXED)}; choose cells with --backbones, --datasets,"
            " --modes, --data and --pretrained",
        )
        return self.override(config, seed=seed, **own)

    def summaries(self, cases: Sequence[Case]) -> dict[Case, list[dict]]:
        """Trains missing runs. Returns the summaries of each cell's runs; [] for a cell that cannot run (`missing`)."""
        known = {self.stem(c): partial(self.configuration, c) for c in cases if not self.missing(c)}
        found = self.runs(known) if known else {}
        return {case: [ran.summary for ran in found.get(self.stem(case), [])] for case in cases}

    def side(self, text: str) -> Side:
        """Returns the experiment that a claim names "DATASET: MODE" (backbone arctic_xs) or "DATASET@BACKBONE: MODE".

        At the scale "tiny", the Python manual replaces the data set, and the backbone of `stand_ins` with the same
        family replaces arctic_xs. A claim about a backbone that `stand_ins` lacks then has no experiment.

        Raises:
          UserError: a name in `text` is unknown, the configuration is invalid, or --datasets or --data is used at the
            scale "tiny".
        """
        where, _, mode = text.partition(": ")
        dataset, at, backbone = where.partition("@")
        check_choice(f"{text}: data set", dataset, DATASETS)
        check_choice(f"{text}: mode", mode, MODES)
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
                return Side(missing=f"{option} excludes {name}")
        if self.scale == "tiny":
            small = stand_ins()[BACKBONES[backbone].family]
            if at and backbone != small:
                return Side(missing=f"--scale=tiny has no {backbone}")
            dataset, backbone = EMBEDDED, small
        case = Case(backbone, dataset, mode)
        missing = self.missing(case)
        if not missing:
            run.validate(self.configuration(case, 1))
        return Side(self.stem(case), partial(self.configuration, case), missing)


def f1(summaries: list[dict], which: str = "test") -> list[float]:
    """Returns the test weighted F1 of each run in percent. `which` is "test" (best step) or "test_last" (last step)."""
    return [summary[which]["weighted_f1"] for summary in summaries]
