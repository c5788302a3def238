"""A bidirectional GRU (Cho et al., 2014) as a function of a block.

B batch, L length, D width, F = D / 2 features of a direction.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from common.model.block import Context, Function
from common.model.linear import Linear, matmul

GATES = ("reset", "update", "new")


class Direction(nnx.Module):
    """One GRU, with the equations of torch.nn.GRU: a matrix and a bias for each gate, of the input and of the state."""

    def __init__(self, width: int, features: int, *, rngs: nnx.Rngs):
        def gate(inputs: int) -> Linear:
            return Linear(inputs, features, ("embed", "mlp"), rngs=rngs)

        self.inputs = nnx.Dict({name: gate(width) for name in GATES})
        self.states = nnx.Dict({name: gate(features) for name in GATES})

    def __call__(self, x_BLD: jax.Array, valid_BL: jax.Array, *, reverse: bool) -> jax.Array:
        """The state (B, L, F) after each position; one that is not valid leaves it as it is."""
        kernel, bias = _side_by_side(self.inputs)
        of_input_LBF3 = (matmul(x_BLD, kernel) + bias).astype(jnp.float32).swapaxes(0, 1)
        kernel, bias = _side_by_side(self.states)

        def one(state_BF, given):
            of_input_BF3, valid_B = given
            of_state_BF3 = matmul(state_BF.astype(x_BLD.dtype), kernel) + bias
            reset, update, new = jnp.split(of_input_BF3, 3, axis=-1)
            reset_h, update_h, new_h = jnp.split(of_state_BF3, 3, axis=-1)
            update_BF = jax.nn.sigmoid(update + update_h)
            new_BF = jnp.tanh(new + jax.nn.sigmoid(reset + reset_h) * new_h)
            after_BF = (1 - update_BF) * new_BF + update_BF * state_BF
            state_BF = jnp.where(valid_B[:, None], after_BF, state_BF)
            return state_BF, state_BF.astype(x_BLD.dtype)

        start_BF = jnp.zeros((len(x_BLD), kernel.shape[0]), jnp.float32)
        given = (of_input_LBF3, valid_BL.swapaxes(0, 1))
        _, states_LBF = jax.lax.scan(one, start_BF, given, reverse=reverse)
        return states_LBF.swapaxes(0, 1)


def _side_by_side(gates: nnx.Dict) -> tuple[jax.Array, jax.Array]:
    """One kernel and one bias for all three gates."""
    parts = [gates[name] for name in GATES]
    return (
        jnp.concatenate([part.kernel[...] for part in parts], axis=1),
        jnp.concatenate([part.bias[...] for part in parts]),
    )


class BiGru(Function):
    """W [forward; backward]: each direction has half the width. It sees the whole sequence, so it cannot decode."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        if width % 2:
            raise ValueError(f"width {width} cannot be shared by two directions")
        self.forward = Direction(width, width // 2, rngs=rngs)
        self.backward = Direction(width, width // 2, rngs=rngs)
        self.out = Linear(width, width, ("mlp", "embed"), rngs=rngs)

    def __call__(
        self, x_BLD: jax.Array, context: Context, key: jax.Array | None = None
    ) -> jax.Array:
        batch, length, _ = x_BLD.shape
        valid_BL = jnp.ones((batch, length), bool)
        if context.lengths_B is not None:
            valid_BL = jnp.arange(length) < context.lengths_B[:, None]
        both = [
            self.forward(x_BLD, valid_BL, reverse=False),
            self.backward(x_BLD, valid_BL, reverse=True),
        ]
        return self.out(jnp.concatenate(both, axis=-1))

    def cache(self, batch: int, room: Any, context: Context) -> Any:
        raise ValueError("a bidirectional GRU cannot be decoded step by step")
