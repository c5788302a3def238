"""Steps that skip the reservoirs (`reservoir.backskip`): schedule, loss, and checks of the configuration."""

import operator
import sys
from collections.abc import Callable, Mapping

import jax
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from common.config import check_choice, check_int, check_number
from common.errors import UserError, check
from common.model.dropout import Key
from common.train.optimizer import warmup_steps

ESTIMATORS = ("policy", "identity", "zero", "noise")
REWARDS = ("signed", "own_rms")

NEVER = ("none", "noise")
"""Values of `config.model.backskip.estimator` without skipping steps."""


def warmup(config: ConfigDict) -> int:
    """Returns the number of warm-up steps, which do not skip the reservoirs."""
    own = config.model.backskip.warmup_steps
    return warmup_steps(config.optimizer, config.train.steps) if own == -1 else own


def skips(config: ConfigDict, step: int) -> bool:
    """Returns whether a step skips the reservoirs, as a function of the seed and the step.

    No step of the warm-up skips the reservoirs. Afterwards the probability of skipping grows (`is_skipping_step`). With
    an estimator in `NEVER`, no step skips the reservoirs.
    """
    settings = config.model.backskip
    return settings.estimator not in NEVER and is_skipping_step(
        step,
        warmup(config),
        anneal=settings.anneal,
        least=settings.least,
        seed=config.seed,
    )


def is_skipping_step(
    step: int, warmup_steps: int, *, anneal: float = 0.99, least: float = 0.01, seed: int = 0
) -> bool:
    """Returns whether a training step skips the reservoirs, as a function of the seed and the step.

    Args:
      step: number of the step, from 0.
      warmup_steps: number of steps at the start that skip nothing.
      anneal: t steps after the warm-up, a step skips with probability 1 - p, where p = anneal^t.
      least: once p < least, every step skips.

    Raises:
      ValueError: an argument has the wrong type or is out of range, or `step` is traced. (Skipping steps are compiled
        separately, so call this function outside of jit.)
    """
    try:
        step = operator.index(step)
    except TypeError as error:
        raise UserError(
            f"step must be an int that jit does not trace, got {step!r} of type {type(step).__name__}: call this"
            " function outside of jit, with an int"
        ) from error
    check_int("step", step, 0)
    check_int("warmup_steps", warmup_steps, 0)
    check_int("seed", seed, 0)
    check_number("least", least)
    check_number("anneal", anneal)
    check(anneal <= 1, f"anneal must be from 0 to 1, got {anneal}")
    since = step - warmup_steps
    if since < 0:
        return False
    ordinary = anneal**since
    # The third element, 1, makes this random stream independent of the stream (seed, step) that draws training crops
    # (`common.data.windows.Crops`).
    return ordinary < least or np.random.default_rng((seed, step, 1)).random() >= ordinary


class Backskipping:
    """Mixin for a task with backskipping: adds a loss that skips the reservoirs, and so a second compiled step."""

    config: ConfigDict
    loss: Callable

    def loss_at(self, step: int) -> Callable:
        """Returns `skipping_loss` if the step skips the reservoirs, otherwise `loss`."""
        return self.skipping_loss if skips(self.config, step) else self.loss

    def skipping_loss(
        self, model: nnx.Module, batch: Mapping[str, jax.Array], key: Key
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the same value as `loss`, with gradients that skip the reservoirs.

        Sets `skipping` in the `BackskipBlock`s of `model`.
        """
        from reservoir.backskip import BackskipBlock

        for _, part in nnx.iter_modules(model):
            if isinstance(part, BackskipBlock):
                part.skipping = True
        return self.loss(model, batch, key)

    def learning_rate_overrides(self) -> dict[str, float]:
        """Returns {name of the value networks in parameter paths: their learning rate}."""
        return {"baseline": self.config.model.backskip.value_rate}


def validate(model: ConfigDict) -> None:
    """Checks the fields of `config.model.backskip`.

    Raises:
      UserError: a field is out of range, or the model has no reservoir to skip.
    """
    settings, name = model.backskip, "--config.model.backskip"
    check_choice(f"{name}.estimator", settings.estimator, ("none", *ESTIMATORS))
    check_choice(f"{name}.reward", settings.reward, REWARDS)
    check(
        settings.estimator == "none" or model.reservoir != "none",
        f"{name}.estimator={settings.estimator} needs reservoirs to skip, but --config.model.reservoir is none: set a"
        f" kind, such as --config.model.reservoir=ffn, or {name}.estimator=none",
    )
    check(
        settings.warmup_steps >= -1,
        f"{name}.warmup_steps must be at least 0, or -1 for the optimizer's warm-up, got {settings.warmup_steps}",
    )
    for field in ("scale", "least"):
        check(settings[field] >= 0, f"{name}.{field} must not be negative, got {settings[field]}")
    for field in ("sigma", "value_rate"):
        check(settings[field] > 0, f"{name}.{field} must be above 0, got {settings[field]}")
    check(0 <= settings.anneal <= 1, f"{name}.anneal must be from 0 to 1, got {settings.anneal}")


def validate_steps(config: ConfigDict) -> None:
    """Checks that a run with skipping steps has at least two steps after its warm-up.

    Warns if the reward is 0 by construction.

    Raises:
      UserError: the run has at most one step after the warm-up. (The first step after the warm-up never skips.)
    """
    settings, name = config.model.backskip, "--config.model.backskip"
    option = "--config.optimizer" if settings.warmup_steps == -1 else name
    check(
        settings.estimator in NEVER or warmup(config) + 1 < config.train.steps,
        f"{name}.estimator={settings.estimator} never skips with --config.train.steps={config.train.steps}, because the"
        f" warm-up ({option}.warmup_steps) ends at step {warmup(config)}: set --config.train.steps to at least"
        f" {warmup(config) + 2}",
    )
    if (
        settings.estimator == "policy"
        and settings.reward == "signed"
        and config.model.norm == "pre"
    ):
        print(
            f"warning: {name}.reward=signed, the paper's reward, is 0 up to rounding in a pre-norm model"
            " (--config.model.norm=pre), because norms ignore a shift: the policy learns from rounding errors; set"
            f" --config.model.norm=post or {name}.reward=own_rms",
            file=sys.stderr,
        )
