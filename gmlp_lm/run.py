"""Validation, preparation and loading of runs."""

from pathlib import Path

from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from common.config import complete
from common.data import lossless
from common.data.lossless_tokenizer import LosslessTokenizer
from common.model.language_model import LanguageModel
from common.storage.addresses import shown
from common.tasks import language_modelling
from common.tasks.language_modelling import LanguageModelling
from common.train import loop
from common.train.task import ModelState
from common.train.workdir import CONFIG
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


def load(workdir: Path, mesh: Mesh) -> tuple[ConfigDict, LosslessTokenizer, ModelState]:
    """Returns the configuration and the tokenizer of a run, and the model state of its best checkpoint.

    Raises a UserError if the folder has no run of this paper, no checkpoint, or a damaged file.
    """
    from common.train.restore import load_run, read_config

    config = read_config(workdir, paper="gmlp_lm")
    with complete(shown(workdir / CONFIG)):
        model.validate(config.model)
    tokenizer = lossless.in_run(workdir)
    values = load_run(
        workdir, config, lambda rngs: language_model(config.model, tokenizer.size, rngs=rngs), mesh
    )
    return config, tokenizer, values
