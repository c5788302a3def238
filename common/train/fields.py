"""Checks of the configuration fields that the training loop reads."""

from ml_collections import ConfigDict

from common.config import check_choice, check_least
from common.errors import check
from common.track.tracker import WANDB_MODES
from common.train import optimizer as optimizers


def validate(config: ConfigDict) -> None:
    """Raises a UserError if a field of the training loop has an invalid value. Each paper checks its own fields."""
    optimizers.validate(config.optimizer)
    check_choice("--config.wandb.mode", config.wandb.mode, WANDB_MODES)
    check_choice("--config.train.reduce_dtype", config.train.reduce_dtype, ("float32", "bfloat16"))
    check(
        0 <= config.seed < 2**32, f"--config.seed must be from 0 to {2**32 - 1}, got {config.seed}"
    )
    check_least(config, [f"train.{name}" for name in ("steps", "max_seconds", "scan_layers")], 0)
    check_least(config, [f"eval.{name}" for name in ("steps", "seconds", "patience")], 0)
    check_least(config, [f"checkpoint.{name}" for name in ("steps", "seconds", "snapshots")], 0)
    check_least(config, ("train.accumulate", "train.log_steps"))
    check_least(config, ("checkpoint.keep", "checkpoint.keep_best"))
    check(
        bool(config.eval.steps or config.eval.seconds),
        "--config.eval.steps and --config.eval.seconds are both 0: set one of them above 0, the interval between"
        " evaluations",
    )
    check(
        bool(config.train.steps or config.eval.start),
        "--config.train.steps=0 trains nothing: set it above 0, or evaluate the initial model with"
        " --config.eval.start=true",
    )
