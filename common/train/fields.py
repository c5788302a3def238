"""Checks of the configuration fields that the training loop reads."""

from ml_collections import ConfigDict

from common.config import check, check_choice
from common.track.tracker import WANDB_MODES
from common.train import optimizer as optimizers

_LEAST = {
    **dict.fromkeys(
        ("train.accumulate", "train.log_steps", "checkpoint.keep", "checkpoint.keep_best"), 1
    ),
    **dict.fromkeys(("train.steps", "train.max_seconds", "eval.steps", "eval.seconds"), 0),
    **dict.fromkeys(("eval.patience", "checkpoint.steps", "checkpoint.seconds"), 0),
    "checkpoint.snapshots": 0,
}
"""Smallest allowed values."""


def validate(config: ConfigDict) -> None:
    """Checks the fields of the training loop; a task checks its own.

    Raises:
      UserError: a field has a value that is not allowed.
    """
    optimizers.validate(config.optimizer)
    check_choice("--config.wandb.mode", config.wandb.mode, WANDB_MODES)
    check(
        0 <= config.seed < 2**32, f"--config.seed must be from 0 to {2**32 - 1}, got {config.seed}"
    )
    for name, least in _LEAST.items():
        group, field = name.split(".")
        value = config[group][field]
        check(value >= least, f"--config.{name} must be at least {least}, got {value}")
    check(
        bool(config.eval.steps or config.eval.seconds),
        "evaluate by steps or by seconds: --config.eval.steps or --config.eval.seconds must be above 0",
    )
    check(
        bool(config.train.steps or config.eval.start),
        "--config.train.steps=0 leaves nothing to do but --config.eval.start=true, which is off",
    )
