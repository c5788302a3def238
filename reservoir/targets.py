"""The paper's tables and figures as data: the settings, the models, and which models each table or figure compares."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ml_collections import ConfigDict

from common.errors import check
from configs import bytelevel, masked, translation
from reservoir.kinds import RESERVOIRS
from reservoir.placement import PLACEMENTS


@dataclass(frozen=True)
class Setting:
    """A task of the paper, such as IWSLT translation, with the depths of its models.

    Attributes:
      recipe: function from a kind of reservoir to the configuration at the scale "paper".
      sizes: scale "laptop" or "tiny" -> function that returns a smaller configuration.
      fields: overrides of the recipe's model fields.
      depth_field: name of the model field with the number of layers.
      depths: scale -> number of layers -> number of reservoirs.
      horizon: end of the AUCC's interval in hours, at the scale "paper". At other scales, the interval ends with the
        longest run.
      curve_depth: number of layers of the curves in the paper's Figures 7, 12 and 13. `ExperimentSuite.curve_depth`
        replaces this depth if a suite lacks it.
    """

    recipe: Callable[[str], ConfigDict]
    sizes: dict[str, Callable[[ConfigDict], ConfigDict]]
    fields: dict[str, object]
    depth_field: str
    depths: dict[str, dict[int, int]]
    horizon: float
    curve_depth: int

    def reservoirs(self, scale: str, layers: int) -> int:
        """Returns the number of reservoirs in a stack of `layers` layers: the number at the scale's nearest depth."""
        known = self.depths[scale]
        return known[min(known, key=lambda depth: abs(depth - layers))]


_TRANSLATION = {"laptop": translation.laptop, "tiny": translation.tiny}
_IWSLT = {"paper": dict.fromkeys((6, 8, 10, 12), 2), "laptop": {6: 2}, "tiny": {3: 1}}
_WMT = {"paper": dict.fromkeys((12, 16, 24, 32), 4), "laptop": {12: 4}, "tiny": {4: 1}}

SETTINGS = {
    "iwslt": Setting(
        translation.iwslt, _TRANSLATION, {"decoder_layers": 2}, "encoder_layers", _IWSLT, 4, 8
    ),
    "iwslt_deep": Setting(
        translation.iwslt, _TRANSLATION, {"decoder_layers": 6}, "encoder_layers", _IWSLT, 4, 8
    ),
    "wmt": Setting(
        translation.wmt, _TRANSLATION, {"decoder_layers": 1}, "encoder_layers", _WMT, 20, 24
    ),
    # The depths of enwik8 and roberta are read from the paper's plots. The paper's text states only 8 reservoirs in
    # 48 layers (enwik8), and 4 reservoirs in 12 layers (roberta).
    "enwik8": Setting(
        bytelevel.enwik8,
        {"laptop": bytelevel.laptop, "tiny": bytelevel.tiny},
        {},
        "layers",
        {"paper": {12: 4, 24: 8, 36: 8, 48: 8, 64: 8}, "laptop": {8: 2}, "tiny": {4: 1}},
        30,
        48,
    ),
    "roberta": Setting(
        masked.roberta,
        {"laptop": masked.laptop, "tiny": masked.tiny},
        {},
        "encoder_layers",
        {"paper": {6: 2, 8: 4, 10: 4, 12: 4}, "laptop": {6: 2}, "tiny": {3: 1}},
        60,
        12,
    ),
}

SNAPSHOTS = 5
"""Number of pretraining snapshots that Figure 6 fine-tunes, for runs of at least 25 steps. The paper does not state the
number."""


def snapshot_steps(config: ConfigDict) -> range:
    """Returns the steps at which a pretraining run keeps a snapshot.

    Raises:
      UserError: `config.train.steps` is less than 1.
    """
    steps = config.train.steps
    check(steps >= 1, f"--config.train.steps={steps}: a pretraining run needs at least 1 step")
    every = max(steps // SNAPSHOTS, 1)
    return range(every, steps + 1, every)


class Row(NamedTuple):
    """A row of a table, or a line of a figure.

    Attributes:
      kind: value of `model.reservoir`.
      fields: name of a model field -> value, or function from (model fields of the recipe, Case) to value.
    """

    kind: str
    fields: dict[str, object]


PLAIN, T, FFN = "Transformer", "T Reservoir", "FFN Reservoir"

UPDATABLE = "Transformer of updatable depth"
"""Our control for depth: a model without reservoirs, whose depth is a reservoir model's number of trained layers."""

MODELS = {
    PLAIN: Row("none", {}),
    **{f"{kind.label} Reservoir": Row(name, {}) for name, kind in RESERVOIRS.items()},
    UPDATABLE: Row("none", {}),
    # The paper does not state LayerDrop's probability. We drop, on average, as many layers as the other rows freeze.
    "LayerDrop": Row("none", {"layerdrop": lambda model, case: case.reservoirs / case.layers}),
    # Our controls. Two rows train layers with orthogonal initialization. Two rows freeze layers with Xavier
    # initialization.
    "Orthogonal T trained": Row("transformer", {"reservoir_trained": True}),
    "Orthogonal FFN trained": Row("ffn", {"reservoir_trained": True}),
    "Xavier T Reservoir": Row("transformer", {"reservoir_init": "xavier"}),
    "Xavier FFN Reservoir": Row("ffn", {"reservoir_init": "xavier"}),
    "BiGRU Reservoir up-projected": Row(
        "bigru", {"reservoir_hidden": lambda model, case: model.hidden}
    ),
    "Backskip Reservoir": Row("transformer", {"backskip.estimator": "policy"}),
    "Backskip FFN Reservoir": Row("ffn", {"backskip.estimator": "policy"}),
    # Backskipping with the reward "own_rms", which is not in the paper.
    "Backskip by own reward": Row(
        "transformer", {"backskip.estimator": "policy", "backskip.reward": "own_rms"}
    ),
    # Post-norm models, because the paper's reward is 0 up to rounding in pre-norm models.
    "Post-norm Transformer": Row("none", {"norm": "post"}),
    "Post-norm T Reservoir": Row("transformer", {"norm": "post"}),
    "Post-norm Backskip Reservoir": Row(
        "transformer", {"norm": "post", "backskip.estimator": "policy"}
    ),
    "Identity gradient": Row("transformer", {"backskip.estimator": "identity"}),
    "Zero gradient": Row("transformer", {"backskip.estimator": "zero"}),
    "Noise and true gradients": Row("transformer", {"backskip.estimator": "noise"}),
    **{name: Row("transformer", {"placement": name}) for name in PLACEMENTS},
}
"""Name of a row in tables -> row. The last rows, for Figure 5, have the names of placements."""


PLAIN_T_FFN = (PLAIN, T, FFN)
_CONVERGENCE = (*PLAIN_T_FFN, "LayerDrop")
_BACKSKIP = (PLAIN, T, "Backskip Reservoir")


class Needs(NamedTuple):
    """The settings and models of a table or figure.

    Attributes:
      settings: keys of SETTINGS.
      models: keys of MODELS.
      one_depth: whether to run the depth `ExperimentSuite.curve_depth` only.
    """

    settings: tuple[str, ...]
    models: tuple[str, ...]
    one_depth: bool = False


NEEDS = {
    "table1": Needs(("iwslt",), (*_CONVERGENCE, UPDATABLE)),
    "table2": Needs(("wmt",), (*_CONVERGENCE, UPDATABLE)),
    "table3": Needs(
        ("iwslt",),
        (
            *_BACKSKIP,
            "Backskip by own reward",
            "Identity gradient",
            "Zero gradient",
            "Noise and true gradients",
            FFN,
            "Backskip FFN Reservoir",
            "Post-norm Transformer",
            "Post-norm T Reservoir",
            "Post-norm Backskip Reservoir",
        ),
        one_depth=True,
    ),
    "table4": Needs(("roberta",), (PLAIN, T), one_depth=True),
    "table5": Needs(("iwslt_deep",), (*_CONVERGENCE, UPDATABLE)),
    "table6": Needs(("iwslt", "iwslt_deep", "wmt"), _CONVERGENCE),
    "table7": Needs(("iwslt", "iwslt_deep", "wmt"), _CONVERGENCE),
    "fig1": Needs(("iwslt", "wmt", "enwik8"), PLAIN_T_FFN),
    "fig2": Needs(("roberta",), PLAIN_T_FFN),
    "fig3": Needs(
        ("iwslt",),
        (
            *PLAIN_T_FFN,
            "BiGRU Reservoir",
            "BiGRU Reservoir up-projected",
            "CNN Reservoir",
            "gMLP Reservoir",  # not in the paper
        ),
    ),
    "fig4": Needs(("iwslt_deep",), PLAIN_T_FFN),
    "fig5": Needs(("iwslt",), (PLAIN, *PLACEMENTS)),
    "fig6": Needs(("roberta",), PLAIN_T_FFN, one_depth=True),
    "fig7": Needs(("roberta",), PLAIN_T_FFN),
    "fig8": Needs(("iwslt",), PLAIN_T_FFN),
    "fig9": Needs(("wmt",), PLAIN_T_FFN),
    "fig10": Needs(("enwik8",), PLAIN_T_FFN),
    "fig11": Needs(("roberta",), PLAIN_T_FFN),
    "fig12": Needs(("iwslt", "wmt", "enwik8", "roberta"), PLAIN_T_FFN, one_depth=True),
    "fig13": Needs(("iwslt",), (*_BACKSKIP, "Identity gradient"), one_depth=True),
    # Not in the paper: the table separates the effects of freezing, initialization and number of trained layers.
    "controls": Needs(
        ("iwslt",),
        (
            *PLAIN_T_FFN,
            UPDATABLE,
            "Orthogonal T trained",
            "Orthogonal FFN trained",
            "Xavier T Reservoir",
            "Xavier FFN Reservoir",
        ),
        one_depth=True,
    ),
}


@dataclass(frozen=True)
class Case:
    """A model (a row of a table) in a setting, with a number of layers. The runs of a case differ only in the seed.

    Attributes:
      custom: whether the number of reservoirs was set on the command line and differs from the setting's number.
    """

    setting: str
    model: str
    layers: int
    reservoirs: int
    custom: bool = False

    @property
    def stem(self) -> str:
        """Returns the name of the case's runs, without the seed.

        Equal models share runs: the row "alternate" has the runs of T, and UPDATABLE has the runs of PLAIN with the
        same number of layers (unless PLAIN is `custom`, which adds its number of reservoirs to the name).
        """
        model = {"alternate": T, UPDATABLE: PLAIN}.get(self.model, self.model)
        depth = f"{self.layers}r{self.reservoirs}" if self.custom else str(self.layers)
        return f"{self.setting}_{depth}_{model.lower().replace(' ', '_')}"

    def name(self, seed: int) -> str:
        """Returns the folder name of the run with the seed `seed`."""
        return f"{self.stem}_seed{seed}"
