"""FLOPs of a function, counted in its jaxpr: deterministic and the same on every machine."""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Var
from jax.interpreters import partial_eval

from common.model.attend import spans
from common.model.chance import chance_of

_FUSED = {"dot_product_attention_fwd_wrapper": 2, "dot_product_attention_bwd_wrapper": 4}
"""cuDNN's attention primitives, with the number of query-key products that each replaces."""

_RECOMPUTED = "rematted_computation"
"""The name scope of operations that the backward pass recomputes (`jax.checkpoint`)."""


def count(function: Callable, *arguments: Any) -> int:
    """Counts the FLOPs of matrix products and convolutions, two per multiply-add, after dead-code elimination.

    Matrix products are all but a few per cent of a transformer's arithmetic. Frozen weights have no weight gradient in
    the jaxpr, so their saving is counted. The body of a loop counts once per iteration. A branch with a known
    probability (`common.model.chance`) counts with its expectation; another branch with its most expensive arm.

    These are model FLOPs, as is usual for MFU: recomputation in the backward pass does not count. Fused attention on
    GPUs counts as the products that it replaces (`common.model.attend`): two forward, four backward.
    """
    closed = jax.make_jaxpr(function)(*arguments)
    jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    return round(_count(jaxpr, {}))


def _count(jaxpr: Jaxpr, chances: dict[Var, float]) -> float:
    """FLOPs of a jaxpr; `chances` has the probabilities of those inputs that are predicates."""
    total, chances = 0.0, dict(chances)
    for equation in jaxpr.eqns:
        if _RECOMPUTED in str(equation.source_info.name_stack):
            continue
        chance = chance_of(equation)
        if chance is None and equation.primitive.name == "convert_element_type":
            chance = _known(chances, equation.invars[0])  # the index of a branch is its predicate
        if chance is not None:
            chances[equation.outvars[0]] = chance
        total += _equation(equation, chances)
    return total


def _known(chances: dict[Var, float], value: Any) -> float | None:
    """The probability of a predicate; None for a literal and for other values."""
    return chances.get(value) if isinstance(value, Var) else None


def _equation(equation: Any, chances: dict[Var, float]) -> float:
    name, parameters = equation.primitive.name, equation.params
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
    if name in _FUSED:
        (rows, queries, heads, size), (_, keys, *_) = (x.aval.shape for x in equation.invars[:2])
        parts = spans(queries, keys, "CAUSAL" in parameters["mask_type"].name)
        pairs = sum((end - start) * seen for start, end, seen in parts)
        return _FUSED[name] * 2 * rows * heads * size * pairs
    if name == "cond":
        index, *given = equation.invars
        counts = [_inner(branch.jaxpr, given, chances) for branch in parameters["branches"]]
        chance = _known(chances, index)
        return max(counts) if chance is None else (1 - chance) * counts[0] + chance * counts[1]
    inner = [
        value.jaxpr if isinstance(value, ClosedJaxpr) else value
        for value in parameters.values()
        if isinstance(value, ClosedJaxpr | Jaxpr)
    ]
    times = parameters["length"] if name == "scan" else 1
    return times * sum(_inner(jaxpr, equation.invars, chances) for jaxpr in inner)


def _inner(jaxpr: Jaxpr, given: list, chances: dict[Var, float]) -> float:
    """FLOPs of an inner jaxpr, called with the values `given`."""
    if len(given) != len(jaxpr.invars):
        return _count(jaxpr, {})
    known = {own: _known(chances, value) for own, value in zip(jaxpr.invars, given, strict=True)}
    return _count(jaxpr, {own: chance for own, chance in known.items() if chance is not None})
