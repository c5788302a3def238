"""Sequence classification from the encoder's output at the first token (RoBERTa; Liu et al., 2019)."""

import jax
import jax.numpy as jnp
from flax import nnx

from common.model.dropout import dropout, fold
from common.model.encoder import Encoder
from common.model.linear import Linear


class ClassificationHead(nnx.Module):
    """Dropout, a dense layer with tanh, dropout, and the output layer."""

    def __init__(self, width: int, classes: int, *, rngs: nnx.Rngs, dropout_rate: float = 0.0):
        self.dense = Linear(width, width, ("embed", None), rngs=rngs)
        self.out = Linear(width, classes, ("embed", None), rngs=rngs)
        self.dropout_rate = dropout_rate

    def __call__(self, x_BD: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Returns logits (B, C) in float32."""
        hidden_BD = jnp.tanh(self.dense(dropout(x_BD, self.dropout_rate, fold(key, 0))))
        return self.out(dropout(hidden_BD, self.dropout_rate, fold(key, 1)), jnp.float32)


class Classifier(nnx.Module):
    """An encoder with a classification head."""

    def __init__(self, encoder: Encoder, head: ClassificationHead):
        self.encoder, self.head = encoder, head

    def __call__(
        self, tokens_BL: jax.Array, lengths_B: jax.Array, key: jax.Array | None = None
    ) -> jax.Array:
        """Returns logits (B, C) in float32."""
        x_BLD = self.encoder(tokens_BL, lengths_B, fold(key, 0))
        return self.head(x_BLD[:, 0], fold(key, 1))
