"""Stacks of blocks."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from common.model.block import Block, Context, call_in_order
from common.model.dropout import Key, fold

if TYPE_CHECKING:
    from common.model.decode_cache import CacheSpec

_SKIP = 2**16
"""Number that is folded into a block's key to draw whether the block is skipped. The block folds the index of each
residual into the same key, so a block must have at most this number of residuals."""

REMAT = {
    "none": None,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}
"""Name -> rematerialization policy. A block stores all activations ("none"), only the results of matrix products with
weights ("dots"), or only its input ("full"). The backward pass recomputes all other activations. If a scan runs the
blocks, "none" stores the activations that are costly to compute (`common.model.stored.POLICIES`)."""


class Stack(nnx.Module):
    """A sequence of blocks and an optional final norm.

    Args:
      norm: the final norm; None for no norm.
      remat: name of the rematerialization policy, a key of REMAT.
      skip_rate: probability of skipping a block in training (Fan et al., 2020).
    """

    def __init__(
        self,
        blocks: list[Block],
        norm: nnx.Module | None,
        *,
        remat: str = "none",
        skip_rate: float = 0.0,
    ):
        self.blocks, self.norm = nnx.List(blocks), norm
        self.remat, self.skip_rate = remat, skip_rate

    def __call__(self, x_BLD: jax.Array, context: Context, key: Key = None) -> jax.Array:
        keys_P = self._block_keys(key, len(self.blocks))
        for number, block in enumerate(self.blocks):
            x_BLD = self._call_block(block, number, x_BLD, context, keys_P[number])
        return self._final_norm(x_BLD)

    @staticmethod
    def _block_keys(key: Key, blocks: int) -> jax.Array | list[None]:
        """Returns a key for each block; None for each block if `key` is None.

        Calls `fold_in` once for all blocks, because the compiler would compile each of several calls separately.
        """
        if key is None:
            return [None] * blocks
        return jax.vmap(partial(fold, key))(jnp.arange(blocks))

    def _call_block(
        self, block: Block, number: int, x_BLD: jax.Array, context: Context, key: Key
    ) -> jax.Array:
        """Returns the output of a block, or x if the block is skipped. Profiles name the operations `block{number}`."""
        call = self._rematerialized(jax.named_call(block, name=f"block{number}"))
        if key is None or not self.skip_rate:
            return call(x_BLD, context, key)
        # `lax.cond` runs one branch only, so a skipped block costs nothing in the forward and backward pass.
        kept = jax.random.bernoulli(fold(key, _SKIP), 1 - self.skip_rate)
        # `common.train.flops` reads the probability of the true branch from the name of this scope.
        with jax.named_scope(f"branch_probability={1 - self.skip_rate!r}"):
            return jax.lax.cond(kept, lambda x: call(x, context, key), lambda x: x, x_BLD)

    def _rematerialized(self, call: Callable) -> Callable:
        policy = REMAT[self.remat]
        return jax.checkpoint(call, policy=policy) if policy else call

    def _final_norm(self, x_BLD: jax.Array) -> jax.Array:
        return x_BLD if self.norm is None else self.norm(x_BLD)

    def hidden(self, x_BLD: jax.Array, context: Context) -> list[jax.Array]:
        """Returns x, then the output of every block, each (B, L, D), without the final norm."""
        states = [x_BLD]
        for block in self.blocks:
            states.append(block(states[-1], context))
        return states

    def cache(self, batch: int, spec: "CacheSpec", context: Context) -> list:
        return [block.cache(batch, spec, context) for block in self.blocks]

    def step(
        self, x_B1D: jax.Array, cache: list, index: jax.Array, context: Context
    ) -> tuple[jax.Array, list]:
        steps = [partial(block.step, index=index, context=context) for block in self.blocks]
        x_B1D, cache = call_in_order(steps, x_B1D, cache)
        return self._final_norm(x_B1D), cache

    def prefill(self, x_BLD: jax.Array, cache: list, context: Context) -> tuple[jax.Array, list]:
        prefills = [partial(block.prefill, context=context) for block in self.blocks]
        x_BLD, cache = call_in_order(prefills, x_BLD, cache)
        return self._final_norm(x_BLD), cache
