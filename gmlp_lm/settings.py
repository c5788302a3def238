"""Writes Tables 1 and 2: parameter counts and hyperparameters of the three recipes and of the paper. Trains nothing."""

from ml_collections import ConfigDict

from common import variables
from common.train.optimizer import warmup_steps
from configs import language
from gmlp_lm import run
from gmlp_lm.experiments import KINDS, ExperimentSuite
from gmlp_lm.model import language_model

PRINTED_MILLIONS = {"gpt": 66, "gmlp": 71, "gmlp_attn": 72}
"""Parameter counts in the paper's Table 1, in millions, without its row GPT_origin, which is from another paper."""

UNUSED = {"gpt": 4_202_496}
"""Kind of model -> number of parameters in the authors' model that its forward pass never uses. Our models lack
these parameters."""

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
"""The hyperparameters in the paper's Table 2."""


GPT_2_TOKENS = 50_257
"""Vocabulary size of GPT-2.

With this vocabulary instead of 256 bytes, our models of the recipe "paper" have 61 (GPT), 50 (gMLP) and 51 (gMLP with
attention) million parameters. Neither vocabulary gives the numbers of the paper's Table 1.
"""


def parameters(config: ConfigDict, vocabulary: int = 256) -> int:
    """Returns the number of parameters of a configuration's model, without building its arrays."""
    abstract_model = variables.abstract(
        lambda rngs: language_model(config.model, vocabulary, rngs=rngs)
    )
    return variables.count(abstract_model)["total"]


def _checked(suite: ExperimentSuite, config: ConfigDict) -> ConfigDict:
    """Applies the command line's overrides to `config` in place, validates it and returns it."""
    run.validate(suite.override(config))
    return config


def table1(suite: ExperimentSuite) -> None:
    """Writes Table 1: parameter counts of `KINDS` in each of `language.RECIPES`, at full size whatever the scale."""
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
    """Writes Table 2: the hyperparameters of the gMLP in three recipes.

    The other models of `KINDS` differ from the gMLP only in the rows of widths.
    """
    configs = [language.choose("gmlp", "enwik8", recipe) for recipe in language.RECIPES]
    recipes = [_settings(_checked(suite, config)) for config in configs]
    rows = [
        (name, *(_text(recipe[name]) for recipe in recipes), _text(PRINTED_SETTINGS.get(name)))
        for name in recipes[0]
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
        # No field sets the GELU dropout, because our models have no dropout directly after the GELU.
        "GELU dropout": 0,
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
    """Formats a cell: None as "", floats with at most six significant digits ("0.0002", "1e-08"), others by `str`."""
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
