"""Recipes of byte language models with and without reservoirs (section 4.2 of the reservoir paper)."""

from ml_collections import ConfigDict

from configs import language, reservoirs, training


def enwik8(reservoir: str) -> ConfigDict:
    """Returns the configuration of a byte language model of enwik8 with 48 layers (the paper: 12 to 64).

    The paper cites a recipe (Bachlechner et al.) but prints no hyperparameters.

    Args:
      reservoir: kind of reservoir of 8 of the 48 layers. "none" makes a model without reservoirs.
    """
    config = language.base("reservoir", "enwik8")
    config.task = "language_modelling"
    config.data.batch = 64
    config.model = ConfigDict(
        {
            "layers": 48,
            "width": 512,
            "hidden": 2048,
            "heads": 8,
            "length": 512,
            "activation": "relu",
            "dropout": 0.1,
            "attention_dropout": 0.0,
            "norm": "pre",
            "positions": "sinusoidal",
            "tied": True,
            "remat": "none",
            "dtype": "auto",
            **reservoirs.fields(),
            "reservoir": reservoir,
        }
    )
    config.model.reservoirs = 8
    config.optimizer.update(
        {"learning_rate": 2.5e-4, "schedule": "cosine", "warmup_steps": 4000, "beta2": 0.98}
    )
    config.train.steps = 100_000
    config.eval.stride = 256
    return config.lock()


def laptop(config: ConfigDict) -> ConfigDict:
    """Reduces a recipe to 8 layers, half the width and 2,000 steps of 4,096 bytes, for two CPU cores."""
    config.model.update({"layers": 8, "width": 256, "hidden": 1024, "heads": 4, "length": 256})
    config.model.update({"reservoirs": 2, "dropout": 0.0, "dtype": "bfloat16"})
    config.data.batch = 16
    config.optimizer.update({"learning_rate": 1e-3, "warmup_steps": 200})
    config.train.steps = 2000
    config.eval.update({"steps": 200, "stride": 128, "batch": 64, "tokens": 100_000})
    config.checkpoint.steps = 200
    return config


def tiny(config: ConfigDict) -> ConfigDict:
    """Reduces a recipe to a small model on the Python manual (embedded:python): about a minute on two CPU cores."""
    config.data.update({"source": "embedded:python", "file": "", "batch": 16})
    config.model.update({"layers": 4, "width": 64, "hidden": 256, "heads": 4, "length": 64})
    config.model.update({"reservoirs": 1, "dropout": 0.0, "dtype": "float32"})
    config.optimizer.update({"learning_rate": 3e-3, "warmup_steps": 50})
    config.train.steps = 400
    config.eval.update({"steps": 100, "stride": 32, "batch": 64, "tokens": 20_000})
    config.checkpoint.steps = 100
    return config


def choose(config: ConfigDict, argument: str) -> ConfigDict:
    return training.choose(config, argument, laptop=laptop, tiny=tiny)
