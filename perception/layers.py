"""Layers of pretrained language models: norms, positions, the gated feed-forward layer, and parallel sublayers."""

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from common.model import initializers
from common.model.block import Context, Stateless, Sublayer
from common.model.dropout import Key, dropout, fold
from common.model.feed_forward import ACTIVATIONS
from common.model.linear import Linear
from common.model.position import Learned
from perception.backbones import Stretch


class RMSNorm(nnx.Module):
    """Root mean square normalization (Zhang and Sennrich, 2019) in float32. The output has the dtype of the input.

    Args:
      offset: added to the parameter `scale`, whose initial value is 1 - `offset`. Gemma stores scales minus 1.
    """

    def __init__(self, width: int, *, rngs: nnx.Rngs, epsilon: float = 1e-6, offset: float = 0.0):
        scale = initializers.ones(rngs.params(), (width,)) - offset
        self.scale = nnx.Param(scale, axes=(None,))
        self.epsilon, self.offset = epsilon, offset

    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        x = x_BLD.astype(jnp.float32)
        y = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + self.epsilon)
        return (y * (self.offset + self.scale[...])).astype(x_BLD.dtype)


class ScaledNorm(nnx.Module):
    """Layer normalization without a bias, in float32. The output has the dtype of the input."""

    def __init__(self, width: int, *, rngs: nnx.Rngs, epsilon: float = 1e-5):
        self.scale = nnx.Param(initializers.ones(rngs.params(), (width,)), axes=(None,))
        self.epsilon = epsilon

    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        x = x_BLD.astype(jnp.float32)
        y = jax.nn.standardize(x, axis=-1, epsilon=self.epsilon)
        return (y * self.scale[...]).astype(x_BLD.dtype)


NORMS = {
    "layer_scale": ScaledNorm,
    "rms": RMSNorm,
    "rms_offset": partial(RMSNorm, offset=1.0),
}
"""Value of `Backbone.norm` -> norm, except "layer", which is `common.model.norm.LayerNorm`."""


class LaterPositions(Learned):
    """Learned positions whose table begins with `first` unused rows, as in RoBERTa."""

    def __init__(self, maximum: int, width: int, *, rngs: nnx.Rngs, first: int):
        super().__init__(maximum, width, rngs=rngs)
        self.first = first

    def __call__(self, positions_L: jax.Array) -> jax.Array:
        return super().__call__(self.first + positions_L)


@dataclass(frozen=True)
class Rotary:
    """Rotary position embedding of the first `rotated` features of every head (Su et al., 2021).

    Feature i of the first half of these features is rotated together with feature i of the second half, as in Hugging
    Face's models.
    """

    rotated: int
    theta: float = 10_000.0
    stretch: Stretch | None = None

    def frequencies(self) -> jax.Array:
        """Returns the rotation angle of each pair of features at position 1, in radians, (rotated / 2,)."""
        half = self.rotated // 2
        plain = self.theta ** (-jnp.arange(half) / half)
        if self.stretch is None:
            return plain
        turns = plain * self.stretch.trained / (2 * math.pi)
        low, high = self.stretch.low, self.stretch.high
        kept = jnp.clip((turns - low) / (high - low), 0, 1)
        return plain * (kept + (1 - kept) / self.stretch.factor)

    def __call__(self, x_BLHK: jax.Array, positions_L: jax.Array) -> jax.Array:
        angles = (positions_L[:, None].astype(jnp.float32) * self.frequencies())[:, None]
        cosine, sine = jnp.cos(angles), jnp.sin(angles)
        x = x_BLHK.astype(jnp.float32)
        a, b, rest = jnp.split(x, (self.rotated // 2, self.rotated), axis=-1)
        rotated = (a * cosine - b * sine, b * cosine + a * sine, rest)
        return jnp.concatenate(rotated, axis=-1).astype(x_BLHK.dtype)


class GatedFeedForward(Stateless):
    """Computes down(activation(gate(x)) * up(x)) (Shazeer, 2020)."""

    def __init__(
        self, width: int, hidden: int, *, rngs: nnx.Rngs, activation: str, bias: bool = False
    ):
        options = {"rngs": rngs, "bias_init": initializers.zeros if bias else None}
        self.gate = Linear(width, hidden, ("embed", "mlp"), **options)
        self.up = Linear(width, hidden, ("embed", "mlp"), **options)
        self.down = Linear(hidden, width, ("mlp", "embed"), **options)
        self.activation = activation

    def __call__(self, x_BLD: jax.Array, context: Context, key: Key = None) -> jax.Array:
        del context
        gate = ACTIVATIONS[self.activation](self.gate(x_BLD, key=fold(key, 0)))
        return self.down(gate * self.up(x_BLD, key=fold(key, 1)), key=fold(key, 2))


class Parallel(Sublayer):
    """Sums the outputs of sublayers with the same input, after separate dropout, as in phi models. Cannot decode."""

    def __init__(self, functions: list[Sublayer], dropout_rate: float):
        self.functions = nnx.List(functions)
        self.dropout_rate = dropout_rate

    def __call__(self, x_BLD: jax.Array, context: Context, key: Key = None) -> jax.Array:
        return sum(
            dropout(f(x_BLD, context, fold(key, 2 * i)), self.dropout_rate, fold(key, 2 * i + 1))
            for i, f in enumerate(self.functions)
        )
