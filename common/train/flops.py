"""Counts the floating-point operations of a jaxpr, without compilation."""

import math
import re
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.interpreters import partial_eval

_CUDNN = {"dot_product_attention_fwd_wrapper": 2, "dot_product_attention_bwd_wrapper": 4}
"""Attention primitive of cuDNN -> number of matrix products that the primitive replaces."""

_SPLASH = {"fwd": 2, "dq": 1, "dkv": 3}
"""Part of a splash attention kernel (TPUs) -> number of matrix products that the part replaces."""

_SPLASH_NAME = re.compile(r"splash_mha_(fwd|dq|dkv)_")

_CAUSAL = "causal_attention"
"""Name scope of causal splash attention."""

_RECOMPUTED = "rematted_computation"
"""Name scope of operations that the backward pass recomputes (`jax.checkpoint`)."""

_BRANCH_PROBABILITY = re.compile(r"branch_probability=([\d.e+-]+)")
"""Name scope of a random `jax.lax.cond` (`common.model.stack`). The number is the probability of the true branch."""

_JOINS = ("all_gather", "psum")
"""Primitives whose result is equal on all shards. Our steps gather parameters, and sum over all shards of the batch."""

_ITERATIONS = re.compile(r"iterations=([\d.e+-]+)")
"""Name scope of a `while_loop` (`common.model.scan`). The number is the mean number of iterations."""


def count(jaxpr: ClosedJaxpr) -> int:
    """Counts the FLOPs of matrix products and convolutions, two per multiply-add, after dead-code elimination.

    Other operations are a few per cent of a transformer's FLOPs. Frozen weights have no weight gradient in the
    jaxpr, so the count shows how much freezing saves. The body of a `scan` counts once per iteration. The body of a
    `while_loop` counts `iterations` times if its scope names this number, else once. A `jax.lax.cond` counts as the
    expected FLOPs of its branches if its scope names a `branch_probability`, else as its most expensive branch.

    The result is model FLOPs, as usual for MFU: recomputation in the backward pass does not count. Fused attention
    (`common.model.attend`) counts as the matrix products that it replaces: two forward, four backward. On TPUs, these
    products include the positions by which the kernel pads the sequences.
    """
    return round(_count(_live(jaxpr.jaxpr)))


def _live(jaxpr: Jaxpr) -> Jaxpr:
    """Returns the jaxpr without dead code. Inner jaxprs lose their dead code too, except in a `while_loop`."""
    return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]


def _count(jaxpr: Jaxpr, causal: bool = False) -> float:
    return sum(_equation(equation, causal) for equation in jaxpr.eqns)


def _count_shards(jaxpr: Jaxpr, split: set, shards: int, causal: bool) -> float:
    """Counts the body of a `shard_map` over all shards.

    If all inputs of an operation are equal on all shards, it counts once, because all shards compute the same result.
    The operations inside a nested function count for every shard if any input of the function differs.

    Args:
      split: the inputs of which each shard has a different part.
    """
    split, total = set(split), 0.0
    for equation in jaxpr.eqns:
        inputs = (x for x in equation.invars if not isinstance(x, Literal))
        differs = equation.primitive.name == "axis_index" or not split.isdisjoint(inputs)
        total += (shards if differs else 1) * _equation(equation, causal)
        if differs and equation.primitive.name not in _JOINS:
            split.update(equation.outvars)
    return total


def _equation(equation: Any, causal: bool) -> float:
    name, parameters = equation.primitive.name, equation.params
    scope = str(equation.source_info.name_stack)
    if _RECOMPUTED in scope:
        return 0.0
    causal = causal or _CAUSAL in scope
    if name == "dot_general":
        (contracted, _), _ = parameters["dimension_numbers"]
        shape = equation.invars[0].aval.shape
        return (
            2 * math.prod(equation.outvars[0].aval.shape) * math.prod(shape[i] for i in contracted)
        )
    if name == "conv_general_dilated":
        kernel = equation.invars[1].aval.shape
        outputs = parameters["dimension_numbers"].rhs_spec[0]
        return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(kernel) // kernel[outputs]
    if name in _CUDNN:
        (rows, queries, heads, size), (_, keys, *_) = (x.aval.shape for x in equation.invars[:2])
        causal = "CAUSAL" in parameters["mask_type"].name
        return _CUDNN[name] * _product(rows * heads, queries, keys, size, causal)
    if name == "pallas_call" and (kernel := _SPLASH_NAME.match(parameters["name"])):
        # Queries, keys and values have four axes, because `jax.vmap` adds the rows of a batch as first axis. The masks
        # precede the queries among the inputs, and have fewer axes.
        shapes = [x.aval.shape for x in equation.invars if len(x.aval.shape) == 4]
        (rows, heads, queries, size), (_, _, keys, _), *_ = shapes
        return _SPLASH[kernel[1]] * _product(rows * heads, queries, keys, size, causal)
    if name == "cond":
        counts = [_count(branch.jaxpr, causal) for branch in parameters["branches"]]
        scopes = _BRANCH_PROBABILITY.findall(scope)
        if not scopes:
            return max(counts)
        probability = float(scopes[-1])
        return (1 - probability) * counts[0] + probability * counts[1]
    inner = [
        value.jaxpr if isinstance(value, ClosedJaxpr) else value
        for value in parameters.values()
        if isinstance(value, ClosedJaxpr | Jaxpr)
    ]
    times = parameters["length"] if name == "scan" else 1
    if name == "while":
        scopes = _ITERATIONS.findall(scope)
        times, inner = float(scopes[-1]) if scopes else 1, map(_live, inner)
    if name == "shard_map":
        pairs = [*zip(equation.invars, parameters["jaxpr"].invars, strict=True)]
        # A shard may be empty: JAX's fused attention on GPUs passes empty arrays to the backward pass.
        shards = max(whole.aval.size // max(shard.aval.size, 1) for whole, shard in pairs)
        split = {shard for whole, shard in pairs if whole.aval.size != shard.aval.size}
        return _count_shards(parameters["jaxpr"], split, shards, causal)
    return times * sum(_count(jaxpr, causal) for jaxpr in inner)


def _product(matrices: int, queries: int, keys: int, size: int, causal: bool) -> int:
    """Returns the FLOPs of one of the matrix products of attention, such as queries times keys.

    `matrices` is the number of heads of all rows together, `size` is the size of a head. `queries` and `keys` are
    sequence lengths.
    """
    from common.model.attend import spans

    pairs = sum((end - start) * seen for start, end, seen in spans(queries, keys, causal))
    return 2 * matrices * size * pairs
