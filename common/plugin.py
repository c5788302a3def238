"""Imports a user's objects by name, "module:attribute", and adds the options of parts to configurations.

A part, such as a kind of layer or a method of fine-tuning, is an instance of a dataclass that a package defines.
Configurations import this module, so this module must not import JAX.
"""

import importlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from common.config import check_choice, flatten
from common.errors import UserError, check, last_frame


class Option(NamedTuple):
    """A configuration field that only one part reads. An option named "a.b" is the field b of the group a.

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
        frame, kind, reason = last_frame(error), type(error).__name__, str(error)
        file, line = frame.filename, frame.lineno
        if isinstance(error, SyntaxError) and error.lineno:
            file, line, reason = error.filename, error.lineno, error.msg
        remedy = "correct the name, or add the folder of the module to PYTHONPATH"
        # Name the line, unless the innermost frame is in importlib (the module is missing or a path) or in this file
        # (the attribute is missing).
        if file != __file__ and not file.startswith("<frozen"):
            kind += f" in {file}, line {line}"
            remedy = "correct this line"
        reason = f": {reason}" if reason else ""
        raise UserError(f"{option}={name} cannot be imported ({kind}){reason}; {remedy}") from error


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
    part = imported(option, name)
    check(
        isinstance(part, kind),
        f"{option}={name} is of type {type(part).__name__}; it must be a {kind.__module__}.{kind.__name__}",
    )
    for field, valid, expected in (
        ("options", isinstance(part.options, Mapping), "dictionary"),
        ("label", isinstance(part.label, str), "string"),
        ("check", callable(part.check), "function"),
    ):
        check(
            valid,
            f"{option}={name}: the field {field!r} of the {kind.__name__} must be a {expected}, got"
            f" {getattr(part, field)!r}",
        )
    for key, declared in part.options.items():
        check(
            isinstance(key, str) and all(map(str.isidentifier, key.split("."))),
            f"{option}={name}: the name of an option must be an identifier such as gain, or identifiers joined by dots,"
            f" got {key!r}",
        )
        check(
            isinstance(declared, Option),
            f"{option}={name}: the option {key} must be a {kind.__module__}.Option, got {declared!r}",
        )
        check(
            declared.minimum is None or all(isinstance(x, int | float) for x in declared),
            f"{option}={name}: the option {key} has a minimum, so its default and its minimum must be numbers, got"
            f" {declared}",
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
    """Raises a UserError if an option is below its minimum, or has a minimum and is not a number.

    Args:
      prefix: text before the name of an option in the message, such as "--config.".
      fields: configuration that contains the options.
    """
    values = flatten(fields)
    for name, option in options.items():
        check(
            option.minimum is None
            or (isinstance(values[name], int | float) and values[name] >= option.minimum),
            f"{prefix}{name} must be a number of at least {option.minimum}, got {values[name]!r}",
        )
