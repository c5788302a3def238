"""The paper's tables and figures as data: settings, models, and which models each table or figure compares."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ml_collections import ConfigDict

from common.config import check
from configs import bytelevel, masked, translation
from reservoir.kinds import RESERVOIRS
from reservoir.placement import PLACEMENTS


@dataclass(frozen=True)
class Setting:
    """A task of the paper at all its depths.

    Attributes:
      recipe: kind of reservoir -> configuration.
      sizes: the smaller sizes of that recipe, by scale.
      fields: fields of the model that differ from the recipe.
      depth_field: the field of the model that holds the number of layers.
      depths: scale -> number of layers -> number of reservoirs.
      horizon: T of the AUCC in hours at the scale "paper". Other scales end it with the longest run.
      curve_depth: number of layers of the models whose curves Figures 7, 12 and 13 show.
    """

    recipe: Callable[[str], ConfigDict]
    sizes: dict[str, Callable[[ConfigDict], ConfigDict]]
    fields: dict[str, object]
    depth_field: str
    depths: dict[str, dict[int, int]]
    horizon: float
    curve_depth: int

    def reservoirs(self, scale: str, layers: int) -> int:
        """Returns the number of reservoirs at a depth. A depth that the scale lacks gets the number of the nearest."""
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
    # The paper plots these depths without naming them. Its text names 8 reservoirs of 48 layers and 4 of 12.
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
"""Number of pretraining snapshots that Figure 6 fine-tunes. The paper does not print it."""


def snapshot_steps(config: ConfigDict) -> range:
    """Returns the steps at which a pretraining run keeps a snapshot.

    Raises:
      UserError: the run has no steps.
    """
    steps = config.train.steps
    check(steps >= 1, f"--config.train.steps={steps}: a pretraining run needs at least 1 step")
    every = max(steps // SNAPSHOTS, 1)
    return range(every, steps + 1, every)


class Row(NamedTuple):
    """A row of a table, or a line of a figure.

    Attributes:
      kind: `model.reservoir`.
      fields: other fields of the model; a function takes (the recipe's model, the Case) and returns the value.
    """

    kind: str
    fields: dict[str, object]


PLAIN, T, FFN = "Transformer", "T Reservoir", "FFN Reservoir"

UPDATABLE = "Transformer of updatable depth"
"""Our control for depth: a plain model with as many layers as the others train."""

MODELS = {
    PLAIN: Row("none", {}),
    **{f"{kind.label} Reservoir": Row(name, {}) for name, kind in RESERVOIRS.items()},
    UPDATABLE: Row("none", {}),
    # The paper prints no probability: drop as many layers on average as the others freeze.
    "LayerDrop": Row("none", {"layerdrop": lambda model, case: case.reservoirs / case.layers}),
    # Our controls: freezing without the initialization, and the initialization without freezing.
    "Orthogonal T trained": Row("transformer", {"reservoir_trained": True}),
    "Orthogonal FFN trained": Row("ffn", {"reservoir_trained": True}),
    "Xavier T Reservoir": Row("transformer", {"reservoir_init": "xavier"}),
    "Xavier FFN Reservoir": Row("ffn", {"reservoir_init": "xavier"}),
    "BiGRU Reservoir up-projected": Row(
        "bigru", {"reservoir_hidden": lambda model, case: model.hidden}
    ),
    "Backskip Reservoir": Row("transformer", {"backskip.estimator": "policy"}),
    "Backskip FFN Reservoir": Row("ffn", {"backskip.estimator": "policy"}),
    # Our reward, not the paper's.
    "Backskip by own reward": Row(
        "transformer", {"backskip.estimator": "policy", "backskip.reward": "own_rms"}
    ),
    "Identity gradient": Row("transformer", {"backskip.estimator": "identity"}),
    "Zero gradient": Row("transformer", {"backskip.estimator": "zero"}),
    "Noise and true gradients": Row("transformer", {"backskip.estimator": "noise"}),
    **{name: Row("transformer", {"placement": name}) for name in PLACEMENTS},
}
"""Every row by its name. Figure 5 names placements."""


PLAIN_T_FFN = (PLAIN, T, FFN)
_CONVERGENCE = (*PLAIN_T_FFN, "LayerDrop")
_BACKSKIP = (PLAIN, T, "Backskip Reservoir")


class Needs(NamedTuple):
    """The runs of a table or figure.

    Attributes:
      settings: keys of SETTINGS.
      models: keys of MODELS.
      one_depth: only the depth `Setting.curve_depth`.
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
        (*PLAIN_T_FFN, "BiGRU Reservoir", "BiGRU Reservoir up-projected", "CNN Reservoir"),
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
    # Ours: does freezing, the initialization, or the number of trained layers make the difference?
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
    """A row at one depth. Its runs differ only in the seed.

    Attributes:
      custom: whether `reservoirs` differs from the setting's number at this depth.
    """

    setting: str
    model: str
    layers: int
    reservoirs: int
    custom: bool = False

    @property
    def stem(self) -> str:
        """The run name without the seed. Rows with the same model share it, and so share runs."""
        model = {"alternate": T, UPDATABLE: PLAIN}.get(self.model, self.model)
        depth = f"{self.layers}r{self.reservoirs}" if self.custom else str(self.layers)
        return f"{self.setting}_{depth}_{model.lower().replace(' ', '_')}"

    def name(self, seed: int) -> str:
        """The folder of a run."""
        return f"{self.stem}_seed{seed}"
