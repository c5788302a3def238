"""A user's parts: their import by name, "module:attribute", their options, and error messages for their exceptions.

A part, such as a kind of layer or a method of fine-tuning, is an instance of a dataclass that a paper defines.
Configurations import this module, so this module must not import JAX.
"""

import importlib
import re
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict, config_dict

from common.config import check_choice, flatten
from common.errors import UserError, check, place_of, raised, reason_of


class Option(NamedTuple):
    """A configuration field that a part adds. An option named "a.b" is the field b of the group a.

    Attributes:
      minimum: smallest valid value; None for no minimum.
    """

    default: Any
    minimum: float | None = None


def imported(option: str, name: str) -> Any:
    """Imports a module and returns one of its attributes.

    Args:
      option: name of the command-line option, for error messages.
      name: value of the option, "module:attribute" or "import:module:attribute".

    Raises:
      UserError: `name` lacks ":attribute", importing the module fails, or the module lacks the attribute.
    """
    module, _, attribute = name.removeprefix("import:").partition(":")
    prefix = "import:" if name.startswith("import:") else ""
    check(
        bool(attribute),
        f"{option}={name} lacks the name of a function or object: give {option}={prefix}{module or 'MODULE'}:NAME",
    )
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # A user's module may raise any type of exception.
        remedy = "correct the name, or add the folder of the module to PYTHONPATH"
        if place_of(error):
            remedy = "correct this line"
        raise UserError(f"{option}={name} cannot be imported: {raised(error)}; {remedy}") from error


def find(option: str, name: str, kind: type, known: Mapping[str, Any]) -> Any:
    """Returns the part `name`: an entry of `known`, or for "module:attribute" the attribute of a user's module.

    Args:
      option: command-line option that names the part, for error messages.
      kind: dataclass of the part, with the fields `label`, `options` and `check`.
      known: name -> part of this project.

    Raises:
      UserError: `known` has no such part, the module or the attribute cannot be imported, or the attribute is not a
        `kind` with a valid label, check and options.
    """
    if ":" not in str(name):
        check_choice(option, name, known)
        return known[name]
    part, given = imported(option, name), f"{option}={name}"
    check(
        isinstance(part, kind),
        f"{given} is of type {type(part).__name__}; it must be a {kind.__module__}.{kind.__name__}",
    )
    for field, valid, expected in (
        ("options", isinstance(part.options, Mapping), "dictionary"),
        ("label", isinstance(part.label, str), "string"),
        ("check", callable(part.check), "function"),
    ):
        check(
            valid,
            f"{given}: the field {field!r} of the {kind.__name__} must be a {expected}, got {getattr(part, field)!r}",
        )
    for key, declared in part.options.items():
        check(
            isinstance(key, str) and all(map(str.isidentifier, key.split("."))),
            f"{given}: the name of an option must be an identifier such as gain or group.gain, got {key!r}",
        )
        check(
            isinstance(declared, Option),
            f"{given}: the option {key} must be a {kind.__module__}.Option, got {declared!r}",
        )
        check(
            declared.minimum is None or all(isinstance(x, int | float) for x in declared),
            f"{given}: the option {key} has a minimum, so its default and its minimum must be numbers, got {declared}",
        )
    return part


def add_options(fields: ConfigDict, options: Mapping[str, Option]) -> None:
    """Adds each of the `options` that the configuration `fields` lacks, with its default value."""
    with fields.unlocked():
        for name, option in options.items():
            *groups, last = name.split(".")
            part = fields
            for group in groups:
                if group not in part:
                    part[group] = ConfigDict()
                part = part[group]
            if last not in part:
                part[last] = option.default


def check_minimum(prefix: str, fields: ConfigDict, options: Mapping[str, Option]) -> None:
    """Raises a UserError if an option has a minimum and its value in `fields` is not a number of at least this minimum.

    `prefix` is the text before the name of an option in the message, such as "--config.".
    """
    values = flatten(fields)
    for name, option in options.items():
        check(
            option.minimum is None
            or (isinstance(values[name], int | float) and values[name] >= option.minimum),
            f"{prefix}{name} must be a number of at least {option.minimum}, got {values[name]!r}",
        )


@contextmanager
def user_code(option: str, kind: type | None = None, fields: str = "") -> Iterator[None]:
    """Context manager that turns any exception of a user's code into a UserError.

    The message has the text of the exception and, except for a UserError, the place of the exception (`place_of`).

    Args:
      option: command-line option that names the user's object, for the error message.
      kind: dataclass of the object, with the field `options`; None if the object has no options.
      fields: configuration group that the object reads, such as "model", for the error message.
    """
    try:
        yield
    except ValueError as error:
        # The input may be wrong instead of the code, for example an option: do not add "correct this code".
        place = "" if isinstance(error, UserError) else place_of(error)
        reason = reason_of(error) + f" (raised in {place})" * bool(place)
        raise UserError(f"{option}: {reason}") from error
    except Exception as error:  # a user's code may raise any exception
        # If the code reads a missing field, the message of ml_collections begins with the name of the field, in quotes.
        # In other messages of ml_collections, the first word has no quotes around it.
        file = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        missing = re.match(r"\W+(\w+)\\?'", str(error))
        if kind and missing and file.parent == Path(config_dict.__file__).parent:
            name, label = missing[1], kind.__name__
            raise UserError(
                f"{option}: {place_of(error)} reads {fields}.{name}, but the {label.lower()} declares no option {name};"
                f" declare it: {label}(..., options={{'{name}': Option(DEFAULT)}})"
            ) from error
        raise UserError(f"{option}: {raised(error)}; correct this code") from error


def described(value: object) -> str:
    """Returns "an array of shape ..." for an array, concrete or abstract, and "a TYPE" for another object."""
    shape = getattr(value, "shape", None)
    return f"a {type(value).__name__}" if shape is None else f"an array of shape {shape}"
