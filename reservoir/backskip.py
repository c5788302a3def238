"""Backskipping (section 4.4): a trained layer learns without the gradient that passes through the reservoir above it.

A reservoir F stands between trained layers P below and T above. In training a = mu + sigma eps, with mu what P gives,
and y = F(a). Ordinarily P is given the gradient of y through F. Skipping, F is not differentiated: P is a policy with
the density N(mu, sigma^2), its action a earns a reward at every position, made of the gradient g that arrives at y,
and its gradient is that of REINFORCE with a learned baseline V(a), the value:

    reward = -mean over d of g        value loss = (reward - V)^2        gradient of mu = -(reward - V) eps / sigma

So far as printed; what the paper leaves open is a field of `config.model.backskip`:

    estimator      "policy"; as controls "identity" (mu is given g, as through the residual connection alone) and "zero"
                   (it is given nothing), both without noise; "none" trains through the reservoirs
    warmup_steps   this long every step is an ordinary one (-1: as long as the learning rate rises); the value learns in
                   all steps
    anneal, least  afterwards a step is ordinary with the probability anneal^(steps since), below `least` never
    sigma          of the noise, in ordinary steps too
    reward         "norm": minus the root mean square of g over d. "signed": minus its mean, as printed; but what reads
                   a sum only through norms, as pre-norm layers do, does not see a shift of it, so there the mean of its
                   gradient is 0, and the reward nothing but rounding (a run says so)
    normalize      the reward is divided by its standard deviation over the batch: it is small and shrinks
    scale          of the gradient of mu
    value_rate     learning rate of the value, which has an Adam of its own

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

from common.config import choose, require
from common.model.block import Block, Context
from common.model.dropout import fold
from common.model.linear import Linear
from common.train.optimizer import warmup_steps

ESTIMATORS = ("policy", "identity", "zero")
REWARDS = ("signed", "norm")

NOISE = 2**16 + 1
"""Where a block's key is folded for its noise: beyond any of its residuals, and LayerDrop's."""


class Rule(NamedTuple):
    """The fields that the gradient depends on."""

    reward: str
    normalize: bool
    sigma: float
    scale: float


class Value(nnx.Module):
    """V(a), a number for every position: D -> D / 4 -> 1."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.up = Linear(width, max(width // 4, 1), ("embed", "mlp"), rngs=rngs)
        self.down = Linear(max(width // 4, 1), 1, ("mlp", None), rngs=rngs)

    def __call__(self, a_BLD: jax.Array) -> jax.Array:
        return self.down(jax.nn.gelu(self.up(a_BLD)), jnp.float32)[..., 0]


def rewards(g_BLD: jax.Array, rule: Rule) -> tuple[jax.Array, jax.Array]:
    """What each position earns for the gradient that arrives above it, and which positions count, (B, L) both.

    Padding counts for nothing: no gradient arrives there, in an encoder or a decoder.
    """
    g_BLD = g_BLD.astype(jnp.float32)
    valid_BL = jnp.any(g_BLD != 0, axis=-1)
    if rule.reward == "signed":
        reward_BL = -jnp.mean(g_BLD, axis=-1)
    else:
        reward_BL = -jnp.sqrt(jnp.mean(jnp.square(g_BLD), axis=-1))
    if rule.normalize:
        deviation = jnp.std(reward_BL, where=valid_BL)
        reward_BL = reward_BL / jnp.maximum(deviation, 1e-20)
    return jnp.where(valid_BL, reward_BL, 0), valid_BL


def _error(rule: Rule, value_BL: jax.Array, g_BLD: jax.Array) -> jax.Array:
    """By how much the value is above the reward, (B, L)."""
    reward_BL, valid_BL = rewards(g_BLD, rule)
    return jnp.where(valid_BL, value_BL - reward_BL, 0)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def observe(rule: Rule, y_BLD: jax.Array, value_BL: jax.Array) -> jax.Array:
    """y; the gradient passes, and teaches the value what it would have earned."""
    return y_BLD


def _observe_backward(rule, value_BL, g_BLD):
    return g_BLD, 2 * _error(rule, value_BL, g_BLD)


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
    error_BL = _error(rule, value_BL, g_BLD)
    gradient_BLD = error_BL[..., None] * noise_BLD * (rule.scale / rule.sigma)
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
        self.rule = Rule(settings.reward, bool(settings.normalize), settings.sigma, settings.scale)
        self.baseline = Value(model.width, rngs=rngs) if self.estimator == "policy" else None

    def __call__(
        self, x_BLD: jax.Array, context: Context, key: jax.Array | None = None
    ) -> jax.Array:
        if key is None:
            return super().__call__(x_BLD, context)
        if self.estimator == "policy":
            return self._policy(x_BLD, context, key)
        if not self.skipping:
            return super().__call__(x_BLD, context, key)
        # Of what it reads of an encoder, a decoder's reservoir is not differentiated either.
        y_BLD = jax.lax.stop_gradient(super().__call__(x_BLD, context, key))
        return y_BLD if self.estimator == "zero" else stand_for(y_BLD, x_BLD)

    def _policy(self, mu_BLD: jax.Array, context: Context, key: jax.Array) -> jax.Array:
        noise_BLD = jax.random.normal(fold(key, NOISE), mu_BLD.shape, mu_BLD.dtype)
        action_BLD = mu_BLD + self.rule.sigma * noise_BLD
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
    if settings.estimator == "none" or since < 0:
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

    def own_rates(self) -> dict[str, float]:
        """The value's learning rate."""
        return {"baseline": self.config.model.backskip.value_rate}


def validate(model: ConfigDict) -> None:
    """The fields of `config.model.backskip`.

    Raises:
      UserError: one is unknown, does not fit, or there is nothing to skip.
    """
    settings, name = model.backskip, "--config.model.backskip"
    choose(f"{name}.estimator", settings.estimator, ("none", *ESTIMATORS))
    choose(f"{name}.reward", settings.reward, REWARDS)
    require(
        settings.estimator == "none" or model.reservoir != "none",
        f"{name}.estimator={settings.estimator} with no reservoir to skip: --config.model.reservoir is none",
    )
    require(
        settings.warmup_steps >= -1,
        f"{name}.warmup_steps must be at least 0, or -1 for those of the optimizer, got {settings.warmup_steps}",
    )
    for field in ("scale", "least"):
        require(settings[field] >= 0, f"{name}.{field} must not be negative, got {settings[field]}")
    for field in ("sigma", "value_rate"):
        require(settings[field] > 0, f"{name}.{field} must be above 0, got {settings[field]}")
    require(0 <= settings.anneal <= 1, f"{name}.anneal must be from 0 to 1, got {settings.anneal}")


def validate_steps(config: ConfigDict) -> None:
    """A run that is to skip has to get there; and a reward that cannot teach is named.

    Raises:
      UserError: the run ends before its first step that may skip.
    """
    settings, name = config.model.backskip, "--config.model.backskip"
    require(
        settings.estimator == "none" or warmup(config) < config.train.steps,
        f"{name}.estimator={settings.estimator} never skips: {warmup(config)} steps of warm-up"
        f" ({name}.warmup_steps), and {config.train.steps} in all",
    )
    if (
        settings.estimator == "policy"
        and settings.reward == "signed"
        and config.model.norm == "pre"
    ):
        print(
            f"warning: {name}.reward=signed is 0 where norms stand before each layer, as --config.model.norm=pre has"
            " them: what is rewarded is rounding",
            file=sys.stderr,
        )
