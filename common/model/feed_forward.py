"""The position-wise feed-forward layer."""

from collections.abc import Callable

import jax
from flax import nnx

from common.model.block import Context, Stateless
from common.model.linear import Linear

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "silu": jax.nn.silu,
}


class FeedForward(Stateless):
    """W2 activation(W1 x + b1) + b2."""

    def __init__(self, width: int, hidden: int, *, rngs: nnx.Rngs, activation: str = "relu"):
        self.up = Linear(width, hidden, ("embed", "mlp"), rngs=rngs)
        self.down = Linear(hidden, width, ("mlp", "embed"), rngs=rngs)
        self.activation = activation

    def __call__(
        self, x_BLD: jax.Array, context: Context, key: jax.Array | None = None
    ) -> jax.Array:
        del context, key
        return self.down(ACTIVATIONS[self.activation](self.up(x_BLD)))
