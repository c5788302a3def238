"""Error messages for exceptions in a user's code (`common.plugin`). Imported only for configurations with such code."""

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ml_collections import config_dict

from common.errors import UserError, last_frame, reason_of


@contextmanager
def user_code(option: str, kind: type | None = None, fields: str = "") -> Iterator[None]:
    """Context manager that turns any exception of a user's code into a UserError.

    The message names function, file and line of the user's code, unless the exception is a ValueError.

    Args:
      option: command-line option that names the user's object, for the error message.
      kind: type of the object, such as a dataclass with the field `options`; None if the object has no options.
      fields: name of the configuration that the object reads, such as "model", for the error message.
    """
    try:
        yield
    except ValueError as error:
        raise UserError(f"{option}: {reason_of(error)}") from error
    except Exception as error:  # a user's code may raise any exception
        frame, raised = last_frame(error), traceback.extract_tb(error.__traceback__)[-1]
        place = f"{frame.name} ({frame.filename}, line {frame.lineno})"
        # If the code reads a missing field, the message of ml_collections begins with the name of the field, in quotes.
        # In other messages of ml_collections, the first word has no quotes around it.
        missing = re.match(r"\W+(\w+)\\?'", str(error))
        if kind and missing and Path(raised.filename).parent == Path(config_dict.__file__).parent:
            name = missing[1]
            raise UserError(
                f"{option}: {place} reads {fields}.{name}, but the {kind.__name__.lower()} declares no option {name};"
                f" declare it: {kind.__name__}(..., options={{'{name}': Option(DEFAULT)}})"
            ) from error
        reason = f": {reason_of(error)}" if str(error) else ""
        raise UserError(
            f"{option}: {type(error).__name__} in {place}{reason}; correct this code"
        ) from error


def described(value: object) -> str:
    """Returns "an array of shape ..." for an array, concrete or abstract, and "a TYPE" for another object."""
    shape = getattr(value, "shape", None)
    return f"a {type(value).__name__}" if shape is None else f"an array of shape {shape}"
