"""The table of placements: which layers of a stack are reservoirs (section 2.2 and appendix C).

A new placement is one entry of `PLACEMENTS`, or a function in a module outside this project, named by
--config.model.placement=my_package.placements:my_placement.
"""

from reservoir.kinds import imported


def alternate(layers: int, reservoirs: int) -> tuple[int, ...]:
    """Every other layer in the middle: the paper's placement.

    R reservoirs span b = 2R - 1 layers from layer floor((layers - b) / 2) on. Only rounding down gives Table 4
    (12 layers; frozen 3, 5, 7, 9 counted from 1).
    """
    span = max(2 * reservoirs - 1, 0)
    _check_fit(layers, span, f"{reservoirs} alternating reservoirs")
    start = (layers - span) // 2
    return tuple(range(start, start + span, 2))


def bottom(layers: int, reservoirs: int) -> tuple[int, ...]:
    """The lowest layers."""
    _check_fit(layers, reservoirs, f"{reservoirs} reservoirs")
    return tuple(range(reservoirs))


def middle(layers: int, reservoirs: int) -> tuple[int, ...]:
    """Adjacent layers from floor((layers - reservoirs) / 2) on."""
    _check_fit(layers, reservoirs, f"{reservoirs} reservoirs")
    start = (layers - reservoirs) // 2
    return tuple(range(start, start + reservoirs))


def top(layers: int, reservoirs: int) -> tuple[int, ...]:
    """The uppermost layers."""
    _check_fit(layers, reservoirs, f"{reservoirs} reservoirs")
    return tuple(range(layers - reservoirs, layers))


PLACEMENTS = {"alternate": alternate, "bottom": bottom, "middle": middle, "top": top}
"""Functions (layers, reservoirs) -> layer indices from 0 at the bottom. They raise a ValueError for too few layers."""


def placement(layers: int, reservoirs: int, strategy: str = "alternate") -> tuple[int, ...]:
    """Returns the indices of the reservoirs in a stack, counted from 0 at the bottom.

    Args:
      strategy: a key of `PLACEMENTS`; "module:function" with a function of the same signature; or a pattern such as
        "LLRLRLL", bottom first, where R is a reservoir. A pattern overrides `reservoirs`.

    Raises:
      ValueError: the stack has too few layers, the pattern has another length, or the strategy is unknown.
      UserError: the module cannot be imported.
    """
    if strategy not in PLACEMENTS and ":" not in strategy:
        return _pattern(layers, strategy)
    if reservoirs < 0:
        raise ValueError(f"{reservoirs} reservoirs: the number must be at least 0")
    if strategy in PLACEMENTS:
        return PLACEMENTS[strategy](layers, reservoirs)
    found = tuple(imported("placement", strategy)(layers, reservoirs))
    if len(set(found)) != reservoirs or not set(found) <= set(range(layers)):
        raise ValueError(
            f"{strategy} returned {found}; it must return {reservoirs} different layers below {layers}"
        )
    return tuple(sorted(found))


def _check_fit(layers: int, span: int, what: str) -> None:
    if span > layers:
        raise ValueError(f"{what} need {span} layers, there are {layers}")


def _pattern(layers: int, pattern: str) -> tuple[int, ...]:
    if not pattern or set(pattern) - {"L", "R"}:
        raise ValueError(
            f"unknown placement {pattern!r}; it is one of {', '.join(PLACEMENTS)}, or a pattern of L and R"
        )
    if len(pattern) != layers:
        raise ValueError(f"the pattern {pattern} is for {len(pattern)} layers, there are {layers}")
    return tuple(layer for layer, letter in enumerate(pattern) if letter == "R")
