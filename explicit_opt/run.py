"""Validates and prepares a run: selects the task and converts epochs to steps."""

from collections.abc import Callable

from jax.sharding import Mesh
from ml_collections import ConfigDict

from common.config import complete
from common.train import loop
from common.train.task import Task


def validate(config: ConfigDict) -> None:
    """Raises a UserError for an invalid or incomplete configuration. Reads no data."""
    with complete("--config"):
        _task(config)[0](config)
        loop.validate(in_steps(config, 1))


def _task(config: ConfigDict) -> tuple[Callable[[ConfigDict], None], type[Task]]:
    """Returns the function that validates the configuration, and the class of the task."""
    if "aggregate" in config.model:  # only language models have this field
        from explicit_opt import language

        return language.validate, language.NextToken
    from explicit_opt import digits

    return digits.validate, digits.Digits


def in_steps(config: ConfigDict, batches_per_epoch: int) -> ConfigDict:
    """Returns a copy of `config` with `train.epochs` converted to `train.steps`: 0 if `config.start` is "explicit".

    If `eval.steps` or `checkpoint.steps` is 0, the field becomes the number of steps of an epoch.
    """
    config = config.copy_and_resolve_references()
    epochs = 0 if config.start == "explicit" else config.train.epochs
    config.train.steps = epochs * batches_per_epoch
    config.eval.steps = config.eval.steps or batches_per_epoch
    config.checkpoint.steps = config.checkpoint.steps or batches_per_epoch
    return config


def prepare(config: ConfigDict, mesh: Mesh, read_data: bool = True) -> tuple[ConfigDict, Task]:
    """Returns the configuration for the training loop, and the task.

    With `read_data=False` the length of an epoch is unknown, so the number of steps is 0. Only for a language model
    with `data.tokens` above 0, an epoch is assumed to have `data.tokens` tokens. Raises a UserError if the
    configuration or the data are invalid.
    """
    validate(config)
    task = _task(config)[1](config, mesh, read_data=read_data)
    return in_steps(config, task.batches_per_epoch), task
