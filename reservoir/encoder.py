"""RoBERTa with reservoirs (section 4.3): the encoder of `model.encoder_blocks` with embeddings and output layers."""

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

DEVIATION = 0.02

RESERVOIRS = ("keep", "tune", "freeze_now")
"""What becomes of frozen layers in fine-tuning. The last one is the paper's control: layers of a plain run that are
frozen in fine-tuning alone."""


def as_bert(module: MaskedLanguageModel | Classifier, model: ConfigDict, rngs: nnx.Rngs) -> None:
    """N(0, 0.02) for trained matrices and tables; biases are 0 and norms 1 already. Layers that have an initialization
    of their own keep it: reservoirs, also where they are trained, and all that `model.init` is about."""
    draw = initializers.normal(DEVIATION)
    own = list(module.encoder.stack.blocks)
    if model.init == "recipe":
        own = [own[layer] for layer in reservoir_layers(model)] if model.reservoir_trained else []
    started = {id(part) for block in own for _, part in nnx.iter_modules(block)}
    for _, part in nnx.iter_modules(module):
        name = "kernel" if isinstance(part, Linear) else "table"
        matrix = getattr(part, name, None)
        if isinstance(matrix, nnx.Param) and id(part) not in started:
            matrix[...] = draw(rngs.params(), matrix.shape)


def encoder(model: ConfigDict, vocabulary: int, *, rngs: nnx.Rngs) -> Encoder:
    """Embeddings that are not scaled but normalized, then layers, some of them frozen."""
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
    """What pretraining trains, as RoBERTa starts it."""
    head = MaskedHead(vocabulary, model.width, rngs=rngs)
    made = MaskedLanguageModel(encoder(model, vocabulary, rngs=rngs), head)
    as_bert(made, model, rngs)
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
    """What fine-tuning trains. Frozen values are given: those of the pretraining run, whatever the seed is here.

    Args:
      reservoirs: one of RESERVOIRS.
      freeze_now: number of layers that "freeze_now" freezes, placed as reservoirs are.
    """
    head = ClassificationHead(model.width, classes, rngs=rngs, dropout_rate=model.head_dropout)
    made = Classifier(encoder(model, vocabulary, rngs=rngs), head)
    as_bert(made, model, rngs)
    if reservoirs == "tune":
        thaw(made.encoder)
    if reservoirs == "freeze_now":
        for layer in placement(model.encoder_layers, freeze_now):
            freeze(made.encoder.stack.blocks[layer])
    give(made.encoder)
    return made
