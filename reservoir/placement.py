"""The placements of reservoirs in a stack (section 3.1 and appendix C).

A new placement is an entry of `PLACEMENTS`, or a function in a module outside this project, selected by
--config.model.placement=my_package.placements:my_placement (`reservoir.user_placement`).
"""

from collections.abc import Mapping
from typing import Any


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
      strategy: a key of `PLACEMENTS`; a pattern such as "LLRLRLL", bottom first, where R is a reservoir; or
        "module:function", a user's placement. A pattern overrides `reservoirs`.
      fields: `config.model`, which has the options of a user's placement. None takes the defaults of the options.

    Raises:
      ValueError: the stack has too few layers, `reservoirs` is negative, the pattern does not have one letter per
        layer, the strategy is unknown, or a user's placement is invalid (`reservoir.user_placement`).
    """
    if ":" not in strategy and strategy not in PLACEMENTS:
        return _pattern(layers, strategy)
    if reservoirs < 0:
        raise ValueError(f"the number of reservoirs must be at least 0, got {reservoirs}")
    if strategy in PLACEMENTS:
        return PLACEMENTS[strategy](layers, reservoirs)
    from reservoir import user_placement

    return user_placement.indices(layers, reservoirs, strategy, fields)


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
