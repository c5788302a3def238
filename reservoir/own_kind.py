"""Checks a user-defined kind of reservoir, a `Kind` from outside this project, before training."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from common import variables
from common.errors import check
from common.model.block import Block, Context
from common.model.decode_cache import CacheSpec
from common.user_code import described, user_code
from reservoir.kinds import Kind


def check_complete(build: Callable[..., Block], model: ConfigDict, stack: str) -> None:
    """Checks a user's kind of reservoir by tracing a forward pass and, in a causal stack, a decoding step.

    Args:
      build: function (rngs=) -> new reservoir of `stack`.
      stack: a key of `reservoir.model.STACKS`. All stacks except "encoder" are causal.

    Raises:
      UserError: `frozen_init()` lacks a parameter, a method is missing or fails, or an output has the wrong shape.
    """
    rows, length = 2, 2
    x_BLD = jnp.zeros((rows, length, model.width))
    lengths_B = jnp.full(rows, length)
    context = Context(lengths_B, x_BLD, lengths_B)

    def run(trainable, frozen):
        block = abstract_model.build(trainable, frozen)
        outputs = [block(x_BLD, context)]
        if stack != "encoder":
            cache = block.cache(rows, CacheSpec(length, x_BLD.dtype), context)
            block.prefill(x_BLD, cache, context)
            y_B1D, _ = block.step(x_BLD[:, :1], cache, jnp.int32(0), context)
            outputs.append(y_B1D)
        return outputs

    option = f"--config.model.reservoir={model.reservoir}"
    with user_code(option, Kind, "model"):
        abstract_model = variables.abstract(lambda: build(rngs=variables.ParamKeys(0)))
        outputs = jax.eval_shape(run, *abstract_model.shapes())
    for output, method, positions in zip(outputs, ("__call__", "step"), (length, 1), strict=False):
        expected = (rows, positions, model.width)
        check(
            getattr(output, "shape", None) == expected,
            f"{option}: {method} returned {described(output)} in the {stack}; expected the shape {expected}",
        )
