"""Sequence classification from the encoder's output at the first token, as in RoBERTa (Liu et al., 2019)."""

import jax
from flax import nnx

from common.model.dropout import Key, fold
from common.model.encoder import Encoder


class Classifier(nnx.Module):
    """An encoder and a classification head.

    Args:
      head: function (encoder's output at the first token (B, D), dropout key) -> logits (B, C).
    """

    def __init__(self, encoder: Encoder, head: nnx.Module):
        self.encoder, self.head = encoder, head

    def __call__(self, tokens_BL: jax.Array, lengths_B: jax.Array, key: Key = None) -> jax.Array:
        """Returns logits (B, C) in float32."""
        x_BLD = self.encoder(tokens_BL, lengths_B, fold(key, 0))
        return self.head(x_BLD[:, 0], fold(key, 1))
