"""The position-wise feed-forward layer."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from common.model import initializers
from common.model.block import Context, Stateless
from common.model.dropout import fold
from common.model.linear import Linear


def _in_float32(activation: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """Computes an activation in float32: it is rounded once, and bfloat16 is slow on a CPU."""
    return lambda x: activation(x.astype(jnp.float32)).astype(x.dtype)


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "gelu": _in_float32(partial(jax.nn.gelu, approximate=False)),
    "gelu_tanh": _in_float32(partial(jax.nn.gelu, approximate=True)),
    "silu": _in_float32(jax.nn.silu),
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
        del context
        hidden = ACTIVATIONS[self.activation](self.up(x_BLD, key=fold(key, 0)))
        return self.down(hidden, key=fold(key, 1))


class GatedFeedForward(Stateless):
    """W3 (activation(W1 x) * W2 x) (Shazeer, 2020)."""

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        rngs: nnx.Rngs,
        activation: str = "silu",
        bias: bool = False,
    ):
        options = {"rngs": rngs, "bias_init": initializers.zeros if bias else None}
        self.gate = Linear(width, hidden, ("embed", "mlp"), **options)
        self.up = Linear(width, hidden, ("embed", "mlp"), **options)
        self.down = Linear(hidden, width, ("mlp", "embed"), **options)
        self.activation = activation

    def __call__(
        self, x_BLD: jax.Array, context: Context, key: jax.Array | None = None
    ) -> jax.Array:
        del context
        gate = ACTIVATIONS[self.activation](self.gate(x_BLD, key=fold(key, 0)))
        return self.down(gate * self.up(x_BLD, key=fold(key, 1)), key=fold(key, 2))
