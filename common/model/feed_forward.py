"""The position-wise feed-forward layer."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from common.model.block import Context, Stateless
from common.model.dropout import Key, fold
from common.model.linear import Linear


def _in_float32(activation: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    # GELU and SiLU of bfloat16 arrays are slow on a CPU.
    return lambda x: activation(x.astype(jnp.float32)).astype(x.dtype)


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "gelu": _in_float32(partial(jax.nn.gelu, approximate=False)),
    "gelu_tanh": _in_float32(partial(jax.nn.gelu, approximate=True)),
    "silu": _in_float32(jax.nn.silu),
}


class FeedForward(Stateless):
    """Computes W2 activation(W1 x + b1) + b2."""

    def __init__(self, width: int, hidden: int, *, rngs: nnx.Rngs, activation: str = "relu"):
        self.up = Linear(width, hidden, ("embed", "mlp"), rngs=rngs)
        self.down = Linear(hidden, width, ("mlp", "embed"), rngs=rngs)
        self.activation = activation

    def __call__(self, x_BLD: jax.Array, context: Context, key: Key = None) -> jax.Array:
        del context
        hidden = ACTIVATIONS[self.activation](self.up(x_BLD, key=fold(key, 0)))
        return self.down(hidden, key=fold(key, 1))
