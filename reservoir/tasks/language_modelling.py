"""Byte language modelling with reservoirs (section 4.2)."""

from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from common.model.language_model import LanguageModel
from common.tasks import language_modelling
from reservoir.model import language_model as build
from reservoir.skipping import Backskipping
from reservoir.transformer_fields import check_transformer


class LanguageModelling(Backskipping, language_modelling.LanguageModelling):
    """Byte language modelling with reservoirs and, if configured, backskipping."""

    def __init__(self, config: ConfigDict, mesh: Mesh, *, read_data: bool = True):
        validate(config)
        super().__init__(config, mesh, read_data=read_data)

    def build(self, rngs: nnx.Rngs) -> LanguageModel:
        return build(self.config.model, self.vocabulary, rngs=rngs)


def validate(config: ConfigDict) -> None:
    """Checks the fields of the model, the data and the evaluation.

    Raises:
      UserError: a field has an invalid value.
    """
    check_transformer(config.model)
    language_modelling.validate(config)
