"""A configuration as a run, and a finished run ready to be used."""

from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from common.config import complete
from common.data.windows import scored_once
from common.tasks import language_modelling
from common.tasks.language_modelling import BYTES, LanguageModelling, Objective
from common.train import loop
from common.train.feed import put
from common.train.task import Sketch, Values
from common.train.trained import load_run
from common.train.workdir import CONFIG, read_config
from gmlp_lm import model
from gmlp_lm.model import language_model


def validate(config: ConfigDict) -> None:
    """Everything that can be known without the data."""
    with complete("--config"):
        model.validate(config.model)
        language_modelling.validate(config)
        loop.validate(config)


def prepare(config: ConfigDict, mesh: Mesh) -> tuple[ConfigDict, LanguageModelling]:
    """The configuration that the loop takes, and the task. Errors are those of the configuration and of the data."""
    validate(config)
    return config, LanguageModelling(config, language_model, mesh)


def sketch(config: ConfigDict, multiple: int) -> Sketch:
    """The run without its data; `multiple` divides the rows of a batch. Errors are those of the configuration."""
    validate(config)
    return Objective.sketch(config, language_model, multiple)


def fit(config: ConfigDict, workdir: Path, mesh: Mesh) -> dict:
    """Trains, or goes on with, the run in `workdir`; returns its summary. Errors are those of `loop.fit`."""
    return loop.fit(*prepare(config, mesh), workdir, mesh)


def load(workdir: Path, mesh: Mesh) -> tuple[ConfigDict, Values]:
    """Configuration and best values of a run.

    Raises:
      UserError: there is no run, or no checkpoint.
    """
    config = read_config(workdir)
    with complete(workdir / CONFIG):
        model.validate(config.model)
    values = load_run(
        workdir, config, lambda rngs: language_model(config.model, BYTES, rngs=rngs), mesh
    )
    return config, values


def total_nats(config: ConfigDict, values: Values, text_n: np.ndarray, stride: int) -> float:
    """Returns the negative log-likelihood of every byte of a text but the first, in nats.

    Args:
      text_n: bytes (n,), uint8, at least two.
      stride: bytes scored in each window of `config.model.length`.
    """
    objective = Objective(config, language_model)

    @jax.jit
    def loss(trainable, frozen, batch):
        return objective.loss(values.structure.build(trainable, frozen), batch, None)[0]

    batches = scored_once(text_n, config.model.length, stride, config.eval.batch)
    return sum(
        float(loss(values.trainable, values.frozen, put(batch, values.mesh))) for batch in batches
    )
