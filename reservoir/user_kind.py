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

    In a causal stack, also compares outputs for random input: an output must not depend on later positions, and
    decoding must give the outputs of `__call__`.

    Args:
      build: function (rngs=) -> new reservoir of `stack`.
      stack: a key of `reservoir.model.STACKS`. All stacks except "encoder" are causal.

    Raises:
      UserError: `build` fails or returns no module, `frozen_init()` lacks a parameter, a method is missing or fails, or
        an output has the wrong type, shape or values.
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
        if stack != "encoder":
            _check_causal(make(variables.ParamKeys(0)), context, stack)


def _check_causal(block: Block, context: Context, stack: str) -> None:
    rows, length, _ = context.encoded_BSD.shape

    @jax.jit
    def outputs(x_BLD):
        y_BLD = block(x_BLD, context)
        empty = block.cache(rows, CacheSpec(length, x_BLD.dtype), context)
        first_B1D, cache = block.step(x_BLD[:, :1], empty, jnp.int32(0), context)
        stepped_B1D, _ = block.step(x_BLD[:, 1:], cache, jnp.int32(1), context)
        _, cache = block.prefill(x_BLD[:, :1], empty, context)
        prefilled_B1D, _ = block.step(x_BLD[:, 1:], cache, jnp.int32(1), context)
        decoded_BLD = jnp.concatenate([first_B1D, stepped_B1D], axis=1)
        return y_BLD, decoded_BLD, prefilled_B1D

    x_BLD, other_BLD = jax.random.normal(jax.random.key(0), (2, *context.encoded_BSD.shape))
    y_BLD, decoded_BLD, prefilled_B1D = outputs(x_BLD)
    changed_BLD, _, _ = outputs(x_BLD.at[:, 1].set(other_BLD[:, 1]))
    tolerance = max(8 * float(jnp.finfo(y_BLD.dtype).eps), 1e-3) * float(abs(y_BLD).max())

    def differ(one: jax.Array, other: jax.Array) -> bool:
        return bool(abs(one - other).max() > tolerance)

    check(
        not differ(y_BLD[:, 0], changed_BLD[:, 0]),
        f"__call__ reads later positions, which the {stack} must not do: do not read them if `causal` is true, or set"
        " bidirectional_only=True in the Kind",
    )
    check(
        not differ(y_BLD, decoded_BLD),
        f"step gives other outputs than __call__ in the {stack}: correct step",
    )
    check(
        not differ(y_BLD[:, 1:], prefilled_B1D),
        f"step after prefill gives other outputs than __call__ in the {stack}: correct prefill",
    )
