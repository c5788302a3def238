"""How trainable parameters start: fairseq's choices, as functions (key, shape) -> float32 array."""

import math

import jax
import jax.numpy as jnp


def xavier_uniform(gain: float = 1.0):
    """U(-a, a) with a = gain * sqrt(6 / (fan_in + fan_out)), for a matrix (fan_in, fan_out)."""

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
