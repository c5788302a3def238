"""Activations that the forward pass of a scan over layers stores for the backward pass.

Without further instructions, JAX stores every array of a layer that the backward pass of the scan reads, such as four
arrays for one GELU. Outside of a scan, the compiler avoids this: it computes elementwise operations again where their
results are read. A scan therefore stores only the arrays that a layer marks with `stored`, and computes all other
arrays again.
"""

from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

NAME = "stored"
"""Name of the marked arrays."""


def stored(x: jax.Array) -> jax.Array:
    """Marks an array that is costly to compute, such as the result of a matrix product. Returns the array."""
    return checkpoint_name(x, NAME)


def _is_costly(primitive: Any, *_: Any, **__: Any) -> bool:
    """Returns whether a scan stores the results of a primitive that `stored` cannot mark.

    These are parameters that fsdp has gathered, and the results of cuDNN's attention.
    """
    return primitive.name == "all_gather" or primitive.name.startswith("dot_product_attention_fwd")


STORED = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.save_only_these_names(NAME), _is_costly
)
"""Rematerialization policy that stores the arrays marked with `stored`."""
