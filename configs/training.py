"""What every experiment has: the fields of the training loop. Imported by the recipes; not an experiment itself."""

from collections.abc import Callable

from ml_collections import ConfigDict


def base(paper: str) -> ConfigDict:
    """A recipe adds `data` and `model`, and what its task needs. `paper` is the package that trains it."""
    return ConfigDict(
        {
            "paper": paper,
            "seed": 1,
            "optimizer": {
                "name": "adamw",
                "learning_rate": 5e-4,
                "schedule": "inverse_sqrt",
                "warmup_steps": 4000,
                "warmup_init": 1e-7,
                "beta1": 0.9,
                "beta2": 0.98,
                "epsilon": 1e-8,
                "weight_decay": 0.0,
                # "matrices": no biases, norm scales, gate biases or position embeddings; or "all".
                "decay": "matrices",
                "clip": 0.0,
            },
            "train": {"steps": 100_000, "max_seconds": 0.0, "accumulate": 1, "log_steps": 10},
            "eval": {"start": False, "steps": 1000, "seconds": 0.0, "patience": 10, "test": True},
            "checkpoint": {
                "steps": 1000,
                "seconds": 600.0,
                "keep": 2,
                # More than 1: so many of the best by validation, whose mean is tested too.
                "keep_best": 1,
                # Every so many steps the values, without the optimizer's, are kept for good; 0 for never.
                "snapshots": 0,
            },
            "mesh": {"data": -1, "fsdp": 1, "tensor": 1},
            "wandb": {"mode": "offline", "project": "train-less", "name": "", "group": ""},
        }
    )


def choose(
    config: ConfigDict, argument: str, **sizes: Callable[[ConfigDict], ConfigDict]
) -> ConfigDict:
    """The recipe in full without an argument, or of one of the smaller `sizes`, each a function that makes it so."""
    if argument not in ("", *sizes):
        raise ValueError(f"unknown argument {argument!r}; there is {' and '.join(sizes)}")
    return sizes[argument](config) if argument else config
