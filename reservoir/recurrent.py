"""A bidirectional GRU (Cho et al., 2014) as a sublayer.

Shape letters of this module: J the two directions, F features of one direction, M = 3F features of the three gates.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from common.model.block import Context, Sublayer
from common.model.dropout import Key
from common.model.linear import Linear, matmul
from common.model.low_rank import LoraLinear
from common.model.stored import PRODUCT, stored

GATES = ("reset", "update", "new")


class Direction(nnx.Module):
    """The parameters of one GRU. Each gate has a matrix and a bias for the input, and another pair for the state."""

    def __init__(self, width: int, features: int, *, rngs: nnx.Rngs):
        def gates(inputs: int, axes: tuple) -> nnx.Dict:
            return nnx.Dict({name: Linear(inputs, features, axes, rngs=rngs) for name in GATES})

        self.inputs = gates(width, ("embed", "mlp"))
        # The matrices of the state are replicated: if they are sharded over fsdp, XLA (jaxlib 0.10.2) computes wrong
        # gradients of the scan's inputs.
        self.states = gates(features, (None, None))


class BiGru(Sublayer):
    """A linear layer on the concatenated states of a forward and a backward GRU, with torch.nn.GRU's equations.

    The layer reads the whole sequence, so it cannot decode step by step.

    Args:
      hidden: number of features of both directions together; 0 means the width of the model.

    Raises:
      ValueError: the number of hidden features is odd.
    """

    def __init__(self, width: int, *, rngs: nnx.Rngs, hidden: int = 0):
        hidden = hidden or width
        if hidden % 2:
            raise ValueError(
                f"BiGru: the number of hidden features must be even, because each of the two directions has half of"
                f" them, got {hidden}: change the argument hidden (0 means width)"
            )
        self.forward = Direction(width, hidden // 2, rngs=rngs)
        self.backward = Direction(width, hidden // 2, rngs=rngs)
        self.out = Linear(hidden, width, ("mlp", "embed"), rngs=rngs)

    def __call__(self, x_BLD: jax.Array, context: Context, key: Key = None) -> jax.Array:
        batch, length, _ = x_BLD.shape
        valid_BL = jnp.ones((batch, length), bool)
        if context.lengths_B is not None:
            valid_BL = jnp.arange(length) < context.lengths_B[:, None]
        both = (self.forward, self.backward)
        inputs = [_affine(x_BLD, direction.inputs) for direction in both]
        inputs_JBLM = jnp.stack([inputs[0], jnp.flip(inputs[1], 1)]).astype(jnp.float32)
        valid_JBL = jnp.stack([valid_BL, jnp.flip(valid_BL, 1)])
        sides = [_joined(direction.states) for direction in both]
        kernel_JFM, bias_JM = (jnp.stack(parts) for parts in zip(*sides, strict=True))
        states_JBLF = _run(inputs_JBLM, valid_JBL, kernel_JFM.astype(x_BLD.dtype), bias_JM)
        states = [states_JBLF[0], jnp.flip(states_JBLF[1], 1)]
        return self.out(jnp.concatenate(states, axis=-1).astype(x_BLD.dtype))

    def cache(self, batch: int, spec: Any, context: Context) -> Any:
        raise ValueError(
            "decoding needs a causal layer, but a bidirectional GRU reads later positions: use another layer"
        )


def _run(
    inputs_JBLM: jax.Array, valid_JBL: jax.Array, kernel_JFM: jax.Array, bias_JM: jax.Array
) -> jax.Array:
    """Returns the states after each position, (J, B, L, F). At padding, the state does not change."""

    def one(state_JBF, position):
        input_JBM, valid_JB = position
        product_JBM = jnp.matmul(
            state_JBF.astype(kernel_JFM.dtype), kernel_JFM, preferred_element_type=jnp.float32
        )
        from_state_JBM = stored(bias_JM[:, None] + product_JBM, PRODUCT)
        reset, update, new = jnp.split(input_JBM, 3, axis=-1)
        reset_h, update_h, new_h = jnp.split(from_state_JBM, 3, axis=-1)
        update_JBF = jax.nn.sigmoid(update + update_h)
        new_JBF = jnp.tanh(new + jax.nn.sigmoid(reset + reset_h) * new_h)
        next_JBF = (1 - update_JBF) * new_JBF + update_JBF * state_JBF
        state_JBF = stored(jnp.where(valid_JB[..., None], next_JBF, state_JBF), PRODUCT)
        return state_JBF, state_JBF

    start_JBF = jnp.zeros((*inputs_JBLM.shape[:2], kernel_JFM.shape[1]), jnp.float32)
    positions = jnp.moveaxis(inputs_JBLM, 2, 0), jnp.moveaxis(valid_JBL, 2, 0)
    _, states_LJBF = jax.lax.scan(one, start_JBF, positions)
    return jnp.moveaxis(states_LJBF, 0, 2)


def _affine(x_BLD: jax.Array, gates: nnx.Dict) -> jax.Array:
    kernel_DM, bias_M = _joined(gates)
    return stored(matmul(x_BLD, kernel_DM) + bias_M, PRODUCT)


def _joined(gates: nnx.Dict) -> tuple[jax.Array, jax.Array]:
    """Returns the concatenated kernels of the three gates, with LoRA adapters merged, and their concatenated biases."""
    parts = [gates[name] for name in GATES]
    kernels = [x.merged() if isinstance(x, LoraLinear) else x.kernel[...] for x in parts]
    return jnp.concatenate(kernels, axis=1), jnp.concatenate([x.bias[...] for x in parts])
