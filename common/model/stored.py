"""Activations that the forward pass of a scan over layers stores for the backward pass.

By default, JAX stores every array of a layer that the backward pass of the scan reads, such as four arrays for one
GELU. Outside of a scan, the compiler avoids this: it computes elementwise operations again where their results are
read. Therefore `common.model.scan` stores only the arrays that a policy of `POLICIES` selects, such as arrays that a
layer marks by `stored`, and computes all others again.
"""

from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

PRODUCT, OTHER = "product with weights", "stored"
"""Names of the marked arrays."""


def stored(x: jax.Array, name: str = OTHER) -> jax.Array:
    """Marks an array that is costly to compute. Returns the array.

    Args:
      name: PRODUCT for the result of a matrix product with weights, otherwise OTHER.
    """
    return checkpoint_name(x, name)


def _is_costly(primitive: Any, *_: Any, **__: Any) -> bool:
    """Returns whether `primitive` is cuDNN's attention. Its residuals are costly, and `stored` cannot mark them."""
    return primitive.name.startswith("dot_product_attention_fwd")


POLICIES = {
    "none": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.save_only_these_names(PRODUCT, OTHER), _is_costly
    ),
    "dots": jax.checkpoint_policies.save_only_these_names(PRODUCT),
    "full": jax.checkpoint_policies.nothing_saveable,
}
"""Name of a rematerialization policy (`common.model.stack.REMAT`) -> the policy in a scan."""
