"""Random branches: predicates that say how often they are true."""

from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

_PREFIX = "chance "


def drawn(key: jax.Array, chance: float) -> jax.Array:
    """Draws a predicate that is true with the probability `chance`, and notes the probability in the program.

    A `jax.lax.cond` of it counts with the expectation of its operations (`common.train.flops`).
    """
    return checkpoint_name(jax.random.bernoulli(key, chance), f"{_PREFIX}{chance!r}")


def chance_of(equation: Any) -> float | None:
    """Returns the probability of the predicate that this equation of a jaxpr defines; None for other equations."""
    name = equation.params.get("name", "") if equation.primitive.name == "name" else ""
    return float(name.removeprefix(_PREFIX)) if name.startswith(_PREFIX) else None
