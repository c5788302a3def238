"""The configuration fields of the training loop, which the recipes of all papers share."""

from collections.abc import Callable, Sequence

from ml_collections import ConfigDict


def base(paper: str) -> ConfigDict:
    """Returns the fields of the training loop, for the paper in the package `paper`.

    A recipe adds the fields of `data`, `model` and its task. The recipe then locks the configuration: setting an
    unknown field raises an exception, except within `with config.unlocked():`.
    """
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
                # Parameters with weight decay: "all", or "matrices" (not biases, norm scales and position embeddings).
                "decay": "matrices",
                "clip": 0.0,
            },
            "train": {
                "steps": 100_000,
                "max_seconds": 0.0,
                # Number of microbatches in a batch. Their gradients are summed, and the sum is exchanged once per step.
                "accumulate": 1,
                # Dtype in which devices exchange gradients: "float32", or "bfloat16" for half the traffic.
                "reduce_dtype": "float32",
                # Stacks of at least this many layers scan their repeating layers, which then compile once. 0: no scans.
                "scan_layers": 16,
                "log_steps": 10,
            },
            "eval": {"start": False, "steps": 1000, "seconds": 0.0, "patience": 10, "test": True},
            "checkpoint": {
                "steps": 1000,
                "seconds": 600.0,
                "keep": 2,
                # Number of best checkpoints to keep. If above 1, the run also tests the mean of their parameters.
                "keep_best": 1,
                # Steps between permanent snapshots of the parameters. 0 disables snapshots.
                "snapshots": 0,
            },
            "mesh": {"data": -1, "fsdp": 1, "tensor": 1},
            "wandb": {"mode": "offline", "project": "train-less", "name": "", "group": ""},
            "data": {},
            "model": {},
        }
    )


def recipe_and_size(argument: str, recipes: Sequence[str], sizes: Sequence[str]) -> tuple[str, str]:
    """Returns the recipe and the size in an argument such as "code,tiny"; each is "" if the argument does not name it.

    Raises a ValueError for an unknown word, several recipes or several sizes.
    """
    words = [word for word in argument.split(",") if word]
    found = [[word for word in words if word in known] for known in (recipes, sizes)]
    unknown = [repr(word) for word in words if word not in (*recipes, *sizes)]
    if unknown or max(map(len, found)) > 1:
        several = "several recipes" if len(found[0]) > 1 else "several sizes"
        fault = f"unknown {' and '.join(unknown)}" if unknown else several
        raise ValueError(
            f"{fault} in the argument {argument!r}: give a recipe ({', '.join(recipes)}), a size ({', '.join(sizes)}),"
            f" or both separated by a comma, such as {recipes[1]},{sizes[-1]}"
        )
    recipe, size = ("".join(some) for some in found)
    return recipe, size


def choose(
    config: ConfigDict, argument: str, **sizes: Callable[[ConfigDict], ConfigDict]
) -> ConfigDict:
    """Returns `config` for the argument "", else `sizes[argument](config)`.

    Raises a ValueError for an unknown argument.
    """
    if argument not in ("", *sizes):
        raise ValueError(
            f"unknown argument {argument!r}; choose {' or '.join(sizes)}, or leave out the argument"
        )
    return sizes[argument](config) if argument else config
