"""Initializers of trainable parameters: functions (key, shape) -> float32 array."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from common import variables

Initializer = Callable[[jax.Array, tuple[int, ...]], jax.Array]


def xavier_uniform(gain: float = 1.0):
    """U(-a, a) with a = gain sqrt(6 / (fan_in + fan_out)), for a matrix (fan_in, fan_out)."""

    def initialize(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        bound = gain * math.sqrt(6 / sum(shape))
        return jax.random.uniform(key, shape, jnp.float32, -bound, bound)

    return initialize


def normal(deviation: float):
    def initialize(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return deviation * jax.random.normal(key, shape, jnp.float32)

    return initialize


def uniform(bound: float):
    def initialize(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return jax.random.uniform(key, shape, jnp.float32, -bound, bound)

    return initialize


def zeros(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    del key
    return jnp.zeros(shape, jnp.float32)


def ones(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    del key
    return jnp.ones(shape, jnp.float32)


def of_draw(spec: tuple) -> Initializer:
    """Returns the initializer with the distribution of a draw (see `common.variables.draw`)."""
    match spec:
        case ("orthogonal", gain):
            return jax.nn.initializers.orthogonal(gain)
        case ("xavier", gain):
            return xavier_uniform(gain)
        case ("fan_in", gain):
            return lambda key, shape: normal(gain / math.sqrt(shape[0]))(key, shape)
        case ("uniform", bound):
            return uniform(bound)
        case ("normal", deviation):
            return normal(deviation)
        case ("ones",):
            return ones
        case ("zeros",):
            return zeros
    raise ValueError(f"unknown draw {spec!r}")


def redraw(module: nnx.Module, matrix: tuple, *, rngs: nnx.Rngs) -> None:
    """Re-initialises all trainable parameters below `module` with the distributions that `variables.freeze` uses.

    Raises:
      ValueError: a layer has no `frozen_init()` for a parameter.
    """
    for part, name, draw in variables.draws(module, matrix):
        parameter = getattr(part, name)
        parameter[...] = of_draw(draw)(rngs.params(), parameter.shape)
