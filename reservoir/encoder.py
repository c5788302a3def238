"""RoBERTa with reservoirs (section 4.3): pretraining model and classifier."""

from flax import nnx
from ml_collections import ConfigDict

from common.model import initializers, transformer
from common.model.classifier import ClassificationHead, Classifier
from common.model.embed import Embed
from common.model.encoder import Encoder, MaskedHead, MaskedLanguageModel
from common.model.linear import Linear
from common.model.norm import LayerNorm
from common.variables import freeze, give, thaw
from reservoir.model import encoder_stack, reservoir_layers
from reservoir.placement import placement

INIT_STD = 0.02

FINE_TUNING_MODES = ("keep", "tune", "freeze_now")
"""Values of `config.reservoirs` in fine-tuning: reservoirs stay frozen; are trained; or, the paper's control, layers of
a plain run are frozen in fine-tuning only."""


def initialize_as_bert(
    module: MaskedLanguageModel | Classifier, model: ConfigDict, rngs: nnx.Rngs
) -> None:
    """Draws trained matrices and tables from N(0, 0.02). Biases are 0 and norms 1 already.

    Skips trained reservoirs, and with another `model.init` than "recipe" all layers: they are initialized already.
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
    """Returns the encoder: embeddings with a norm instead of a scale, then the layers with their reservoirs."""
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
    """Returns the pretraining model with RoBERTa's initialization."""
    head = MaskedHead(vocabulary, model.width, rngs=rngs)
    made = MaskedLanguageModel(encoder(model, vocabulary, rngs=rngs), head)
    initialize_as_bert(made, model, rngs)
    return made


def classifier(
    model: ConfigDict,
    vocabulary: int,
    classes: int,
    *,
    rngs: nnx.Rngs,
    reservoirs: str = "keep",
    freeze_now: int = 0,
) -> Classifier:
    """Returns the fine-tuning model. Its frozen values are marked as loaded: they come from the pretraining run.

    Args:
      reservoirs: one of FINE_TUNING_MODES.
      freeze_now: number of layers that "freeze_now" freezes, placed like reservoirs.
    """
    head = ClassificationHead(model.width, classes, rngs=rngs, dropout_rate=model.head_dropout)
    made = Classifier(encoder(model, vocabulary, rngs=rngs), head)
    initialize_as_bert(made, model, rngs)
    if reservoirs == "tune":
        thaw(made.encoder)
    if reservoirs == "freeze_now":
        for layer in placement(model.encoder_layers, freeze_now):
            freeze(made.encoder.stack.blocks[layer])
    give(made.encoder)
    return made
