"""Validates, prepares and trains a run of the reservoir paper."""

import importlib
import inspect
from pathlib import Path
from types import ModuleType

from jax.sharding import Mesh
from ml_collections import ConfigDict

from common.config import check_choice, complete, imported
from common.errors import UserError, check, last_frame
from common.train import loop
from common.train.task import Task
from reservoir import model

TASKS = {
    "translation": "Translation",
    "masked_lm": "MaskedLm",
    "language_modelling": "LanguageModelling",
}
"""Value of `config.task` -> name of the task's class. The module `reservoir.tasks.VALUE` has this class, and the
functions `validate` and `build` (makes the model)."""


def task_module(config: ConfigDict) -> ModuleType:
    """Imports and returns the module of the configured task, without the modules of other tasks."""
    return importlib.import_module(f"reservoir.tasks.{config.task}")


def own_task(name: str) -> type[Task] | None:
    """Returns the user's task class if `config.task` is "module:class", or None for a task of this package.

    The class is called with (config, mesh, read_data=...) and checks its own fields.

    Raises:
      UserError: the class cannot be imported, does not inherit `Task`, or does not accept these arguments.
    """
    if ":" not in name:
        return None
    cls = imported("--config.task", name)
    check(
        Task in getattr(cls, "__mro__", ()),
        f"--config.task={name} must be a class that inherits common.train.task.Task, got {cls!r:.80}",
    )
    try:
        inspect.signature(cls).bind("config", "mesh", read_data=True)
    except TypeError as error:
        raise UserError(
            f"--config.task={name} must accept (config, mesh, read_data=True): {error}"
        ) from None
    return cls


def validate(config: ConfigDict) -> None:
    """Checks the configuration without reading the data.

    Raises:
      UserError: a field is missing or invalid.
    """
    with complete("--config"):
        own = own_task(config.task)
        loop.validate(config)
        if own:
            return
        check_choice("--config.task", config.task, TASKS)
        # A user's kind of reservoir is built in `model.validate`, so the sizes of its layers are checked before.
        task_module(config).validate(config)
        model.validate(config.model)
        if config.model.backskip.estimator != "none":
            from reservoir.backskip import validate_steps

            validate_steps(config)


def prepare(config: ConfigDict, mesh: Mesh, read_data: bool = True) -> tuple[ConfigDict, Task]:
    """Returns the configuration for the training loop, and the task.

    Args:
      read_data: False builds a task without data, for `launch.plan`. Fine-tuning still reads its pretraining run.

    Raises:
      UserError: the configuration, the data or the pretraining run is invalid, or a user's task raises an exception.
    """
    if config.get("task") == "classification":
        from reservoir import finetuning

        return finetuning.prepare(config, mesh, read_data)
    validate(config)
    own = own_task(config.task)
    if not own:
        task = getattr(task_module(config), TASKS[config.task])
        return config, task(config, mesh, read_data=read_data)
    try:
        return config, own(config, mesh, read_data=read_data)
    except UserError:
        raise
    except Exception as error:  # a user's task may raise any exception
        frame, reason = last_frame(error), f": {error}" if str(error) else ""
        raise UserError(
            f"--config.task={config.task} raises {type(error).__name__} in {frame.filename}, line {frame.lineno}"
            f"{reason}"
        ) from error


def fit(config: ConfigDict, workdir: Path, mesh: Mesh) -> dict:
    """Trains or resumes the run in `workdir`; returns its summary. `loop.fit` documents the errors."""
    return loop.fit(*prepare(config, mesh), workdir, mesh)
