"""Validation and preparation of runs."""

from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from common.config import complete
from common.model.language_model import LanguageModel
from common.tasks import language_modelling
from common.tasks.language_modelling import LanguageModelling
from common.train import loop
from gmlp_lm import model
from gmlp_lm.model import language_model


def validate(config: ConfigDict) -> None:
    """Raises a UserError for an invalid or incomplete configuration. Reads no data."""
    with complete("--config"):
        model.validate(config.model)
        language_modelling.validate(config)
        loop.validate(config)


class Task(LanguageModelling):
    """Language modelling with the models of this paper."""

    def build(self, rngs: nnx.Rngs) -> LanguageModel:
        return language_model(self.config.model, self.vocabulary, rngs=rngs)


def prepare(config: ConfigDict, mesh: Mesh, read_data: bool = True) -> tuple[ConfigDict, Task]:
    """Returns the configuration for the training loop, and the task. `read_data=False` makes a task without data.

    Raises a UserError if the configuration or the data are invalid.
    """
    validate(config)
    return config, Task(config, mesh, read_data=read_data)
