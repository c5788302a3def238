"""Where reservoirs stand in a stack (section 2.2 and appendix C)."""

STRATEGIES = ("alternate", "bottom", "middle", "top")


def placement(layers: int, reservoirs: int, strategy: str = "alternate") -> tuple[int, ...]:
    """Their layers, counted from 0 at the bottom.

    "alternate" is the paper's: every second layer of the middle. R reservoirs take b = 2R - 1 places from s =
    floor((layers - b) / 2) on, every other one; Table 4 (12 layers, frozen 3, 5, 7, 9 counted from 1) shows that the
    paper rounds down. The others are neighbours: at the bottom, at the top, or in the middle, rounded down too.

    Args:
      strategy: one of STRATEGIES, or a pattern such as "LLRLRLL", bottom first, in which R is a reservoir; the pattern
        says how many there are, whatever `reservoirs` is.

    Raises:
      ValueError: they do not fit, the pattern is not of this length, or the strategy is unknown.
    """
    if strategy not in STRATEGIES:
        return _pattern(layers, strategy)
    if reservoirs < 0:
        raise ValueError(f"{reservoirs} reservoirs")
    span = max(2 * reservoirs - 1, 0) if strategy == "alternate" else reservoirs
    if span > layers:
        kind = "alternating reservoirs" if strategy == "alternate" else "reservoirs"
        raise ValueError(f"{reservoirs} {kind} need {span} layers, there are {layers}")
    start = {"bottom": 0, "top": layers - span}.get(strategy, (layers - span) // 2)
    return tuple(range(start, start + span, 2 if strategy == "alternate" else 1))


def _pattern(layers: int, pattern: str) -> tuple[int, ...]:
    if not pattern or set(pattern) - {"L", "R"}:
        raise ValueError(
            f"unknown placement {pattern!r}; it is one of {', '.join(STRATEGIES)}, or a pattern of L and R"
        )
    if len(pattern) != layers:
        raise ValueError(f"the pattern {pattern} is for {len(pattern)} layers, there are {layers}")
    return tuple(layer for layer, letter in enumerate(pattern) if letter == "R")
