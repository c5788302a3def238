"""A user's placement of reservoirs, --config.model.placement=MODULE:FUNCTION.

The function has the positional parameters of the functions in `reservoir.placement.PLACEMENTS`. Its keyword-only
parameters are options: each becomes a field of `config.model` with the parameter's default.
"""

import inspect
import operator
from collections.abc import Mapping
from typing import Any

from common.errors import UserError, check, raised
from common.user_parts import Option, imported


def indices(
    layers: int, reservoirs: int, strategy: str, fields: Mapping[str, Any] | None
) -> tuple[int, ...]:
    """Returns the sorted indices that the function `strategy` returns.

    Args:
      fields: `config.model`, which has the values of the options. None takes the defaults of the options.

    Raises:
      ValueError: the function raises a ValueError with a text, or returns the wrong number of indices, equal indices,
        or indices that are not from 0 to `layers` - 1.
      UserError: `options` fails, or the function raises any other exception or does not return integers.
    """
    values = {
        name: option.default if fields is None else fields[name]
        for name, option in options("placement", strategy).items()
    }
    try:
        function = imported("placement", strategy)
        found = tuple(map(operator.index, function(layers, reservoirs, **values)))
    except Exception as error:  # A user's function may raise any type of exception.
        if isinstance(error, ValueError) and str(error):
            raise
        raise UserError(
            f"{strategy}(layers, reservoirs) gives no indices: {raised(error)}; correct this function"
        ) from error
    if not len(found) == reservoirs == len(set(found) & set(range(layers))):
        raise ValueError(
            f"{strategy} returned {found}; it must return {reservoirs} different indices from 0 to {layers - 1}, one"
            " for each reservoir"
        )
    return tuple(sorted(found))


def options(option: str, strategy: str) -> dict[str, Option]:
    """Returns {name: option} of a user's placement, from the keyword-only parameters of its function.

    Args:
      option: the command-line option of the placement, for error messages.

    Raises:
      UserError: the function cannot be imported, is not callable, has no signature, or has an option without a default.
    """
    function = imported(option, strategy)
    check(
        callable(function),
        f"{option}={strategy} is of type {type(function).__name__}, not a function: name a function",
    )
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError as error:  # Some functions that are not written in Python have no signature.
        raise UserError(
            f"{option}={strategy}: {error}; use a function written in Python"
        ) from error
    found = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    for name, default in found.items():
        check(
            default is not inspect.Parameter.empty,
            f"{option}={strategy}: give the keyword-only parameter {name} of this function a default, because it"
            " becomes a field of the configuration",
        )
    return {name: Option(default) for name, default in found.items()}
