"""A bidirectional GRU (Cho et al., 2014) as a function of a block.

B batch, L length, D width, N = 2 directions, F features of a direction, G = 3 F.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from common.model.block import Context, Sublayer
from common.model.linear import Linear, matmul

GATES = ("reset", "update", "new")


class Direction(nnx.Module):
    """The parameters of one GRU: for each gate a matrix and a bias of the input and of the state."""

    def __init__(self, width: int, features: int, *, rngs: nnx.Rngs):
        def gates(inputs: int, axes: tuple) -> nnx.Dict:
            return nnx.Dict({name: Linear(inputs, features, axes, rngs=rngs) for name in GATES})

        self.inputs = gates(width, ("embed", "mlp"))
        # Not spread over fsdp: there XLA gets the gradient of what goes into the loop wrong (jaxlib 0.10.2).
        self.states = gates(features, (None, None))


class BiGru(Sublayer):
    """W [forward; backward], with the equations of torch.nn.GRU.

    Both go through one loop. It sees the whole sequence, so it cannot decode.

    Args:
      hidden: features of both directions together; by default the width. With more, the state is wider than the model
        (an up-projection), and W brings it back to the width.
    """

    def __init__(self, width: int, *, rngs: nnx.Rngs, hidden: int = 0):
        hidden = hidden or width
        if hidden % 2:
            raise ValueError(f"hidden {hidden} cannot be shared by two directions")
        self.forward = Direction(width, hidden // 2, rngs=rngs)
        self.backward = Direction(width, hidden // 2, rngs=rngs)
        self.out = Linear(hidden, width, ("mlp", "embed"), rngs=rngs)

    def __call__(
        self, x_BLD: jax.Array, context: Context, key: jax.Array | None = None
    ) -> jax.Array:
        batch, length, _ = x_BLD.shape
        valid_BL = jnp.ones((batch, length), bool)
        if context.lengths_B is not None:
            valid_BL = jnp.arange(length) < context.lengths_B[:, None]
        both = (self.forward, self.backward)
        given = [_affine(x_BLD, direction.inputs) for direction in both]
        given_NBLG = jnp.stack([given[0], jnp.flip(given[1], 1)]).astype(jnp.float32)
        valid_NBL = jnp.stack([valid_BL, jnp.flip(valid_BL, 1)])
        sides = [_side_by_side(direction.states) for direction in both]
        kernel_NFG, bias_NG = (jnp.stack(parts) for parts in zip(*sides, strict=True))
        states_NBLF = _run(given_NBLG, valid_NBL, kernel_NFG.astype(x_BLD.dtype), bias_NG)
        states = [states_NBLF[0], jnp.flip(states_NBLF[1], 1)]
        return self.out(jnp.concatenate(states, axis=-1).astype(x_BLD.dtype))

    def cache(self, batch: int, room: Any, context: Context) -> Any:
        raise ValueError("a bidirectional GRU cannot be decoded step by step")


def _run(
    given_NBLG: jax.Array, valid_NBL: jax.Array, kernel_NFG: jax.Array, bias_NG: jax.Array
) -> jax.Array:
    """The states (N, B, L, F) after each position; one that is not valid leaves them as they are."""

    def one(state_NBF, position):
        given_NBG, valid_NB = position
        of_state_NBG = bias_NG[:, None] + jnp.matmul(
            state_NBF.astype(kernel_NFG.dtype), kernel_NFG, preferred_element_type=jnp.float32
        )
        reset, update, new = jnp.split(given_NBG, 3, axis=-1)
        reset_h, update_h, new_h = jnp.split(of_state_NBG, 3, axis=-1)
        update_NBF = jax.nn.sigmoid(update + update_h)
        new_NBF = jnp.tanh(new + jax.nn.sigmoid(reset + reset_h) * new_h)
        after_NBF = (1 - update_NBF) * new_NBF + update_NBF * state_NBF
        state_NBF = jnp.where(valid_NB[..., None], after_NBF, state_NBF)
        return state_NBF, state_NBF

    start_NBF = jnp.zeros((*given_NBLG.shape[:2], kernel_NFG.shape[1]), jnp.float32)
    positions = jnp.moveaxis(given_NBLG, 2, 0), jnp.moveaxis(valid_NBL, 2, 0)
    _, states_LNBF = jax.lax.scan(one, start_NBF, positions)
    return jnp.moveaxis(states_LNBF, 0, 2)


def _affine(x_BLD: jax.Array, gates: nnx.Dict) -> jax.Array:
    kernel_DG, bias_G = _side_by_side(gates)
    return matmul(x_BLD, kernel_DG) + bias_G


def _side_by_side(gates: nnx.Dict) -> tuple[jax.Array, jax.Array]:
    """One kernel and one bias for all three gates."""
    parts = [gates[name] for name in GATES]
    return (
        jnp.concatenate([part.kernel[...] for part in parts], axis=1),
        jnp.concatenate([part.bias[...] for part in parts]),
    )
