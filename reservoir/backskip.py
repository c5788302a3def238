"""Backskipping (section 4.4): a trained layer learns without the gradient that passes through the reservoir above it.

A reservoir F stands between trained layers P below and T above. In training a = mu + sigma eps, where mu is the output
of P, and y = F(a). An ordinary step backpropagates from y through F to P. A skipping step does not differentiate F: P
is a policy with density N(mu, sigma^2) and action a. Its reward R at every position depends on the gradient g at y. P
gets the REINFORCE gradient with a learned baseline V(a), the value. With r the root mean square of g over all valid
positions of the batch:

    R = -mean over D of g / r        loss of the value = (R - V)^2        gradient of mu = -scale r (R - V) eps / sigma

With scale = 1 this is the printed formula, whose value is r V. Because rewards are relative to r, the gradient of mu is
linear in g: a loss that sums over tokens and a loss that averages over them train P alike. The targets of the value are
of the order of 1. The fields of `config.model.backskip` cover what the paper leaves open:

    estimator      "policy", or a control: "identity" (mu gets g), "zero" (mu gets 0), "noise" (the policy's noise with
                   exact gradients in all steps); "none" disables backskipping
    warmup_steps   number of first steps that are all ordinary; -1 is the learning rate's warm-up. The value learns in
                   all steps
    anneal, least  after the warm-up a step is ordinary with probability anneal^(steps since the warm-up); never below
                   `least`
    sigma          standard deviation of the noise, in ordinary steps too
    reward         "signed" is printed. In a pre-norm model it is 0 up to rounding, because every reader of the residual
                   stream normalizes and so ignores a shift; such a run prints a warning. "own_rms" is ours: minus the
                   root mean square of g over D, divided by its standard deviation over the batch
    scale          factor of the gradient of mu, relative to r
    value_rate     learning rate of the value, which has its own Adam

Adjacent reservoirs form one F with one noise and one value, and g at its output is exact. With several F in a stack, g
is exact only at the uppermost. In a skipping step a lower F gets the gradient that its own T is trained with, which
contains the estimates from above. Each F computes its own r, so estimates do not grow from one F to the next.
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
"""Estimators that never skip a step."""

NOISE = 2**16 + 1
"""The fold of a block's random key for its noise; larger than the folds of its residuals and of LayerDrop."""


class Rule(NamedTuple):
    """The fields of `config.model.backskip` that the gradient depends on."""

    reward: str
    sigma: float
    scale: float


class Value(nnx.Module):
    """V(a), a scalar at every position: an MLP D -> D / 4 -> 1."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.up = Linear(width, max(width // 4, 1), ("embed", "mlp"), rngs=rngs)
        self.down = Linear(max(width // 4, 1), 1, ("mlp", None), rngs=rngs)

    def __call__(self, a_BLD: jax.Array) -> jax.Array:
        return self.down(jax.nn.gelu(self.up(a_BLD)), jnp.float32)[..., 0]


class Rewards(NamedTuple):
    """Rewards of a batch, in float32.

    Attributes:
      reward_BL: R, 0 at padding.
      valid_BL: false at padding, which gets no gradient in an encoder or a decoder.
      size: r, the root mean square of g over the valid positions.
    """

    reward_BL: jax.Array
    valid_BL: jax.Array
    size: jax.Array


def rewards(g_BLD: jax.Array, rule: Rule) -> Rewards:
    """Returns the rewards for the gradient g at the output. Scaling g by a positive factor does not change them."""
    g_BLD = g_BLD.astype(jnp.float32)
    valid_BL = jnp.any(g_BLD != 0, axis=-1)
    # Divide by the largest entry first: squares of a small gradient would underflow.
    largest = jnp.maximum(jnp.max(jnp.abs(g_BLD)), jnp.finfo(jnp.float32).tiny)
    g_BLD = g_BLD / largest
    size = jnp.sqrt(jnp.mean(jnp.square(g_BLD), where=valid_BL[..., None]))
    size = jnp.where(jnp.any(valid_BL), size, 1)
    if rule.reward == "signed":
        reward_BL = -jnp.mean(g_BLD, axis=-1) / size
    else:
        reward_BL = -jnp.sqrt(jnp.mean(jnp.square(g_BLD), axis=-1))
        deviation = jnp.std(reward_BL, where=valid_BL)
        # The standard deviation of a single position is 0.
        reward_BL = reward_BL / jnp.where(deviation > 0, deviation, size)
    return Rewards(jnp.where(valid_BL, reward_BL, 0), valid_BL, size * largest)


def _error(rule: Rule, value_BL: jax.Array, g_BLD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns V - R, (B, L), 0 at padding; and r."""
    reward_BL, valid_BL, size = rewards(g_BLD, rule)
    return jnp.where(valid_BL, value_BL - reward_BL, 0), size


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def observe(rule: Rule, y_BLD: jax.Array, value_BL: jax.Array) -> jax.Array:
    """Returns y. Backward: y gets its gradient g unchanged, the value the gradient of (R - V)^2."""
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
    """Returns y. Backward: y gets no gradient, mu the REINFORCE gradient, the value the gradient of (R - V)^2."""
    return y_BLD


def _skip_forward(rule, y_BLD, mu_BLD, noise_BLD, value_BL):
    return y_BLD, (noise_BLD, value_BL)


def _skip_backward(rule, residuals, g_BLD):
    noise_BLD, value_BL = residuals
    error_BL, size = _error(rule, value_BL, g_BLD)
    gradient_BLD = (rule.scale / rule.sigma) * size * error_BL[..., None] * noise_BLD
    zero_BLD = jnp.zeros_like(g_BLD)
    return zero_BLD, gradient_BLD.astype(g_BLD.dtype), zero_BLD, 2 * error_BL


skip.defvjp(_skip_forward, _skip_backward)


@jax.custom_vjp
def stand_for(y_BLD: jax.Array, x_BLD: jax.Array) -> jax.Array:
    """Returns y. Backward: x gets the gradient, y none. Unlike x + stop_gradient(y - x), the result is y to the bit."""
    return y_BLD


stand_for.defvjp(lambda y, x: (y, None), lambda _, g_BLD: (jnp.zeros_like(g_BLD), g_BLD))


class Backskip(Block):
    """Adjacent reservoirs as one block, which a skipping step does not differentiate.

    Attributes:
      skipping: whether this model is built for a skipping step.
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
        # Also stops the gradient from a decoder's reservoir to the encoder's output.
        y_BLD = jax.lax.stop_gradient(super().__call__(x_BLD, context, key))
        return y_BLD if self.estimator == "zero" else stand_for(y_BLD, x_BLD)

    def _noisy(self, mu_BLD: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns a and eps."""
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
    """Returns the layers of a stack, with adjacent reservoirs merged into one `Backskip` block."""
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
    """Returns the number of steps before the first that may skip."""
    own = config.model.backskip.warmup_steps
    return warmup_steps(config.optimizer, config.train.steps) if own == -1 else own


def skips(config: ConfigDict, step: int) -> bool:
    """Returns whether a step skips: never in the warm-up, eventually always. A function of the seed and the step."""
    settings, since = config.model.backskip, step - warmup(config)
    if settings.estimator in NEVER or since < 0:
        return False
    ordinary = settings.anneal**since
    # The third number separates this stream from (seed, step), which draws the crops of a text.
    return (
        ordinary < settings.least
        or np.random.default_rng((config.seed, step, 1)).random() >= ordinary
    )


class Backskipping:
    """Mixin of a task: a second loss for skipping steps, and so a second compiled step."""

    config: ConfigDict
    loss: Callable

    def loss_at(self, step: int) -> Callable:
        """Returns the loss function of a step."""
        return self.skipping_loss if skips(self.config, step) else self.loss

    def skipping_loss(
        self, model: nnx.Module, batch: Mapping[str, jax.Array], key: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the same loss as `loss`; its gradients skip the reservoirs."""
        for _, part in nnx.iter_modules(model):
            if isinstance(part, Backskip):
                part.skipping = True
        return self.loss(model, batch, key)

    def learning_rate_overrides(self) -> dict[str, float]:
        """Returns the learning rate of the value networks."""
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
        f"{name}.estimator={settings.estimator} with no reservoir to skip: --config.model.reservoir is none",
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
    """Checks that the run reaches a skipping step. Warns of a reward that is 0.

    Raises:
      UserError: the warm-up lasts until the end of the run.
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
            " (--config.model.norm=pre), because norms ignore a shift: the policy learns from rounding errors",
            file=sys.stderr,
        )
