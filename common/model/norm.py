"""LayerNorm over the last axis."""

import jax
import jax.numpy as jnp
from flax import nnx

from common.model import initializers


class LayerNorm(nnx.Module):
    """Layer normalization, computed in float32 and returned in the dtype of x."""

    def __init__(self, width: int, *, rngs: nnx.Rngs, epsilon: float = 1e-5):
        self.scale = nnx.Param(initializers.ones(rngs.params(), (width,)), axes=(None,))
        self.bias = nnx.Param(initializers.zeros(rngs.params(), (width,)), axes=(None,))
        self.epsilon = epsilon

    def frozen_init(self) -> dict[str, tuple]:
        """Returns {parameter: initializer} for a frozen layer. An initializer is a spec of `common.freezing.draw`."""
        return {"scale": ("ones",), "bias": ("zeros",)}

    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        x = x_BLD.astype(jnp.float32)
        centred = x - x.mean(-1, keepdims=True)
        variance = jnp.square(centred).mean(-1, keepdims=True)
        y = centred * jax.lax.rsqrt(variance + self.epsilon)
        return (y * self.scale[...] + self.bias[...]).astype(x_BLD.dtype)
