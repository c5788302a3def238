"""A configuration as a run."""

from pathlib import Path

from jax.sharding import Mesh
from ml_collections import ConfigDict

from common.config import complete
from common.tasks import translation
from common.train import loop
from reservoir import model
from reservoir.model import translator


def validate(config: ConfigDict) -> None:
    """Everything that can be known without the data, which may take minutes to read."""
    with complete("--config"):
        model.validate(config.model)
        translation.validate(config)
        loop.validate(config)


def fit(config: ConfigDict, workdir: Path, mesh: Mesh) -> dict:
    """Trains, or goes on with, the run in `workdir`; returns its summary. Errors are those of `loop.fit`."""
    validate(config)
    return loop.fit(config, translation.Translation(config, translator, mesh), workdir, mesh)
