"""Checks a user's kind of reservoir, a `Kind` from outside this project, before training."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from common import variables
from common.errors import check
from common.model.block import Block, Context
from common.model.decode_cache import CacheSpec
from common.user_parts import described, user_code
from reservoir.kinds import Kind


def check_complete(build: Callable[..., Block], model: ConfigDict, stack: str) -> None:
    """Checks a user's kind of reservoir by tracing a forward pass and, in a causal stack, prefill and a decoding step.

    Args:
      build: function (rngs=) -> new reservoir of `stack`.
      stack: a key of `reservoir.model.STACKS`. All stacks except "encoder" are causal.

    Raises:
      UserError: `build` fails or returns no module, `frozen_init()` lacks a parameter, a method is missing or fails, or
        an output has the wrong type or shape.
    """
    rows, length = 2, 2
    x_BLD = jnp.zeros((rows, length, model.width))
    lengths_B = jnp.full(rows, length)
    context = Context(lengths_B, x_BLD, lengths_B)

    def make(rngs: variables.ParamKeys) -> nnx.Module:
        block = build(rngs=rngs)
        check(
            isinstance(block, nnx.Module),
            f"build must return a common.model.block.Block, got {block!r:.80}",
        )
        return block

    def expect(method: str, output: object, positions: int) -> None:
        expected = (rows, positions, model.width)
        check(
            getattr(output, "shape", None) == expected,
            f"{method} must return an array of shape {expected} (rows, positions, model.width) in the {stack}, got"
            f" {described(output)}",
        )

    def run(trainable, frozen):
        block = abstract_model.build(trainable, frozen)
        expect("__call__", block(x_BLD, context), length)
        if stack != "encoder":
            cache = block.cache(rows, CacheSpec(length, x_BLD.dtype), context)
            block.prefill(x_BLD, cache, context)
            found = block.step(x_BLD[:, :1], cache, jnp.int32(0), context)
            several = isinstance(found, tuple | list)
            check(
                several and len(found) == 2,
                f"step must return the pair (output, cache), got {described(found)}"
                + (f" of {len(found)} elements" if several else ""),
            )
            expect("step", found[0], 1)

    with user_code(f"--config.model.reservoir={model.reservoir}", Kind, "model"):
        abstract_model = variables.abstract(make)
        jax.eval_shape(run, *abstract_model.shapes())
