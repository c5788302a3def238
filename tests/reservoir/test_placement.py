"""Placement of reservoirs, section 2.2 and appendix C."""

import pytest

from reservoir.placement import placement


def drawn(layers: int, places: tuple[int, ...]) -> str:
    """Returns the placement as a pattern, bottom first, as in the paper."""
    return "".join("R" if layer in places else "L" for layer in range(layers))


@pytest.mark.parametrize(
    ("layers", "reservoirs", "expected"),
    [
        (7, 3, "LRLRLRL"),
        (7, 2, "LLRLRLL"),
        (6, 2, "LRLRLL"),
        (8, 2, "LLRLRLLL"),
        (10, 2, "LLLRLRLLLL"),
        (12, 2, "LLLLRLRLLLLL"),
        (12, 4, "LLRLRLRLRLLL"),
        (7, 4, "RLRLRLR"),
        (3, 1, "LRL"),
        (1, 1, "R"),
        (4, 0, "LLLL"),
    ],
)
def test_placement(layers: int, reservoirs: int, expected: str):
    assert drawn(layers, placement(layers, reservoirs)) == expected


@pytest.mark.parametrize(
    ("layers", "reservoirs", "first", "last"),
    [(12, 4, 3, 9), (16, 4, 5, 11), (24, 4, 9, 15), (32, 4, 13, 19), (48, 8, 17, 31)],
)
def test_placement_counted_from_one(layers: int, reservoirs: int, first: int, last: int):
    """Table 4 gives 3, 5, 7, 9 of 12."""
    expected = list(range(first, last + 1, 2))
    assert len(expected) == reservoirs
    assert [place + 1 for place in placement(layers, reservoirs)] == expected


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [("bottom", "RRLLLLL"), ("top", "LLLLLRR"), ("middle", "LLRRLLL"), ("RLLLLLR", "RLLLLLR")],
)
def test_placements_of_appendix_c(strategy: str, expected: str):
    """The middle rounds down, as the paper's placement does."""
    assert drawn(7, placement(7, 2, strategy)) == expected


@pytest.mark.parametrize(
    ("layers", "reservoirs", "strategy", "message"),
    [
        (6, 4, "alternate", "4 alternating reservoirs need 7 layers, there are 6"),
        (0, 1, "alternate", "need 1 layers, there are 0"),
        (4, -1, "alternate", "-1 reservoirs"),
        (4, 5, "bottom", "5 reservoirs need 5 layers"),
        (4, 1, "LRL", "for 3 layers, there are 4"),
        (4, 1, "botom", "unknown placement 'botom'"),
        (4, 1, "", "''; it is one of alternate, bottom, middle, top, or a pattern of L and R"),
    ],
)
def test_reservoirs_that_do_not_fit_are_rejected(
    layers: int, reservoirs: int, strategy: str, message: str
):
    with pytest.raises(ValueError, match=message):
        placement(layers, reservoirs, strategy)
