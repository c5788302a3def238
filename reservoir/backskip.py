"""Backskipping (section 4.4): in some steps, a trained layer learns without the gradient through the reservoir above.

A reservoir F stands between trained layers P below and T above. In training, F reads a = mu + sigma eps and returns y =
F(a), where mu is the output of P and eps ~ N(0, 1). An ordinary step backpropagates from y through F to P. A skipping
step does not differentiate F. In this step, P is a policy with density N(mu, sigma^2) and action a, and gets the
REINFORCE gradient. The reward R at a position depends on the gradient g of the loss at y. The baseline V(a) of
REINFORCE is learned and called the value. D is the width of the model. r is the root mean square of g over D and over
the positions where g is not 0. Padding is left out, because g is 0 there. The formulas are:

    R = -mean over D of g / r        loss of the value = (R - V)^2        gradient of mu = -scale r (R - V) eps / sigma

In this notation, the paper's value is r V. With sigma = scale = 1, the gradient of mu then is the paper's. Because of
the division by r, R does not depend on the size of g. If the loss is multiplied by a positive number, the gradient of
mu is multiplied by the same number, as in backpropagation. The fields of `config.model.backskip`:

    estimator      "policy": as above. "none" disables backskipping. The other estimators are controls. "identity" and
                   "zero" add no noise; in skipping steps, the gradient of mu is g for "identity" and 0 for "zero".
                   "noise" adds the noise of the policy, but all steps are ordinary
    warmup_steps   number of ordinary steps at the start; -1 takes the number of warm-up steps of the learning rate. The
                   value also learns in ordinary steps
    anneal, least  after the warm-up, a step is ordinary with probability p = anneal^(steps since the warm-up). Once
                   p < least, every step skips
    sigma          standard deviation of the noise, which ordinary steps have as well
    reward         "signed": the paper's R, as above. In a pre-norm model this R is 0 up to rounding: every layer that
                   reads the residual stream begins with LayerNorm, which removes the mean over D, so the mean over D
                   of g is 0. Such a run prints a warning. "own_rms" (not in the paper): minus the root mean square of g
                   over D, divided by the standard deviation of this root mean square over the positions where g
                   is not 0, or divided by r if the standard deviation is 0
    scale          factor in the gradient of mu, as above
    value_rate     learning rate of the value, which has an Adam of its own

Adjacent reservoirs form one F, with one noise eps and one value V. The gradient g at the output of the uppermost F of
the model is exact. At a lower F, in a skipping step, g comes from the trained layers above and so contains the
REINFORCE estimates of the higher F. Each F computes its own r, so estimates do not grow from one F to the next.
"""

import operator
import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from common import sharding
from common.config import check_choice, check_int, check_number
from common.errors import UserError, check
from common.model.block import Block, Context
from common.model.dropout import Key, fold
from common.model.linear import Linear
from common.model.stored import stored
from common.train.optimizer import warmup_steps
from reservoir.row_random import row_normal

ESTIMATORS = ("policy", "identity", "zero", "noise")
REWARDS = ("signed", "own_rms")

NEVER = ("none", "noise")
"""Estimators (`config.model.backskip.estimator`) with which no step skips the reservoirs."""

NOISE = 2**16 + 1
"""Number that is folded into the random key of a block to get the key of the noise. Smaller numbers are in use: 0, 1
and so on give the keys of the block's sublayers, and 2**16 gives the key of LayerDrop."""


class Rule(NamedTuple):
    """The fields of `config.model.backskip` that determine the gradient of the policy."""

    reward: str
    sigma: float
    scale: float


class Value(nnx.Module):
    """The value network V(a): an MLP of widths D, D / 4 and 1 that is applied at every position."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.up = Linear(width, max(width // 4, 1), ("embed", "mlp"), rngs=rngs)
        self.down = Linear(max(width // 4, 1), 1, ("mlp", None), rngs=rngs)

    def __call__(self, a_BLD: jax.Array) -> jax.Array:
        return self.down(jax.nn.gelu(self.up(a_BLD)), jnp.float32)[..., 0]


class Rewards(NamedTuple):
    """Rewards of a batch, computed in float32 from the gradient g of the loss at the output of the reservoirs.

    Attributes:
      reward_BL: reward R; 0 where `valid_BL` is False.
      valid_BL: whether g is not 0 at the position. False at padding.
      size: r, the root mean square of g over D and over the valid positions.
    """

    reward_BL: jax.Array
    valid_BL: jax.Array
    size: jax.Array


def rewards(g_BLD: jax.Array, rule: Rule) -> Rewards:
    """Returns the rewards for the gradient g of the loss at the output of the reservoirs."""
    g_BLD = g_BLD.astype(jnp.float32)
    valid_BL = jnp.any(g_BLD != 0, axis=-1)
    # Divide by the largest entry first: squares of a small gradient would underflow.
    largest = sharding.max_over_batch(jnp.max(jnp.abs(g_BLD)))
    largest = jnp.maximum(largest, jnp.finfo(jnp.float32).tiny)
    g_BLD = g_BLD / largest
    size = jnp.sqrt(_mean(jnp.square(g_BLD), valid_BL[..., None]))
    size = jnp.where(size > 0, size, 1)
    if rule.reward == "signed":
        reward_BL = -jnp.mean(g_BLD, axis=-1) / size
    else:
        reward_BL = -jnp.sqrt(jnp.mean(jnp.square(g_BLD), axis=-1))
        deviation = jnp.sqrt(_mean(jnp.square(reward_BL - _mean(reward_BL, valid_BL)), valid_BL))
        # If all rewards are equal, as with one position, the standard deviation is 0. Then divide by `size`.
        reward_BL = reward_BL / jnp.where(deviation > 0, deviation, size)
    return Rewards(jnp.where(valid_BL, reward_BL, 0), valid_BL, size * largest)


def _mean(x: jax.Array, where: jax.Array) -> jax.Array:
    """Returns the mean of x over the batch where `where` is true; 0 if `where` is false everywhere."""
    where = jnp.broadcast_to(where, x.shape)
    sums = jnp.sum(x, where=where), jnp.sum(where, dtype=jnp.float32)
    total, count = sharding.sum_over_batch(sums)
    return total / jnp.maximum(count, 1)


def _error(rule: Rule, value_BL: jax.Array, g_BLD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (V - R, r), defined in the module docstring. V - R is (B, L), and 0 at positions where `g_BLD` is 0."""
    reward_BL, valid_BL, size = rewards(g_BLD, rule)
    return jnp.where(valid_BL, value_BL - reward_BL, 0), size


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def observe(rule: Rule, y_BLD: jax.Array, value_BL: jax.Array) -> jax.Array:
    """Returns y, in an ordinary step. Backward: y gets its gradient unchanged, and V the gradient of (R - V)^2."""
    return y_BLD


def _observe_backward(rule, value_BL, g_BLD):
    error_BL, _ = _error(rule, value_BL, g_BLD)
    return g_BLD, 2 * error_BL


observe.defvjp(lambda rule, y, value: (y, value), _observe_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def skip(
    rule: Rule,
    y_BLD: jax.Array,
    mu_BLD: jax.Array,
    noise_BLD: jax.Array,
    value_BL: jax.Array,
) -> jax.Array:
    """Returns y, in a skipping step.

    Backward: y gets no gradient, mu gets the REINFORCE gradient, and V gets the gradient of (R - V)^2.
    """
    return y_BLD


def _skip_forward(rule, y_BLD, mu_BLD, noise_BLD, value_BL):
    return y_BLD, (noise_BLD, value_BL)


def _skip_backward(rule, residuals, g_BLD):
    noise_BLD, value_BL = residuals
    error_BL, size = _error(rule, value_BL, g_BLD)
    gradient_BLD = (rule.scale / rule.sigma) * size * error_BL[..., None] * noise_BLD
    zero_BLD = jnp.zeros_like(noise_BLD)
    return jnp.zeros_like(g_BLD), gradient_BLD.astype(noise_BLD.dtype), zero_BLD, 2 * error_BL


skip.defvjp(_skip_forward, _skip_backward)


@jax.custom_vjp
def stand_for(y_BLD: jax.Array, x_BLD: jax.Array) -> jax.Array:
    """Straight-through estimator: returns y. Backward: x gets the gradient of y, and y gets no gradient.

    The result equals y to the bit, unlike x + stop_gradient(y - x).
    """
    return y_BLD


stand_for.defvjp(lambda y, x: (y, None), lambda _, g_BLD: (jnp.zeros_like(g_BLD), g_BLD))


def estimate(
    function: Callable[[jax.Array], jax.Array],
    mu_BLD: jax.Array,
    key: jax.Array,
    *,
    estimator: str,
    rule: Rule,
    value: Callable[[jax.Array], jax.Array] | None,
    skipping: bool,
) -> jax.Array:
    """Returns F(mu + sigma eps) in a training step, or F(mu) for the estimators "identity" and "zero".

    Args:
      function: F. Its output has the shape of its input, except that the last axis may have another size (not for
        "identity"). All other axes are positions.
      key: random key of the noise eps.
      estimator: one of ESTIMATORS.
      value: the value network of the estimator "policy"; None for other estimators.
      skipping: whether the step skips F, that is, does not differentiate F. Ignored by the estimator "noise".
    """
    if estimator in ("identity", "zero"):
        if not skipping:
            return function(mu_BLD)
        # In a decoder, stop_gradient also cuts the gradient that flows through the reservoir to the encoder's output.
        y_BLD = jax.lax.stop_gradient(function(mu_BLD))
        return y_BLD if estimator == "zero" else stand_for(y_BLD, mu_BLD)
    noise_BLD = stored(row_normal(key, mu_BLD.shape, mu_BLD.dtype))
    action_BLD = mu_BLD + rule.sigma * noise_BLD
    if estimator == "noise":
        return function(action_BLD)
    fixed_BLD = jax.lax.stop_gradient(action_BLD)
    value_BL = value(fixed_BLD)
    if not skipping:
        return observe(rule, function(action_BLD), value_BL)
    y_BLD = jax.lax.stop_gradient(function(fixed_BLD))
    return skip(rule, y_BLD, mu_BLD, noise_BLD, value_BL)


class BackskipBlock(Block):
    """Adjacent reservoirs as one block, which skipping steps do not differentiate.

    Attributes:
      skipping: whether the current step skips the reservoirs; set by `reservoir.skipping.Backskipping`.
      baseline: the value network; None unless the estimator is "policy".
    """

    def __init__(self, blocks: list[Block], model: ConfigDict, *, rngs: nnx.Rngs):
        super().__init__([residual for block in blocks for residual in block.residuals])
        settings = model.backskip
        self.estimator, self.skipping = settings.estimator, False
        self.rule = Rule(settings.reward, settings.sigma, settings.scale)
        self.baseline = Value(model.width, rngs=rngs) if self.estimator == "policy" else None

    def __call__(self, x_BLD: jax.Array, context: Context, key: Key = None) -> jax.Array:
        reservoirs = super().__call__
        if key is None:
            return reservoirs(x_BLD, context)
        return estimate(
            lambda a_BLD: reservoirs(a_BLD, context, key),
            x_BLD,
            fold(key, NOISE),
            estimator=self.estimator,
            rule=self.rule,
            value=self.baseline,
            skipping=self.skipping,
        )


def backskipped(
    blocks: list[Block], reservoirs: tuple[int, ...], model: ConfigDict, *, rngs: nnx.Rngs
) -> list[Block]:
    """Returns the layers of a stack, where one `BackskipBlock` replaces each group of adjacent reservoirs."""
    made: list[Block] = []
    group: list[Block] = []
    for layer, block in enumerate(blocks):
        if layer in reservoirs:
            group.append(block)
            if layer + 1 not in reservoirs:
                made.append(BackskipBlock(group, model, rngs=rngs))
                group = []
        else:
            made.append(block)
    return made


def warmup(config: ConfigDict) -> int:
    """Returns the number of warm-up steps, which do not skip the reservoirs."""
    own = config.model.backskip.warmup_steps
    return warmup_steps(config.optimizer, config.train.steps) if own == -1 else own


def skips(config: ConfigDict, step: int) -> bool:
    """Returns whether a step of a run skips the reservoirs (`is_skipping_step`); False for estimators in `NEVER`."""
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
            f"step must be an int, got {step!r} of type {type(step).__name__}; if jit traces the step, call this"
            " function outside of jit"
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
    # The third element, 1, makes this draw independent of `common.data.windows.Crops`, which has the seed (seed, step).
    return ordinary < least or np.random.default_rng((seed, step, 1)).random() >= ordinary


def validate(model: ConfigDict) -> None:
    """Checks the fields of `config.model.backskip`.

    Raises:
      UserError: a field has an invalid value, or the estimator is not "none" and the model has no reservoirs.
    """
    settings, name = model.backskip, "--config.model.backskip"
    check_choice(f"{name}.estimator", settings.estimator, ("none", *ESTIMATORS))
    check_choice(f"{name}.reward", settings.reward, REWARDS)
    check(
        settings.estimator == "none" or model.reservoir != "none",
        f"{name}.estimator={settings.estimator} needs a model with reservoirs, but --config.model.reservoir is none:"
        f" set a kind, such as --config.model.reservoir=ffn, or {name}.estimator=none",
    )
    check(
        settings.warmup_steps >= -1,
        f"{name}.warmup_steps must be at least 0, or -1 for the optimizer's warm-up, got {settings.warmup_steps}",
    )
    check(settings.scale >= 0, f"{name}.scale must not be negative, got {settings.scale}")
    for field in ("sigma", "value_rate"):
        check(settings[field] > 0, f"{name}.{field} must be above 0, got {settings[field]}")
    check(0 <= settings.least <= 1, f"{name}.least must be from 0 to 1, got {settings.least}")
    check(
        0 <= settings.anneal < 1,
        f"{name}.anneal must be at least 0 and below 1 (with 1, no step would skip), got {settings.anneal}",
    )


def validate_steps(config: ConfigDict) -> None:
    """Checks that at least two steps follow the warm-up, because the first of them never skips the reservoirs.

    Warns if the reward is 0 up to rounding.

    Raises:
      UserError: the estimator is not in `NEVER`, and at most one step follows the warm-up.
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
            " (--config.model.norm=pre), because LayerNorm removes the mean of its input: the policy learns from"
            f" rounding errors; set --config.model.norm=post or {name}.reward=own_rms",
            file=sys.stderr,
        )
