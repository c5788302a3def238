"""The paper's language model over a fixed context of tokens.

Shape letters of this module: B examples, W lags of the context (the paper's K), V vocabulary.
"""

import jax
from flax import nnx

from explicit_opt.counts import TABLE_AXES, Noise
from explicit_opt.start import INITIALIZERS

AGGREGATES = ("sum", "cat")


@jax.custom_vjp
def constant_matvec(constant_V: jax.Array, table_VV: jax.Array) -> jax.Array:
    """Returns constant @ table, (V,). Only the table has a gradient.

    The custom gradient is row-major. XLA's own gradient is column-major and needs a copy.
    """
    return constant_V @ table_VV


constant_matvec.defvjp(
    lambda constant_V, table_VV: (constant_V @ table_VV, constant_V),
    lambda constant_V, g_V: (None, constant_V[:, None] * g_V[None]),
)


class FeedForward(nnx.Module):
    """Computes the logits H U, where H is the sum or the concatenation of W noisy embeddings (section 3.1)."""

    def __init__(self, vocabulary: int, context: int, aggregate: str, cold: str, *, rngs: nnx.Rngs):
        tables = context if aggregate == "cat" else 1
        shape = (tables, vocabulary, vocabulary)
        draw = INITIALIZERS[cold](tables * vocabulary)
        self.tables = nnx.Param(draw(rngs.params(), shape), axes=TABLE_AXES)
        self.context = context

    def __call__(self, contexts_BW: jax.Array, noise: Noise) -> jax.Array:
        """Returns logits (B, V). Each example sums W table rows and W noise terms, so H is never built."""
        tables = self.tables[...]
        uniform_logits = [constant_matvec(noise.uniform_V, table) for table in tables]
        logits_BV = 0.0
        for lag in range(self.context):
            index = lag % len(tables)  # a sum has one table for all lags
            tokens_B = contexts_BW[:, lag]
            logits_BV += noise.keep_V[tokens_B, None] * tables[index, tokens_B]
            logits_BV += noise.spill_V[tokens_B, None] * uniform_logits[index]
        return logits_BV
