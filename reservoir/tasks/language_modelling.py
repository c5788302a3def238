"""Byte language modelling with reservoirs (section 4.2)."""

from flax import nnx
from ml_collections import ConfigDict

from common.model import transformer
from common.model.embed import Embed
from common.model.language_model import LanguageModel
from common.model.linear import Linear
from common.tasks import language_modelling
from reservoir.model import blocks
from reservoir.skipping import Backskipping
from reservoir.transformer_fields import check_transformer


class LanguageModelling(Backskipping, language_modelling.LanguageModelling):
    """Byte language modelling with reservoirs and, if configured, backskipping."""

    def build(self, rngs: nnx.Rngs) -> LanguageModel:
        return build(self.config.model, self.vocabulary, rngs=rngs)


def validate(config: ConfigDict) -> None:
    """Checks the fields of the model, the data and the evaluation.

    Raises:
      UserError: a field has an invalid value.
    """
    check_transformer(config.model)
    language_modelling.validate(config)


def build(model: ConfigDict, vocabulary: int, *, rngs: nnx.Rngs) -> LanguageModel:
    """Returns the language model of section 4.2. Input and output embeddings are tied unless `model.tied` is False."""
    embed = Embed(
        vocabulary,
        model.width,
        rngs=rngs,
        positions=model.positions,
        maximum=model.length,
        dropout_rate=model.dropout,
        pad=None,
    )
    layers = blocks(model, "language model", rngs=rngs)
    stack = transformer.stack(model, layers, rngs=rngs, skip_rate=model.layerdrop)
    axes = ("embed", "vocab")
    output = None if model.get("tied", True) else Linear(model.width, vocabulary, axes, rngs=rngs)
    return LanguageModel(embed, stack, output, dtype=transformer.compute_dtype(model.dtype))
