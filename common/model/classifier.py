"""A class for every sequence, from an encoder's first state (RoBERTa; Liu et al., 2019).

B batch, L length, D width, N classes.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from common.model.dropout import dropout, fold
from common.model.encoder import Encoder
from common.model.linear import Linear


class ClassificationHead(nnx.Module):
    """Dropout, a layer of the width with tanh, dropout, and the classes."""

    def __init__(self, width: int, classes: int, *, rngs: nnx.Rngs, rate: float = 0.0):
        self.dense = Linear(width, width, ("embed", None), rngs=rngs)
        self.out = Linear(width, classes, ("embed", None), rngs=rngs)
        self.rate = rate

    def __call__(self, x_BD: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Logits (B, N) in float32."""
        hidden_BD = jnp.tanh(self.dense(dropout(x_BD, self.rate, fold(key, 0))))
        return self.out(dropout(hidden_BD, self.rate, fold(key, 1)), jnp.float32)


class Classifier(nnx.Module):
    """Tokens in, logits of the classes out."""

    def __init__(self, encoder: Encoder, head: ClassificationHead):
        self.encoder, self.head = encoder, head

    def __call__(
        self, tokens_BL: jax.Array, lengths_B: jax.Array, key: jax.Array | None = None
    ) -> jax.Array:
        """Logits (B, N); the first token of a sequence stands for all of it."""
        x_BLD = self.encoder(tokens_BL, lengths_B, fold(key, 0))
        return self.head(x_BLD[:, 0], fold(key, 1))
