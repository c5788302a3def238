"""Validates and prepares a run of the reservoir paper."""

import importlib
from types import ModuleType

from jax.sharding import Mesh
from ml_collections import ConfigDict

from common.config import check_choice, complete
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


def validate(config: ConfigDict) -> None:
    """Checks the configuration without reading the data. Adds missing options of reservoir kinds and user placements.

    For a user's task, only checks the fields of the training loop and the task's class, and adds nothing.

    Raises:
      UserError: a field is missing or invalid.
    """
    with complete("--config"):
        is_user_task = ":" in config.task
        loop.validate(config)
        if is_user_task:
            from reservoir import user_task

            user_task.find(config.task)  # The constructor of the class checks all other fields.
            return
        check_choice("--config.task", config.task, TASKS)
        # First check the sizes of layers, because `model.validate` builds a user's kind of reservoir with these sizes.
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
    if ":" in config.task:
        from reservoir import user_task

        return config, user_task.make(config, mesh, read_data)
    task = getattr(task_module(config), TASKS[config.task])
    return config, task(config, mesh, read_data=read_data)
