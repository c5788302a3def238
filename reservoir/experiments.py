"""The experiments of the paper: settings, models, depths, and the runs that its tables and figures need."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ml_collections import ConfigDict

from common import experiments
from common.config import check, check_choice
from common.errors import UserError
from common.experiments import Experiment, Ran, Side
from common.report.groups import Group
from common.train.task import Task
from configs import bytelevel, masked, translation
from reservoir import finetuning, run
from reservoir.layers import layers_of
from reservoir.placement import placement


@dataclass(frozen=True)
class Setting:
    """A task of the paper at all its depths.

    Attributes:
      recipe: kind of reservoir -> configuration.
      sizes: the smaller sizes of that recipe.
      fields: what the setting changes in it.
      layers: the field that holds the depth.
      depths: by scale, each depth with its reservoirs.
      horizon: T of the AUCC at the scale "paper", in hours; elsewhere it is the end of the longest run.
    """

    recipe: Callable[[str], ConfigDict]
    sizes: dict[str, Callable[[ConfigDict], ConfigDict]]
    fields: dict[str, object]
    layers: str
    depths: dict[str, dict[int, int]]
    horizon: float

    def reservoirs(self, scale: str, layers: int) -> int:
        """The number of reservoirs at a depth; at one that the scale does not have, that of the nearest."""
        known = self.depths[scale]
        return known[min(known, key=lambda depth: abs(depth - layers))]


_TRANSLATION = {"laptop": translation.laptop, "tiny": translation.tiny}
_IWSLT = {"paper": dict.fromkeys((6, 8, 10, 12), 2), "laptop": {6: 2}, "tiny": {3: 1}}

SETTINGS = {
    "iwslt": Setting(
        translation.iwslt, _TRANSLATION, {"decoder_layers": 2}, "encoder_layers", _IWSLT, 4
    ),
    "iwslt_deep": Setting(
        translation.iwslt, _TRANSLATION, {"decoder_layers": 6}, "encoder_layers", _IWSLT, 4
    ),
    "wmt": Setting(
        translation.wmt,
        _TRANSLATION,
        {"decoder_layers": 1},
        "encoder_layers",
        {"paper": dict.fromkeys((12, 16, 24, 32), 4), "laptop": {12: 4}, "tiny": {4: 1}},
        20,
    ),
    # The paper shows its depths in a figure alone; of reservoirs it says 8 of 48, and 4 of 12.
    "enwik8": Setting(
        bytelevel.enwik8,
        {"laptop": bytelevel.laptop, "tiny": bytelevel.tiny},
        {},
        "layers",
        {"paper": {12: 4, 24: 8, 36: 8, 48: 8, 64: 8}, "laptop": {8: 2}, "tiny": {4: 1}},
        30,
    ),
    "roberta": Setting(
        masked.roberta,
        {"laptop": masked.laptop, "tiny": masked.tiny},
        {},
        "encoder_layers",
        {"paper": {6: 2, 8: 4, 10: 4, 12: 4}, "laptop": {6: 2}, "tiny": {3: 1}},
        60,
    ),
}

SNAPSHOTS = 5
"""From how many of a masked language model's steps Figure 6 fine-tunes; the paper does not say."""

SHOWN = {"iwslt": 8, "iwslt_deep": 8, "wmt": 24, "enwik8": 48, "roberta": 12}
"""Layers of the models whose curves Figures 7, 12 and 13 show."""

UPDATABLE = "Transformer of updatable depth"

MODELS = {
    "Transformer": ("none", {}),
    "T Reservoir": ("transformer", {}),
    "FFN Reservoir": ("ffn", {}),
    # As deep as models with reservoirs have layers that are trained: the control for depth, not in the paper's tables.
    UPDATABLE: ("none", {}),
    # Its rate is not printed: what is skipped on average is as much as the others freeze.
    "LayerDrop": ("none", {"layerdrop": lambda model, case: case.reservoirs / case.layers}),
    # What freezing does, and what the initialization does: each without the other.
    "Orthogonal T trained": ("transformer", {"reservoir_trained": True}),
    "Orthogonal FFN trained": ("ffn", {"reservoir_trained": True}),
    "Xavier T Reservoir": ("transformer", {"reservoir_init": "xavier"}),
    "Xavier FFN Reservoir": ("ffn", {"reservoir_init": "xavier"}),
    "BiGRU Reservoir": ("bigru", {}),
    "BiGRU Reservoir up-projected": (
        "bigru",
        {"reservoir_hidden": lambda model, case: model.hidden},
    ),
    "CNN Reservoir": ("cnn", {}),
    "Backskip Reservoir": ("transformer", {"backskip.estimator": "policy"}),
    "Backskip FFN Reservoir": ("ffn", {"backskip.estimator": "policy"}),
    # Not the paper's reward.
    "Backskip by own reward": (
        "transformer",
        {"backskip.estimator": "policy", "backskip.reward": "own_rms"},
    ),
    "Identity gradient": ("transformer", {"backskip.estimator": "identity"}),
    "Zero gradient": ("transformer", {"backskip.estimator": "zero"}),
    "Noise and true gradients": ("transformer", {"backskip.estimator": "noise"}),
    "alternate": ("transformer", {}),
    "bottom": ("transformer", {"placement": "bottom"}),
    "middle": ("transformer", {"placement": "middle"}),
    "top": ("transformer", {"placement": "top"}),
}
"""Rows of tables and lines of figures: a kind of reservoir, and fields of the model, some of them functions of the
recipe's model and the case. Figure 5 names placements."""


PLAIN_T_FFN = ("Transformer", "T Reservoir", "FFN Reservoir")
_CONVERGENCE = (*PLAIN_T_FFN, "LayerDrop")
_HYBRIDS = ("BiGRU Reservoir", "BiGRU Reservoir up-projected", "CNN Reservoir")
_INITIALIZATION = (
    "Orthogonal T trained",
    "Orthogonal FFN trained",
    "Xavier T Reservoir",
    "Xavier FFN Reservoir",
)
_BACKSKIP = ("Transformer", "T Reservoir", "Backskip Reservoir")
_CONTROLS = (
    "Backskip by own reward",
    "Identity gradient",
    "Zero gradient",
    "Noise and true gradients",
    "FFN Reservoir",
    "Backskip FFN Reservoir",
)


class Needs(NamedTuple):
    """The runs of a table or figure.

    Attributes:
      settings: keys of SETTINGS.
      models: keys of MODELS.
      one_depth: the one that `SHOWN` names is enough.
    """

    settings: tuple[str, ...]
    models: tuple[str, ...]
    one_depth: bool = False


NEEDS = {
    "table1": Needs(("iwslt",), (*_CONVERGENCE, UPDATABLE)),
    "table2": Needs(("wmt",), (*_CONVERGENCE, UPDATABLE)),
    "table3": Needs(("iwslt",), (*_BACKSKIP, *_CONTROLS), one_depth=True),
    "table5": Needs(("iwslt_deep",), (*_CONVERGENCE, UPDATABLE)),
    "table6": Needs(("iwslt", "iwslt_deep", "wmt"), _CONVERGENCE),
    "table7": Needs(("iwslt", "iwslt_deep", "wmt"), _CONVERGENCE),
    "fig1": Needs(("iwslt", "wmt", "enwik8"), PLAIN_T_FFN),
    "fig3": Needs(("iwslt",), (*PLAIN_T_FFN, *_HYBRIDS)),
    "fig4": Needs(("iwslt_deep",), PLAIN_T_FFN),
    "fig5": Needs(("iwslt",), ("Transformer", "alternate", "bottom", "middle", "top")),
    "fig7": Needs(("roberta",), PLAIN_T_FFN),
    "fig8": Needs(("iwslt",), PLAIN_T_FFN),
    "fig9": Needs(("wmt",), PLAIN_T_FFN),
    "fig10": Needs(("enwik8",), PLAIN_T_FFN),
    "fig12": Needs(("iwslt", "wmt", "enwik8", "roberta"), PLAIN_T_FFN, one_depth=True),
    "table4": Needs(("roberta",), ("Transformer", "T Reservoir"), one_depth=True),
    "fig2": Needs(("roberta",), PLAIN_T_FFN),
    "fig6": Needs(("roberta",), PLAIN_T_FFN, one_depth=True),
    "fig11": Needs(("roberta",), PLAIN_T_FFN),
    # Not in the paper: is it the freezing, the initialization, or the number of layers that are trained?
    "controls": Needs(("iwslt",), (*PLAIN_T_FFN, UPDATABLE, *_INITIALIZATION), one_depth=True),
    "fig13": Needs(("iwslt",), (*_BACKSKIP, "Identity gradient"), one_depth=True),
}


def snapshot_steps(config: ConfigDict) -> range:
    """The steps of a pretraining run of which a snapshot is kept."""
    check(
        config.train.steps >= 1, f"--config.train.steps={config.train.steps} leaves nothing to keep"
    )
    every = max(config.train.steps // SNAPSHOTS, 1)
    return range(every, config.train.steps + 1, every)


@dataclass(frozen=True)
class Case:
    """One row: a model of one depth. `seed` tells its runs apart.

    Attributes:
      own: whether the number of reservoirs is another than the setting has at this depth.
    """

    setting: str
    model: str
    layers: int
    reservoirs: int
    own: bool = False

    @property
    def stem(self) -> str:
        """Of the names of its runs; the same for rows that are the same model."""
        model = {"alternate": "T Reservoir", UPDATABLE: "Transformer"}.get(self.model, self.model)
        depth = f"{self.layers}r{self.reservoirs}" if self.own else str(self.layers)
        return f"{self.setting}_{depth}_{model.lower().replace(' ', '_')}"

    def name(self, seed: int) -> str:
        """Of the folder of a run."""
        return f"{self.stem}_seed{seed}"


def _group(case: Case, ran: Sequence[Ran]) -> Group:
    runs = tuple(one.run for one in ran)
    return Group(f"{case.model}, {case.layers} layers", case.model, runs, layers_of(runs[0].config))


@dataclass(frozen=True)
class ExperimentSuite(experiments.ExperimentSuite):
    """Attributes beyond what all have.

    settings: which of the settings of a table or figure; empty for all.
    depths: which depths, each with its number of reservoirs, None for that of the setting; empty for all of the
      scale.
    models: which models; empty for all that a table or figure has.
    places: setting -> the folder that its data are read from.
    finetune: overrides of fine-tuning from the command line, "a.b=VALUE"; `fields` are those of pretraining.
    """

    settings: tuple[str, ...] = ()
    depths: Mapping[int, int | None] = field(default_factory=dict)
    models: tuple[str, ...] = ()
    places: dict[str, Path] = field(default_factory=dict)
    finetune: tuple[str, ...] = ()

    def prepare(self, config: ConfigDict) -> tuple[ConfigDict, Task]:
        program = finetuning if config.task == "classification" else run
        return program.prepare(config, self.mesh)

    def configuration(self, case: Case, seed: int) -> ConfigDict:
        """Of one run."""
        setting, (kind, fields) = SETTINGS[case.setting], MODELS[case.model]
        config = setting.recipe(kind)
        if self.scale != "paper":
            config = setting.sizes[self.scale](config)
        config.model.update(setting.fields)
        config.model[setting.layers] = case.layers
        config.model.reservoirs = case.reservoirs
        if place := self.places.get(case.setting):
            config.data.source = f"files:{place}"
        for name, value in fields.items():
            value = value(config.model, case) if callable(value) else value
            config.update_from_flattened_dict({f"model.{name}": value})
        config = self.override(config, seed=seed)
        if config.task == "masked_lm":
            given = [f for f in self.fields if f.startswith("--config.checkpoint.snapshots=")]
            check(not given, f"{''.join(given)}: Figure 6 says itself what is kept")
            config.checkpoint.snapshots = snapshot_steps(config)[0]
        return config

    def needed(self, target: str) -> dict[str, list[Case]]:
        """The rows of a table or the points of a figure, by setting and then model by model.

        Raises:
          UserError: the options leave nothing of it, or reservoirs do not fit.
        """
        settings, models, one_depth = NEEDS[target]
        found = {}
        for setting in settings:
            depths = [self.shown(setting)] if one_depth else self.layers(setting)
            cases = (
                self.case(setting, model, layers)
                for model in models
                if not self.models or model in self.models
                for layers in depths
                if not self.settings or setting in self.settings
            )
            found[setting] = [case for case in cases if case]
        found = {setting: cases for setting, cases in found.items() if cases}
        check(
            bool(found),
            f"--settings, --models and --depths leave nothing of {target}, which has"
            f" {', '.join(settings)} and {', '.join(models)}",
        )
        return found

    def layers(self, setting: str) -> list[int]:
        """The depths that were asked for, or those of the scale."""
        return list(self.depths or SETTINGS[setting].depths[self.scale])

    def shown(self, setting: str) -> int:
        """The one of them whose curves the paper shows, or the deepest."""
        depths = self.layers(setting)
        return SHOWN[setting] if SHOWN[setting] in depths else max(depths)

    def case(self, setting: str, model: str, layers: int) -> Case | None:
        """The row of a model at a depth; without reservoirs there are plain ones alone.

        Raises:
          UserError: the reservoirs do not fit, or leave no layer that is trained.
        """
        usual = SETTINGS[setting].reservoirs(self.scale, layers)
        given = self.depths.get(layers)
        number = usual if given is None else given
        if number == 0:
            return Case(setting, model, layers, usual) if model == "Transformer" else None
        kind, fields = MODELS[model]
        try:
            placement(layers, number if kind != "none" else 0, fields.get("placement", "alternate"))
            check(
                model == "Transformer" or number < layers,
                f"{model}: {number} of {layers} layers leave none",
            )
        except (ValueError, UserError) as error:
            raise UserError(
                f"--depths={layers}: {error}; --depths={layers}:R says how many reservoirs"
            ) from error
        if model == UPDATABLE:
            layers -= number
            return Case(setting, model, layers, SETTINGS[setting].reservoirs(self.scale, layers))
        return Case(setting, model, layers, number, number != usual)

    def groups(self, target: str) -> dict[str, dict[Case, Group]]:
        """The same, each with the runs of all its seeds, which are trained where they are missing."""
        needed = self.needed(target)
        cases = [case for some in needed.values() for case in some]
        found = self.runs({case.stem: partial(self.configuration, case) for case in cases})
        return {
            setting: {case: _group(case, found[case.stem]) for case in some}
            for setting, some in needed.items()
        }

    def group(self, case: Case) -> Group:
        """The runs of one row."""
        return _group(case, self.runs({case.stem: partial(self.configuration, case)})[case.stem])

    def workdir(self, case: Case, seed: int) -> Path:
        """The folder of a run that there is."""
        return self.out / "runs" / case.name(seed)

    def horizon(self, setting: str) -> float | str:
        """T of the AUCC in hours, or "longest"."""
        return SETTINGS[setting].horizon if self.scale == "paper" else "longest"

    def side(self, text: str) -> Side:
        """A row of a table: "iwslt: T Reservoir" at the depth of `shown`, "wmt@24: T Reservoir" at another.

        "sst2: T Reservoir" and "mnli: ..." are fine-tuned from such a row of roberta, its frozen layers kept; a way of
        `downstream.NAMES` may follow, as in "sst2: T Reservoir, reservoirs tuned".

        Raises:
          UserError: there is no such setting, model or way, or the reservoirs do not fit.
        """
        from reservoir import downstream  # which needs this module

        where, _, row = text.partition(": ")
        setting, at, layers = where.partition("@")
        check_choice(f"{text}: setting", setting, (*SETTINGS, *downstream.TASKS))
        check(layers.isdecimal() or not at, f"{text}: {layers!r} is no number of layers")
        depth = int(layers) if at else None
        if setting in downstream.TASKS:
            return downstream.side(self, text, setting, row, depth)
        case, missing = self.named(text, setting, row, depth)
        if case is None:
            return Side("", lambda seed: ConfigDict(), missing)
        return Side(case.stem, partial(self.configuration, case), missing)

    def named(
        self, text: str, setting: str, model: str, layers: int | None
    ) -> tuple[Case | None, str]:
        """The row that a side of a claim names, and why it cannot be run; no row where the options leave it out.

        Raises:
          UserError: there is no such model, or the reservoirs do not fit.
        """
        check_choice(f"{text}: model", model, MODELS)
        if self.settings and setting not in self.settings:
            return None, "--settings leaves it out"
        if self.models and model not in self.models:
            return None, "--models leaves it out"
        case = self.case(setting, model, layers or self.shown(setting))
        if case is None:
            return None, "--depths leaves no reservoirs"
        if layers and layers not in self.layers(setting):
            return case, f"--depths={layers}"
        kind, _, place = self.configuration(case, 1).data.source.partition(":")
        there = kind != "files" or Path(place).exists()
        return case, "" if there else f"--data={setting}=DIR"

    def runs(self, cases: Mapping[str, Experiment]) -> dict[str, list[Ran]]:
        """As for all papers; what is fine-tuned comes last, since it starts from runs that may be among the others."""
        last = {n: make for n, make in cases.items() if make(1).task == "classification"}
        first = {name: make for name, make in cases.items() if name not in last}
        found: dict[str, list[Ran]] = {}
        for some in filter(None, (first, last)):
            found |= super().runs(some)
        return found
