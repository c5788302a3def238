"""The placements of reservoirs in a stack (section 3.1 and appendix C).

A new placement is an entry of `PLACEMENTS`, or a function in a module outside this project, selected by
--config.model.placement=my_package.placements:my_placement. Keyword-only parameters of the function are options: fields
of `config.model` with the parameter's default.
"""

import inspect
import operator
from collections.abc import Callable, Mapping
from typing import Any

from common.config import imported
from common.errors import UserError, check


def alternate(layers: int, reservoirs: int) -> tuple[int, ...]:
    """Returns the indices of every other layer in the middle of the stack, as in the paper.

    R reservoirs span b = 2R - 1 layers. The first reservoir has the index floor((layers - b) / 2). Rounding down
    reproduces Table 4: of 12 layers, counted from 1, layers 3, 5, 7 and 9 are frozen.
    """
    span = max(2 * reservoirs - 1, 0)
    _check_fit(layers, span, f"{reservoirs} alternating reservoirs")
    start = (layers - span) // 2
    return tuple(range(start, start + span, 2))


def bottom(layers: int, reservoirs: int) -> tuple[int, ...]:
    """Returns the indices of the lowest `reservoirs` layers."""
    _check_fit(layers, reservoirs, f"{reservoirs} reservoirs")
    return tuple(range(reservoirs))


def middle(layers: int, reservoirs: int) -> tuple[int, ...]:
    """Returns the indices of `reservoirs` adjacent layers in the middle, from floor((layers - reservoirs) / 2) on."""
    _check_fit(layers, reservoirs, f"{reservoirs} reservoirs")
    start = (layers - reservoirs) // 2
    return tuple(range(start, start + reservoirs))


def top(layers: int, reservoirs: int) -> tuple[int, ...]:
    """Returns the indices of the uppermost `reservoirs` layers."""
    _check_fit(layers, reservoirs, f"{reservoirs} reservoirs")
    return tuple(range(layers - reservoirs, layers))


PLACEMENTS = {"alternate": alternate, "bottom": bottom, "middle": middle, "top": top}
"""Name -> function from (number of layers, number of reservoirs) to the indices of the reservoirs. Index 0 is the
bottom layer. The functions raise a ValueError if the reservoirs do not fit into the layers."""


def placement(
    layers: int,
    reservoirs: int,
    strategy: str = "alternate",
    fields: Mapping[str, Any] | None = None,
) -> tuple[int, ...]:
    """Returns the indices of the reservoirs in a stack, counted from 0 at the bottom.

    Args:
      strategy: a key of `PLACEMENTS`; "module:function", with the signature of the functions in `PLACEMENTS` and
        options; or a pattern such as "LLRLRLL", bottom first, where R is a reservoir. A pattern overrides `reservoirs`.
      fields: `config.model`, which has the values of the options. None takes the defaults of the options.

    Raises:
      ValueError: the stack has too few layers, `reservoirs` is negative, the pattern does not have one letter per
        layer, the strategy is unknown, or the function "module:function" fails or returns invalid indices.
      UserError: the function "module:function" cannot be imported, is not callable, has no signature, or has an option
        without a default.
    """
    function = _function(strategy, "placement")
    if function is None:
        return _pattern(layers, strategy)
    if reservoirs < 0:
        raise ValueError(f"the number of reservoirs must be at least 0, got {reservoirs}")
    options = defaults(strategy, "placement")
    options = {name: (fields or options)[name] for name in options}
    try:
        indices = tuple(map(operator.index, function(layers, reservoirs, **options)))
        valid = len(indices) == reservoirs == len(set(indices) & set(range(layers)))
    except Exception as error:  # A user's function may raise any type of exception.
        if isinstance(error, ValueError) and str(error):
            raise
        reason = f": {error}" if str(error) else ""
        raise UserError(
            f"{strategy} fails, or does not return indices ({type(error).__name__}{reason})"
        ) from error
    if not valid:
        raise ValueError(
            f"{strategy} returned {indices}; it must return different indices from 0 to {layers - 1}, as many as there"
            f" are reservoirs, {reservoirs}"
        )
    return tuple(sorted(indices))


def defaults(strategy: str, option: str) -> dict[str, Any]:
    """Returns {name: default} of the options of a placement, the keyword-only parameters of its function.

    Args:
      option: the command-line option of the placement, for error messages.

    Raises:
      UserError: the function cannot be imported, is not callable, has no signature, or has an option without a default.
    """
    function = _function(strategy, option)
    if function is None:
        return {}
    check(
        callable(function),
        f"{option}={strategy} is of type {type(function).__name__}, not a function",
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
    return found


def _function(strategy: str, option: str) -> Callable | None:
    """Returns the function of a placement. Returns None for a pattern of letters and for an unknown placement."""
    if ":" in strategy:
        return imported(option, strategy)
    return PLACEMENTS.get(strategy)


def _check_fit(layers: int, span: int, what: str) -> None:
    if span > layers:
        raise ValueError(f"{what} need {span} layers, but the number of layers is {layers}")


def _pattern(layers: int, pattern: str) -> tuple[int, ...]:
    if not pattern or set(pattern) - {"L", "R"}:
        raise ValueError(
            f"unknown placement {pattern!r}; use one of {', '.join(PLACEMENTS)}, a pattern of L and R, or"
            " module:function"
        )
    if len(pattern) != layers:
        raise ValueError(
            f"the pattern {pattern} has the length {len(pattern)}, but the number of layers is {layers}"
        )
    return tuple(layer for layer, letter in enumerate(pattern) if letter == "R")
