"""Initializers of trainable parameters. An initializer is a function (key, shape) -> float32 array."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

Initializer = Callable[[jax.Array, tuple[int, ...]], jax.Array]

normal = jax.nn.initializers.normal
zeros = jax.nn.initializers.zeros
ones = jax.nn.initializers.ones


def uniform(bound: float) -> Initializer:
    return lambda key, shape: jax.random.uniform(key, shape, jnp.float32, -bound, bound)


def xavier_uniform(gain: float = 1.0) -> Initializer:
    """Returns an initializer of matrices (fan_in, fan_out): U(-a, a) with a = gain sqrt(6 / (fan_in + fan_out))."""
    return lambda key, shape: uniform(gain * math.sqrt(6 / sum(shape)))(key, shape)
