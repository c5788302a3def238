"""The experiments of the paper: settings, models, depths, and the runs that its tables and figures need."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ml_collections import ConfigDict

from common import laboratory
from common.config import require
from common.metrics.curve import Curve
from common.report.groups import Group, layers_of
from common.report.runs import Run
from configs import bytelevel, masked, translation
from reservoir import finetuning, run


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

MODELS = {
    "Transformer": ("none", {}),
    "T Reservoir": ("transformer", {}),
    "FFN Reservoir": ("ffn", {}),
    # Its rate is not printed: what is skipped on average is as much as the others freeze.
    "LayerDrop": ("none", {"layerdrop": None}),
    "BiGRU Reservoir": ("bigru", {}),
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
"""Rows of tables and lines of figures: a kind of reservoir, and fields of the model. Figure 5 names placements."""


PLAIN_T_FFN = ("Transformer", "T Reservoir", "FFN Reservoir")
_CONVERGENCE = (*PLAIN_T_FFN, "LayerDrop")
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
    "table1": Needs(("iwslt",), _CONVERGENCE),
    "table2": Needs(("wmt",), _CONVERGENCE),
    "table3": Needs(("iwslt",), (*_BACKSKIP, *_CONTROLS), one_depth=True),
    "table5": Needs(("iwslt_deep",), _CONVERGENCE),
    "table6": Needs(("iwslt", "iwslt_deep", "wmt"), _CONVERGENCE),
    "table7": Needs(("iwslt", "iwslt_deep", "wmt"), _CONVERGENCE),
    "fig1": Needs(("iwslt", "wmt", "enwik8"), PLAIN_T_FFN),
    "fig3": Needs(("iwslt",), (*PLAIN_T_FFN, "BiGRU Reservoir", "CNN Reservoir")),
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
    "fig13": Needs(("iwslt",), (*_BACKSKIP, "Identity gradient"), one_depth=True),
}


def snapshot_steps(config: ConfigDict) -> range:
    """The steps of a pretraining run of which a snapshot is kept."""
    require(
        config.train.steps >= 1, f"--config.train.steps={config.train.steps} leaves nothing to keep"
    )
    every = max(config.train.steps // SNAPSHOTS, 1)
    return range(every, config.train.steps + 1, every)


@dataclass(frozen=True)
class Case:
    """One row: a model of one depth. `seed` tells its runs apart."""

    setting: str
    model: str
    layers: int
    reservoirs: int

    def name(self, seed: int) -> str:
        """Of the folder of a run; the same for rows that are the same model."""
        model = "T Reservoir" if self.model == "alternate" else self.model
        return f"{self.setting}_{self.layers}_{model.lower().replace(' ', '_')}_seed{seed}"


@dataclass(frozen=True)
class Laboratory(laboratory.Laboratory):
    """Attributes beyond what all have.

    settings: which of the settings of a table or figure; empty for all.
    depths: which depths; empty for all of the scale.
    models: which models; empty for all that a table or figure has.
    places: setting -> the folder that its data are read from.
    finetune: overrides of fine-tuning from the command line, "a.b=VALUE"; `fields` are those of pretraining.
    """

    settings: tuple[str, ...] = ()
    depths: tuple[int, ...] = ()
    models: tuple[str, ...] = ()
    places: dict[str, Path] = field(default_factory=dict)
    finetune: tuple[str, ...] = ()

    def train(self, config: ConfigDict, workdir: Path) -> dict:
        program = finetuning if config.task == "classification" else run
        return program.fit(config, workdir, self.mesh)

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
            value = case.reservoirs / case.layers if value is None else value
            config.update_from_flattened_dict({f"model.{name}": value})
        config = self.override(config, seed=seed)
        if config.task == "masked_lm":
            given = [f for f in self.fields if f.startswith("--config.checkpoint.snapshots=")]
            require(not given, f"{''.join(given)}: Figure 6 says itself what is kept")
            config.checkpoint.snapshots = snapshot_steps(config)[0]
        return config

    def needed(self, target: str) -> dict[str, list[Case]]:
        """The rows of a table or the points of a figure, by setting and then model by model.

        Raises:
          UserError: the options leave nothing of it.
        """
        settings, models, one_depth = NEEDS[target]
        found = {}
        for setting in settings:
            depths = SETTINGS[setting].depths[self.scale]
            kept = [n for n in depths if not self.depths or n in self.depths]
            if one_depth and kept:
                kept = [SHOWN[setting] if SHOWN[setting] in kept else max(kept)]
            found[setting] = [
                Case(setting, model, layers, depths[layers])
                for model in models
                if not self.models or model in self.models
                for layers in kept
                if not self.settings or setting in self.settings
            ]
        found = {setting: cases for setting, cases in found.items() if cases}
        require(
            bool(found),
            f"--settings, --models and --depths leave nothing of {target}, which has"
            f" {', '.join(settings)} and {', '.join(models)}",
        )
        return found

    def groups(self, target: str) -> dict[str, dict[Case, Group]]:
        """The same, each with the runs of all its seeds, which are trained where they are missing."""
        return {
            setting: {case: self.group(case) for case in cases}
            for setting, cases in self.needed(target).items()
        }

    def group(self, case: Case) -> Group:
        """The runs of one row."""
        runs = []
        for seed in range(1, 1 + self.seeds):
            summary, workdir = self.fit(case.name(seed), self.configuration(case, seed))
            runs.append(Run(workdir.name, summary, Curve.from_json(summary["curve"])))
        stack = layers_of(runs[0].config)
        return Group(f"{case.model}, {case.layers} layers", case.model, tuple(runs), stack)

    def workdir(self, case: Case, seed: int) -> Path:
        """The folder of a run that there is."""
        return self.out / "runs" / case.name(seed)

    def horizon(self, setting: str) -> float | str:
        """T of the AUCC in hours, or "longest"."""
        return SETTINGS[setting].horizon if self.scale == "paper" else "longest"
