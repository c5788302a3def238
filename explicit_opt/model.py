"""The paper's two models: a language model of the K tokens before, and softmax layers over any features.

B examples, K tokens before, N vocabulary or classes, D features.
"""

from collections.abc import Callable

import jax
from flax import nnx

from common.model import initializers
from common.model.linear import Linear
from explicit_opt.counts import TABLE_AXES, Noise

AGGREGATES = ("sum", "cat")
INITIALIZERS: dict[str, Callable[[int], Callable]] = {
    "torch": lambda inputs: initializers.uniform(inputs**-0.5),
    "normal": lambda inputs: initializers.normal(1.0),
}
"""Cold starts by name, as functions of the number of inputs: PyTorch's Linear, and N(0, 1)."""


@jax.custom_vjp
def spread(share_D: jax.Array, table_DN: jax.Array) -> jax.Array:
    """share @ table, (N,), differentiable in the table only.

    Its gradient is written row by row: XLA's own would be written column by column, and copied to turn it around.
    """
    return share_D @ table_DN


spread.defvjp(
    lambda share_D, table_DN: (share_D @ table_DN, share_D),
    lambda share_D, g_N: (None, share_D[:, None] * g_N[None]),
)


class FeedForward(nnx.Module):
    """softmax(H U) with H the sum or the concatenation of K noisy embeddings (section 2)."""

    def __init__(self, vocabulary: int, context: int, aggregate: str, cold: str, *, rngs: nnx.Rngs):
        tables = context if aggregate == "cat" else 1
        shape = (tables, vocabulary, vocabulary)
        draw = INITIALIZERS[cold](tables * vocabulary)
        self.tables = nnx.Param(draw(rngs.params(), shape), axes=TABLE_AXES)
        self.context = context

    def __call__(self, contexts_BK: jax.Array, noise: Noise) -> jax.Array:
        """Logits (B, N): K rows of the tables each, and what the noise adds, never H."""
        tables = self.tables[...]
        uniform_TN = [spread(noise.uniform_N, table) for table in tables]
        logits_BN = 0.0
        for lag in range(self.context):
            number = lag % len(tables)  # sums share one table
            tokens_B = contexts_BK[:, lag]
            logits_BN += noise.keep_N[tokens_B, None] * tables[number, tokens_B]
            logits_BN += noise.spill_N[tokens_B, None] * uniform_TN[number]
        return logits_BN


class SoftmaxLayers(nnx.Module):
    """L layers without biases, each a softmax of N outputs; the last one gives logits (section 3.3)."""

    def __init__(self, features: int, outputs: int, layers: int, cold: str, *, rngs: nnx.Rngs):
        def layer(inputs: int) -> Linear:
            init = INITIALIZERS[cold](inputs)
            axes = ("embed", "vocab")
            return Linear(inputs, outputs, axes, rngs=rngs, kernel_init=init, bias_init=None)

        self.layers = nnx.List([layer(features)] + [layer(outputs) for _ in range(layers - 1)])

    def __call__(self, features_BD: jax.Array) -> jax.Array:
        """Logits (B, N)."""
        return self.layers[-1](self.hidden(features_BD, len(self.layers) - 1))

    def hidden(self, features_BD: jax.Array, below: int) -> jax.Array:
        """What layer number `below` (from 0) reads."""
        for layer in list(self.layers)[:below]:
            features_BD = jax.nn.softmax(layer(features_BD))
        return features_BD
