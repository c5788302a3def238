"""Tables 1 and 2: parameters and settings of the three recipes beside the printed values. Trains nothing."""

from ml_collections import ConfigDict

from common import variables
from common.tasks.language_modelling import BYTES
from common.train.optimizer import warmup_steps
from configs import language
from gmlp_lm import run
from gmlp_lm.experiments import KINDS, ExperimentSuite
from gmlp_lm.model import language_model

PRINTED_MILLIONS = {"gpt": 66, "gmlp": 71, "gmlp_attn": 72}
"""Table 1. Its fourth row, GPT_origin (112 million), comes from another paper."""

UNUSED = {"gpt": 4_202_496}
"""Unused parameters of the authors' "GPT_base". Our counts leave them out."""

PRINTED_SETTINGS = {
    "batch size": 64,
    "hidden dropout": 0.1,
    "optimizer": "Adam",
    "beta 1": 0.9,
    "beta 2": 0.999,
    "epsilon": 1e-8,
    "total steps": 100_000,
    "GELU dropout": 0,
    "weight decay": 0,
    "learning rate": 2e-4,
}
"""Table 2."""


GPT_2_TOKENS = 50_257
"""GPT-2's vocabulary. With it instead of 256 bytes, the text's GPT comes near its 66 million; its gMLP does not."""


def parameters(config: ConfigDict, vocabulary: int = BYTES) -> int:
    """Returns the number of trained parameters."""
    abstract_model = variables.abstract(
        lambda: language_model(config.model, vocabulary, rngs=variables.ParamKeys(0))
    )
    return variables.count(abstract_model)["total"]


def _checked(suite: ExperimentSuite, config: ConfigDict) -> ConfigDict:
    """Returns the configuration with the overrides of the command line.

    Raises:
      UserError: an override is invalid.
    """
    run.validate(suite.override(config))
    return config


def table1(suite: ExperimentSuite) -> None:
    """Writes the parameters of the three models in the three recipes, at the paper's size for every --scale."""
    rows = []
    for kind, name in KINDS.items():
        configs = [language.choose(kind, "enwik8", recipe) for recipe in language.RECIPES]
        counts = [parameters(_checked(suite, config)) for config in configs]
        rows.append(
            (
                name,
                *(f"{count:,}" for count in counts),
                f"{UNUSED.get(kind, 0):,}",
                f"{parameters(configs[0], GPT_2_TOKENS):,}",
                f"{PRINTED_MILLIONS[kind]} million",
            )
        )
    columns = ("model", *language.RECIPES, "unused in code", "paper, 50,257 tokens", "printed")
    suite.write("table1", columns, rows)


def table2(suite: ExperimentSuite) -> None:
    """Writes the gMLP's settings in the three recipes, at the paper's size. Other models differ in widths only."""
    configs = [language.choose("gmlp", "enwik8", recipe) for recipe in language.RECIPES]
    found = [_settings(_checked(suite, config)) for config in configs]
    rows = [
        (name, *(_text(settings[name]) for settings in found), _text(PRINTED_SETTINGS.get(name)))
        for name in found[0]
    ]
    suite.write("table2", ("attribute", *language.RECIPES, "printed"), rows)


def _settings(config: ConfigDict) -> dict[str, object]:
    optimizer, train = config.optimizer, config.train
    return {
        "batch size": config.data.batch,
        "hidden dropout": config.model.dropout,
        "optimizer": {"adam": "Adam", "adamw": "AdamW"}.get(optimizer.name, optimizer.name),
        "beta 1": optimizer.beta1,
        "beta 2": optimizer.beta2,
        "epsilon": optimizer.epsilon,
        "total steps": train.steps,
        "GELU dropout": 0,  # not implemented
        "weight decay": optimizer.weight_decay,
        "weights that decay": optimizer.decay if optimizer.weight_decay else "none",
        "learning rate": optimizer.learning_rate,
        "schedule": optimizer.schedule,
        "warmup steps": warmup_steps(optimizer, train.steps),
        "clip": optimizer.clip,
        "sequence length": config.model.length,
        "width": config.model.width,
        "hidden width of the gMLP": config.model.hidden,
        "layers": config.model.layers,
    }


def _text(value: object) -> str:
    """Formats a number as a recipe writes it: 0.0002, not 0.00."""
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
