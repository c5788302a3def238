"""The paper's two models: a language model over a fixed context of tokens, and a stack of softmax layers.

Suffixes: B examples, W lags of the context (the paper's K), V vocabulary, M input features, C classes.
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
"""Name -> function from the number of inputs to the initializer of a cold start. "torch" draws like PyTorch's Linear,
"normal" from N(0, 1)."""


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
    """softmax(H U), where H is the sum or the concatenation of W noisy embeddings (section 2)."""

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


class SoftmaxLayers(nnx.Module):
    """A stack of linear layers without biases, with a softmax between layers (section 3.3)."""

    def __init__(self, features: int, outputs: int, layers: int, cold: str, *, rngs: nnx.Rngs):
        def layer(inputs: int) -> Linear:
            init = INITIALIZERS[cold](inputs)
            axes = ("embed", "vocab")
            return Linear(inputs, outputs, axes, rngs=rngs, kernel_init=init, bias_init=None)

        self.layers = nnx.List([layer(features)] + [layer(outputs) for _ in range(layers - 1)])

    def __call__(self, features_BM: jax.Array) -> jax.Array:
        """Returns logits (B, C)."""
        *hidden, last = self.layers
        for layer in hidden:
            features_BM = jax.nn.softmax(layer(features_BM))
        return last(features_BM)
