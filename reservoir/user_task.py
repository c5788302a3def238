"""Imports and builds a user's task, `--config.task=MODULE:CLASS`."""

import inspect

from jax.sharding import Mesh
from ml_collections import ConfigDict

from common.errors import UserError, check, raised
from common.train.task import Task
from common.user_parts import imported


def find(name: str) -> type[Task]:
    """Returns the task class `name`, "MODULE:CLASS".

    Raises:
      UserError: the class cannot be imported, does not inherit `Task`, or does not accept the arguments
        (config, mesh, read_data=...).
    """
    cls = imported("--config.task", name)
    check(
        isinstance(cls, type) and issubclass(cls, Task) and cls is not Task,
        f"--config.task={name} must be a class that inherits common.train.task.Task",
    )
    try:
        inspect.signature(cls).bind("config", "mesh", read_data=True)
    except TypeError as error:
        raise UserError(
            f"--config.task={name} must accept (config, mesh, read_data=True): {error}; correct the class"
        ) from None
    return cls


def make(config: ConfigDict, mesh: Mesh, read_data: bool) -> Task:
    """Returns a new task of the class `config.task`.

    Raises:
      UserError: `find` fails, or the class raises an exception.
    """
    cls = find(config.task)
    try:
        return cls(config, mesh, read_data=read_data)
    except UserError:
        raise
    except Exception as error:  # a user's task may raise any exception
        raise UserError(
            f"--config.task={config.task} raises {raised(error)}; correct the class"
        ) from error
