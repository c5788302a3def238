"""Placement of reservoirs in a stack (section 3.1 and appendix C)."""

import pytest

from common.errors import UserError
from reservoir.placement import placement


def drawn(layers: int, places: tuple[int, ...]) -> str:
    """Returns a placement as the paper writes it, with R for reservoirs and L for trained layers; bottom first."""
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
    """The reservoirs are every second layer from `first` to `last`. In Table 4, they are layers 3, 5, 7 and 9 of 12."""
    expected = list(range(first, last + 1, 2))
    assert len(expected) == reservoirs
    assert [place + 1 for place in placement(layers, reservoirs)] == expected


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [("bottom", "RRLLLLL"), ("top", "LLLLLRR"), ("middle", "LLRRLLL"), ("RLLLLLR", "RLLLLLR")],
)
def test_placements_of_appendix_c(strategy: str, expected: str):
    """ "middle" rounds down: with 5 trained layers, 2 are below the reservoirs and 3 above."""
    assert drawn(7, placement(7, 2, strategy)) == expected


def ends(layers: int, reservoirs: int) -> list[int]:
    """Returns the uppermost layers and the lowest layer, unsorted: a valid placement of a user."""
    return [*range(layers - reservoirs + 1, layers), 0]


def repeats_layer_0(layers: int, reservoirs: int) -> list[int]:
    """Returns layer 0 twice if `reservoirs` is at least 2: an invalid placement of a user."""
    return [0, *range(reservoirs - 1)]


def beyond_the_stack(layers: int, reservoirs: int) -> list[int]:
    """Returns the index `layers`, which is beyond the stack: an invalid placement of a user."""
    return list(range(layers + 1 - reservoirs, layers + 1))


def test_users_placement_is_imported():
    assert placement(5, 3, f"{__name__}:ends") == (0, 3, 4)
    assert placement(3, 3, f"{__name__}:ends") == (0, 1, 2)


OWN = "it must return 2 different indices from 0 to 2, one for each reservoir"
KNOWN = "use one of alternate, bottom, middle, top, a pattern of L and R, or module:function"


@pytest.mark.parametrize(
    ("layers", "reservoirs", "strategy", "message"),
    [
        (
            6,
            4,
            "alternate",
            "4 alternating reservoirs need 7 layers, but the number of layers is 6",
        ),
        (
            0,
            1,
            "alternate",
            "1 alternating reservoirs need 1 layers, but the number of layers is 0",
        ),
        (4, -1, "alternate", "the number of reservoirs must be at least 0, got -1"),
        (4, -1, f"{__name__}:ends", "the number of reservoirs must be at least 0, got -1"),
        (4, 5, "bottom", "5 reservoirs need 5 layers, but the number of layers is 4"),
        (4, 5, "middle", "5 reservoirs need 5 layers, but the number of layers is 4"),
        (4, 5, "top", "5 reservoirs need 5 layers, but the number of layers is 4"),
        (4, 1, "LRL", "the pattern LRL has the length 3, but the number of layers is 4"),
        (
            4,
            1,
            "botom",
            f"unknown placement 'botom'; {KNOWN}",
        ),
        (
            4,
            1,
            "",
            f"unknown placement ''; {KNOWN}",
        ),
        (3, 2, f"{__name__}:repeats_layer_0", f"{__name__}:repeats_layer_0 returned (0, 0); {OWN}"),
        (
            3,
            2,
            f"{__name__}:beyond_the_stack",
            f"{__name__}:beyond_the_stack returned (2, 3); {OWN}",
        ),
    ],
)
def test_reservoirs_that_do_not_fit_are_rejected(
    layers: int, reservoirs: int, strategy: str, message: str
):
    with pytest.raises(ValueError) as raised:
        placement(layers, reservoirs, strategy)
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("no_such_module:ends", "no_such_module"),
        (f"{__name__}:no_such_function", "no_such_function"),
    ],
)
def test_unknown_module_or_function_raises_user_error(strategy: str, message: str):
    with pytest.raises(UserError, match=f"^placement={strategy} cannot be imported: .*{message}"):
        placement(4, 2, strategy)
