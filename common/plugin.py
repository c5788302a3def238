"""Plugins: a configuration may name a part as "module:attribute", in a user's module outside of this project.

A part is, for example, a kind of layer. Its dataclass has a field `options`: name -> `Option`. Configurations import
this module, so this module must not import JAX.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from common.config import check_choice, flatten, imported
from common.errors import check


class Option(NamedTuple):
    """A configuration field that only one part reads. An option named "a.b" is the field b of the group a.

    Attributes:
      minimum: smallest valid value; None for no minimum.
    """

    default: Any
    minimum: float | None = None


def find(option: str, name: str, kind: type, known: Mapping[str, Any]) -> Any:
    """Returns the part `name`: an entry of `known`, or the part of a user's module for "module:attribute".

    Args:
      option: command-line option that names the part, for error messages.
      kind: dataclass of the part, with the fields `label`, `options` and `check`.
      known: name -> part of this project.

    Raises:
      UserError: no such part exists, importing the module fails, the attribute is missing or is not a `kind`, or its
        label, options or check are invalid.
    """
    if ":" not in str(name):
        check_choice(option, name, known)
        return known[name]
    part = imported(option, name)
    check(
        isinstance(part, kind),
        f"{option}={name} is of type {type(part).__name__}; it must be a {kind.__module__}.{kind.__name__}",
    )
    check(
        isinstance(part.options, Mapping),
        f"{option}={name}: the field 'options' of the {kind.__name__} must be a dictionary, got {part.options!r}",
    )
    check(
        isinstance(part.label, str),
        f"{option}={name}: the field 'label' of the {kind.__name__} must be a string, got {part.label!r}",
    )
    check(
        callable(part.check),
        f"{option}={name}: the field 'check' of the {kind.__name__} must be a function, got {part.check!r}",
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
    """Adds missing options with their defaults to `fields`."""
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
