"""Prepares and fits a run: selects the task and converts epochs to steps."""

from pathlib import Path
from types import ModuleType

from jax.sharding import Mesh
from ml_collections import ConfigDict

from common.config import complete
from common.train import loop
from explicit_opt import digits, language

Task = language.NextToken | digits.Digits


def validate(config: ConfigDict) -> None:
    """Validates everything that does not depend on the data."""
    with complete("--config"):
        _module(config).validate(config)
        loop.validate(in_steps(config, 1))


def _module(config: ConfigDict) -> ModuleType:
    """Returns the module of the task: only language models have the field `model.aggregate`."""
    return language if "aggregate" in config.model else digits


def make_task(config: ConfigDict, mesh: Mesh, read_data: bool = True) -> Task:
    """Returns the task of a configuration."""
    kind = language.NextToken if _module(config) is language else digits.Digits
    return kind(config, mesh, read_data=read_data)


def in_steps(config: ConfigDict, batches_per_epoch: int) -> ConfigDict:
    """Returns a copy with epochs converted to steps, evaluated after each epoch; `start=explicit` has no steps."""
    config = config.copy_and_resolve_references()
    epochs = 0 if config.start == "explicit" else config.train.epochs
    config.train.steps = epochs * batches_per_epoch
    config.eval.steps = config.eval.steps or batches_per_epoch
    config.checkpoint.steps = config.checkpoint.steps or batches_per_epoch
    return config


def prepare(config: ConfigDict, mesh: Mesh, read_data: bool = True) -> tuple[ConfigDict, Task]:
    """Returns the configuration for the loop and the task. Without data the number of steps stays 0.

    Raises:
      UserError: the configuration or the data are invalid.
    """
    validate(config)
    task = make_task(config, mesh, read_data)
    return (in_steps(config, task.batches_per_epoch) if read_data else config), task


def fit(config: ConfigDict, workdir: Path, mesh: Mesh) -> dict:
    """Trains or resumes the run in `workdir`; returns its summary. Raises the errors of `loop.fit`."""
    return loop.fit(*prepare(config, mesh), workdir, mesh)
