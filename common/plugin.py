"""Plugins: parts from a user's module outside this project, which a configuration names as "module:attribute".

The dataclass of a part, such as a kind of layer, has a field `options`: name -> `Option`. Configurations import this
module, so it must not import JAX.
"""

import re
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict, config_dict

from common.config import flatten, imported
from common.errors import UserError, check


class Option(NamedTuple):
    """A configuration field that only one part reads. A name "a.b" is the field b of the group a."""

    default: Any
    minimum: float | None = None


def find(option: str, name: str, kind: type) -> Any:
    """Imports the part `name`, "module:attribute".

    Args:
      option: command-line option that names the part, for error messages.
      kind: dataclass of the part.

    Raises:
      UserError: importing the module fails, the attribute is missing or no `kind`, or an option is no `Option`.
    """
    part = imported(option, name)
    check(
        isinstance(part, kind),
        f"{option}={name} is a {type(part).__name__}; it must be a {kind.__module__}.{kind.__name__}",
    )
    check(
        isinstance(part.options, Mapping),
        f"{option}={name}: options must be a dictionary, got {part.options!r}",
    )
    for key, declared in part.options.items():
        check(
            isinstance(declared, Option),
            f"{option}={name}: the option {key} must be a {kind.__module__}.Option, got {declared!r}",
        )
    return part


def add_options(fields: ConfigDict, options: Mapping[str, Option]) -> None:
    """Adds missing options with their defaults to `fields`."""
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
    """Raises a UserError if an option in `fields`, "--config.a" for the prefix "--config.", is below its minimum."""
    values = flatten(fields)
    for name, option in options.items():
        check(
            option.minimum is None or values[name] >= option.minimum,
            f"{prefix}{name} must be at least {option.minimum}, got {values[name]}",
        )


@contextmanager
def user_code(option: str, kind: type, fields: str) -> Iterator[None]:
    """Context manager that turns any exception of a user's part into a UserError with the place in the user's code.

    Args:
      option: option that names the part, for the error message.
      kind: dataclass of the part.
      fields: name of the configuration that the part reads, such as "model".
    """
    try:
        yield
    except ValueError as error:
        raise UserError(f"{option}: {error}") from error
    except Exception as error:  # a user's part may raise any exception
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if "site-packages" not in frame.filename]
        place = f"{own[-1].name} ({own[-1].filename}, line {own[-1].lineno})"
        if Path(frames[-1].filename).parent == Path(config_dict.__file__).parent:
            name = re.findall(r"\w+", str(error))[0]
            raise UserError(
                f"{option}: {place} reads {fields}.{name}, but the {kind.__name__.lower()} declares no option {name};"
                f" declare it: {kind.__name__}(..., options={{'{name}': Option(DEFAULT)}})"
            ) from error
        raise UserError(f"{option}: {type(error).__name__} in {place}: {error}") from error
