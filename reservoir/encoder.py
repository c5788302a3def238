"""RoBERTa with reservoirs (section 4.3): the masked language model and the classifier."""

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from common.freezing import mark_loaded
from common.model import initializers, transformer
from common.model.dropout import Key, dropout, fold
from common.model.embed import Embed
from common.model.encoder import Encoder
from common.model.feed_forward import ACTIVATIONS
from common.model.linear import Linear
from common.model.norm import LayerNorm
from reservoir import methods
from reservoir.model import encoder_stack, reservoir_layers

INIT_STD = 0.02


class MaskedLanguageModel(nnx.Module):
    """An encoder and a head for masked language modelling.

    Args:
      head: function (encoder's output at the masked positions (B, masked, D), token embedding `Embed`) -> logits
        (B, masked, V).
    """

    def __init__(self, encoder: Encoder, head: nnx.Module):
        self.encoder, self.head = encoder, head

    def __call__(
        self,
        tokens_BL: jax.Array,
        lengths_B: jax.Array,
        masked_positions: jax.Array,
        key: Key = None,
    ) -> jax.Array:
        """Returns logits (B, masked, V) at the positions `masked_positions`, (B, masked)."""
        x_BLD = self.encoder(tokens_BL, lengths_B, key)
        x_masked = jnp.take_along_axis(x_BLD, masked_positions[..., None], axis=1)
        return self.head(x_masked, self.encoder.embed)


class Classifier(nnx.Module):
    """An encoder and a classification head, which reads the encoder's output at the first token.

    Args:
      head: function (encoder's output at the first token (B, D), dropout key) -> logits (B, C).
    """

    def __init__(self, encoder: Encoder, head: nnx.Module):
        self.encoder, self.head = encoder, head

    def __call__(self, tokens_BL: jax.Array, lengths_B: jax.Array, key: Key = None) -> jax.Array:
        """Returns logits (B, C) in float32."""
        x_BLD = self.encoder(tokens_BL, lengths_B, fold(key, 0))
        return self.head(x_BLD[:, 0], fold(key, 1))


class MaskedHead(nnx.Module):
    """A dense layer with GELU and a norm, then the tied output layer with a bias."""

    def __init__(self, vocabulary: int, width: int, *, rngs: nnx.Rngs):
        self.dense = Linear(width, width, ("embed", None), rngs=rngs)
        self.norm = LayerNorm(width, rngs=rngs)
        self.bias = nnx.Param(initializers.zeros(rngs.params(), (vocabulary,)), axes=("vocab",))

    def __call__(self, x_BLD: jax.Array, embed: Embed) -> jax.Array:
        """Returns logits (B, L, V) in float32, for any L positions of each row."""
        return embed.logits(self.norm(ACTIVATIONS["gelu"](self.dense(x_BLD)))) + self.bias[...]


class ClassificationHead(nnx.Module):
    """Dropout, a dense layer with tanh, dropout, and the output layer."""

    def __init__(self, width: int, classes: int, *, rngs: nnx.Rngs, dropout_rate: float = 0.0):
        self.dense = Linear(width, width, ("embed", None), rngs=rngs)
        self.out = Linear(width, classes, ("embed", None), rngs=rngs)
        self.dropout_rate = dropout_rate

    def __call__(self, x_BD: jax.Array, key: Key = None) -> jax.Array:
        """Returns logits (B, C) in float32."""
        hidden_BD = jnp.tanh(self.dense(dropout(x_BD, self.dropout_rate, fold(key, 0))))
        return self.out(dropout(hidden_BD, self.dropout_rate, fold(key, 1)), jnp.float32)


def initialize_as_bert(
    module: MaskedLanguageModel | Classifier, model: ConfigDict, rngs: nnx.Rngs
) -> None:
    """Redraws trained matrices and embedding tables, in place: normal with mean 0 and standard deviation 0.02.

    Reservoirs keep their values, even if they are trained. If `model.init` is not "recipe", all layers of the stack
    keep their values. Biases keep the value 0, and the scales of norms the value 1.
    """
    draw = initializers.normal(INIT_STD)
    skipped = list(module.encoder.stack.blocks)
    if model.init == "recipe":
        reservoirs = reservoir_layers(model) if model.reservoir_trained else ()
        skipped = [skipped[layer] for layer in reservoirs]
    initialized = {id(part) for block in skipped for _, part in nnx.iter_modules(block)}
    for _, part in nnx.iter_modules(module):
        name = "kernel" if isinstance(part, Linear) else "table"
        matrix = getattr(part, name, None)
        if isinstance(matrix, nnx.Param) and id(part) not in initialized:
            matrix[...] = draw(rngs.params(), matrix.shape)


def encoder(model: ConfigDict, vocabulary: int, *, rngs: nnx.Rngs) -> Encoder:
    """Returns the encoder: embeddings (not scaled by sqrt(D)) with a norm, then trained layers and reservoirs."""
    embed = Embed(
        vocabulary,
        model.width,
        rngs=rngs,
        positions=model.positions,
        maximum=model.max_length,
        scale=False,
    )
    norm = LayerNorm(model.width, rngs=rngs)
    stack = encoder_stack(model, rngs=rngs)
    dtype = transformer.compute_dtype(model.dtype)
    return Encoder(embed, norm, stack, dropout_rate=model.dropout, dtype=dtype)


def masked_lm(model: ConfigDict, vocabulary: int, *, rngs: nnx.Rngs) -> MaskedLanguageModel:
    """Returns the pretraining model, initialised by `initialize_as_bert`."""
    head = MaskedHead(vocabulary, model.width, rngs=rngs)
    made = MaskedLanguageModel(encoder(model, vocabulary, rngs=rngs), head)
    initialize_as_bert(made, model, rngs)
    return made


def classifier(config: ConfigDict, vocabulary: int, classes: int, *, rngs: nnx.Rngs) -> Classifier:
    """Returns the fine-tuning model, after the changes that its method (`reservoir.methods`) makes."""
    model = config.model
    head = ClassificationHead(model.width, classes, rngs=rngs, dropout_rate=model.head_dropout)
    made = Classifier(encoder(model, vocabulary, rngs=rngs), head)
    initialize_as_bert(made, model, rngs)
    # The values of frozen reservoirs come from the pretraining run, not from the seed of the fine-tuning run.
    mark_loaded(made.encoder)
    if change := methods.of(config).change:
        change(config, made, rngs=rngs)
    return made
