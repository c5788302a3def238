"""Validation, preparation, training and loading of runs."""

from pathlib import Path

from jax.sharding import Mesh
from ml_collections import ConfigDict

from common.config import complete
from common.tasks import language_modelling
from common.tasks.language_modelling import BYTES, LanguageModelling
from common.train import loop
from common.train.restore import load_run
from common.train.task import ModelState
from common.train.workdir import CONFIG, read_config
from gmlp_lm import model
from gmlp_lm.model import language_model


def validate(config: ConfigDict) -> None:
    """Checks the configuration without reading the data.

    Raises:
      UserError: a field is missing or out of range.
    """
    with complete("--config"):
        model.validate(config.model)
        language_modelling.validate(config)
        loop.validate(config)


def prepare(
    config: ConfigDict, mesh: Mesh, read_data: bool = True
) -> tuple[ConfigDict, LanguageModelling]:
    """Returns the configuration for the training loop, and the task. `read_data` False builds a task without data.

    Raises:
      UserError: the configuration or the data is invalid.
    """
    validate(config)
    return config, LanguageModelling(config, language_model, mesh, read_data=read_data)


def fit(config: ConfigDict, workdir: Path, mesh: Mesh) -> dict:
    """Trains or resumes the run in `workdir`; returns its summary. Raises the errors of `loop.fit`."""
    return loop.fit(*prepare(config, mesh), workdir, mesh)


def load(workdir: Path, mesh: Mesh) -> tuple[ConfigDict, ModelState]:
    """Returns the configuration of a run and its best checkpoint.

    Raises:
      UserError: the folder has no run or no checkpoint.
    """
    config = read_config(workdir)
    with complete(workdir / CONFIG):
        model.validate(config.model)
    values = load_run(
        workdir, config, lambda rngs: language_model(config.model, BYTES, rngs=rngs), mesh
    )
    return config, values
