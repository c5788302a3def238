"""Backskipping (section 4.4): a trained layer learns without the gradient that passes through the reservoir above it.

A reservoir F stands between trained layers P below and T above. In training a = mu + sigma eps, with mu the output of
P, and y = F(a). An ordinary step gives P the gradient of y through F. A step that skips does not differentiate F: P is
a policy with the density N(mu, sigma^2), its action a earns a reward R at every position, made of the gradient g that
arrives at y, and P gets the gradient of REINFORCE with a learned baseline V(a), the value. With r the root mean square
of g over all valid positions of the batch:

    R = -mean over D of g / r        loss of the value = (R - V)^2        gradient of mu = -scale r (R - V) eps / sigma

With scale = 1 this is the printed formula, its value being r V: the unit of rewards and values is the gradient's own
size. So the gradient of mu is linear in g, whether the loss is a sum or a mean over tokens, and the value learns
numbers of the order of 1. What the paper leaves open is a field of `config.model.backskip`:

    estimator      "policy"; as controls "identity" (mu gets g, as through the residual connection alone), "zero" (mu
                   gets nothing) and "noise" (the policy's noise; true gradients in all steps); "none" has neither
    warmup_steps   number of steps that are all ordinary (-1: the warm-up of the learning rate); the value learns in all
    anneal, least  afterwards a step is ordinary with the probability anneal^(steps since), below `least` never
    sigma          of the noise, in ordinary steps too
    reward         "signed": as printed. A pre-norm model reads the residual stream through norms alone, which a shift
                   of it does not change: there this mean is 0 up to rounding (a run warns). "own_rms": ours, not the
                   paper's: minus the root mean square of g over D, divided by its standard deviation over the batch
    scale          of the gradient of mu, relative to r
    value_rate     learning rate of the value, which has an Adam of its own

Neighbouring reservoirs are one F, with one noise and one value, above which g is exact. Where several F stand in a
stack, g is exact above the uppermost alone: each lower one is rewarded for the gradient that its own T is trained with,
which in a step that skips is made of the estimates above. r is taken at each F anew, so estimates do not grow from one
to the next.

B batch, L length, D width.
"""

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from common.config import check, check_choice
from common.model.block import Block, Context
from common.model.dropout import fold
from common.model.linear import Linear
from common.train.optimizer import warmup_steps

ESTIMATORS = ("policy", "identity", "zero", "noise")
REWARDS = ("signed", "own_rms")

NEVER = ("none", "noise")
"""Estimators with which no step skips."""

NOISE = 2**16 + 1
"""Where a block's key is folded for its noise: beyond any of its residuals, and LayerDrop's."""


class Rule(NamedTuple):
    """The fields that the gradient depends on."""

    reward: str
    sigma: float
    scale: float


class Value(nnx.Module):
    """V(a), a number for every position: D -> D / 4 -> 1."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.up = Linear(width, max(width // 4, 1), ("embed", "mlp"), rngs=rngs)
        self.down = Linear(max(width // 4, 1), 1, ("mlp", None), rngs=rngs)

    def __call__(self, a_BLD: jax.Array) -> jax.Array:
        return self.down(jax.nn.gelu(self.up(a_BLD)), jnp.float32)[..., 0]


class Rewards(NamedTuple):
    """Rewards of a batch, in float32.

    Attributes:
      reward_BL: 0 where a position does not count.
      valid_BL: positions that count: padding gets no gradient, in an encoder or a decoder.
      size: r, the root mean square of g over the positions that count.
    """

    reward_BL: jax.Array
    valid_BL: jax.Array
    size: jax.Array


def rewards(g_BLD: jax.Array, rule: Rule) -> Rewards:
    """Rewards of all positions for the gradient that arrives above them; the same for g and any multiple of g."""
    g_BLD = g_BLD.astype(jnp.float32)
    valid_BL = jnp.any(g_BLD != 0, axis=-1)
    # Divided by the largest first: the squares of a small gradient would underflow.
    largest = jnp.maximum(jnp.max(jnp.abs(g_BLD)), jnp.finfo(jnp.float32).tiny)
    g_BLD = g_BLD / largest
    size = jnp.sqrt(jnp.mean(jnp.square(g_BLD), where=valid_BL[..., None]))
    size = jnp.where(jnp.any(valid_BL), size, 1)
    if rule.reward == "signed":
        reward_BL = -jnp.mean(g_BLD, axis=-1) / size
    else:
        reward_BL = -jnp.sqrt(jnp.mean(jnp.square(g_BLD), axis=-1))
        deviation = jnp.std(reward_BL, where=valid_BL)
        # The deviation of a single position is 0.
        reward_BL = reward_BL / jnp.where(deviation > 0, deviation, size)
    return Rewards(jnp.where(valid_BL, reward_BL, 0), valid_BL, size * largest)


def _error(rule: Rule, value_BL: jax.Array, g_BLD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(V - R (B, L), 0 where a position does not count; r)."""
    reward_BL, valid_BL, size = rewards(g_BLD, rule)
    return jnp.where(valid_BL, value_BL - reward_BL, 0), size


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def observe(rule: Rule, y_BLD: jax.Array, value_BL: jax.Array) -> jax.Array:
    """y; the gradient passes, and teaches the value what it would have earned."""
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
    """y, of which mu is given the gradient of REINFORCE and not that through what made it."""
    return y_BLD


def _skip_forward(rule, y_BLD, mu_BLD, noise_BLD, value_BL):
    return y_BLD, (noise_BLD, value_BL)


def _skip_backward(rule, residuals, g_BLD):
    noise_BLD, value_BL = residuals
    error_BL, size = _error(rule, value_BL, g_BLD)
    gradient_BLD = (rule.scale / rule.sigma) * size * error_BL[..., None] * noise_BLD
    nothing_BLD = jnp.zeros_like(g_BLD)
    return nothing_BLD, gradient_BLD.astype(g_BLD.dtype), nothing_BLD, 2 * error_BL


skip.defvjp(_skip_forward, _skip_backward)


@jax.custom_vjp
def stand_for(y_BLD: jax.Array, x_BLD: jax.Array) -> jax.Array:
    """y to the bit, which x + (y - x) would not be; its gradient is x's, as it is."""
    return y_BLD


stand_for.defvjp(lambda y, x: (y, None), lambda _, g_BLD: (jnp.zeros_like(g_BLD), g_BLD))


class Backskip(Block):
    """Neighbouring reservoirs, through which training need not differentiate.

    Attributes:
      skipping: set on a model that is built for a step which skips.
    """

    def __init__(self, blocks: list[Block], model: ConfigDict, *, rngs: nnx.Rngs):
        super().__init__([residual for block in blocks for residual in block.residuals])
        settings = model.backskip
        self.estimator, self.skipping = settings.estimator, False
        self.rule = Rule(settings.reward, settings.sigma, settings.scale)
        self.baseline = Value(model.width, rngs=rngs) if self.estimator == "policy" else None

    def __call__(
        self, x_BLD: jax.Array, context: Context, key: jax.Array | None = None
    ) -> jax.Array:
        if key is None:
            return super().__call__(x_BLD, context)
        if self.estimator == "policy":
            return self._policy(x_BLD, context, key)
        if self.estimator == "noise":
            return super().__call__(self._noisy(x_BLD, key)[0], context, key)
        if not self.skipping:
            return super().__call__(x_BLD, context, key)
        # Of what it reads of an encoder, a decoder's reservoir is not differentiated either.
        y_BLD = jax.lax.stop_gradient(super().__call__(x_BLD, context, key))
        return y_BLD if self.estimator == "zero" else stand_for(y_BLD, x_BLD)

    def _noisy(self, mu_BLD: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(a, eps)."""
        noise_BLD = jax.random.normal(fold(key, NOISE), mu_BLD.shape, mu_BLD.dtype)
        return mu_BLD + self.rule.sigma * noise_BLD, noise_BLD

    def _policy(self, mu_BLD: jax.Array, context: Context, key: jax.Array) -> jax.Array:
        action_BLD, noise_BLD = self._noisy(mu_BLD, key)
        fixed_BLD = jax.lax.stop_gradient(action_BLD)
        value_BL = self.baseline(fixed_BLD)
        if not self.skipping:
            return observe(self.rule, super().__call__(action_BLD, context, key), value_BL)
        y_BLD = jax.lax.stop_gradient(super().__call__(fixed_BLD, context, key))
        return skip(self.rule, y_BLD, mu_BLD, noise_BLD, value_BL)


def backskipped(
    blocks: list[Block], reservoirs: tuple[int, ...], model: ConfigDict, *, rngs: nnx.Rngs
) -> list[Block]:
    """The layers of a stack, neighbouring reservoirs made one block that backskips."""
    made: list[Block] = []
    group: list[Block] = []
    for layer, block in enumerate(blocks):
        if layer in reservoirs:
            group.append(block)
            if layer + 1 not in reservoirs:
                made.append(Backskip(group, model, rngs=rngs))
                group = []
        else:
            made.append(block)
    return made


def warmup(config: ConfigDict) -> int:
    """Steps ahead of the first that may skip."""
    own = config.model.backskip.warmup_steps
    return warmup_steps(config.optimizer, config.train.steps) if own == -1 else own


def skips(config: ConfigDict, step: int) -> bool:
    """Whether a step skips: never in the warm-up, in the end always; the same for one seed on every machine."""
    settings, since = config.model.backskip, step - warmup(config)
    if settings.estimator in NEVER or since < 0:
        return False
    ordinary = settings.anneal**since
    # A stream of its own: the crops of a text are drawn from (seed, step).
    return (
        ordinary < settings.least
        or np.random.default_rng((config.seed, step, 1)).random() >= ordinary
    )


class Backskipping:
    """What a task needs besides: two losses, so two compiled steps, and which of them a step takes."""

    config: ConfigDict
    loss: Callable

    def loss_at(self, step: int) -> Callable:
        """The loss of a step."""
        return self.skipping_loss if skips(self.config, step) else self.loss

    def skipping_loss(
        self, model: nnx.Module, batch: Mapping[str, jax.Array], key: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """The same loss, with other gradients."""
        for _, part in nnx.iter_modules(model):
            if isinstance(part, Backskip):
                part.skipping = True
        return self.loss(model, batch, key)

    def learning_rate_overrides(self) -> dict[str, float]:
        """The value's learning rate."""
        return {"baseline": self.config.model.backskip.value_rate}


def validate(model: ConfigDict) -> None:
    """The fields of `config.model.backskip`.

    Raises:
      UserError: one is unknown, does not fit, or there is nothing to skip.
    """
    settings, name = model.backskip, "--config.model.backskip"
    check_choice(f"{name}.estimator", settings.estimator, ("none", *ESTIMATORS))
    check_choice(f"{name}.reward", settings.reward, REWARDS)
    check(
        settings.estimator == "none" or model.reservoir != "none",
        f"{name}.estimator={settings.estimator} with no reservoir to skip: --config.model.reservoir is none",
    )
    check(
        settings.warmup_steps >= -1,
        f"{name}.warmup_steps must be at least 0, or -1 for those of the optimizer, got {settings.warmup_steps}",
    )
    for field in ("scale", "least"):
        check(settings[field] >= 0, f"{name}.{field} must not be negative, got {settings[field]}")
    for field in ("sigma", "value_rate"):
        check(settings[field] > 0, f"{name}.{field} must be above 0, got {settings[field]}")
    check(0 <= settings.anneal <= 1, f"{name}.anneal must be from 0 to 1, got {settings.anneal}")


def validate_steps(config: ConfigDict) -> None:
    """Checks that a run reaches its first step that skips; warns of a reward that is 0.

    Raises:
      UserError: the run ends before its first step that may skip.
    """
    settings, name = config.model.backskip, "--config.model.backskip"
    check(
        settings.estimator in NEVER or warmup(config) < config.train.steps,
        f"{name}.estimator={settings.estimator} never skips: {warmup(config)} steps of warm-up"
        f" ({name}.warmup_steps), and {config.train.steps} in all",
    )
    if (
        settings.estimator == "policy"
        and settings.reward == "signed"
        and config.model.norm == "pre"
    ):
        print(
            f"warning: {name}.reward=signed, the paper's, is 0 up to rounding in a pre-norm model"
            " (--config.model.norm=pre), as norms do not see a shift: the policy is rewarded for rounding errors",
            file=sys.stderr,
        )
