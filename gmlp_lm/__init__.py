"""Language models with spatial gating units (gMLP) instead of, or in addition to, attention.

`SpatialGating` is the spatial gating unit, and `GatedMLP` the gMLP block. Both work in any Flax NNX model.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gmlp_lm.parts import GatedMLP, SpatialGating

__all__ = ["GatedMLP", "SpatialGating"]


def __getattr__(name: str) -> object:
    # Import `gmlp_lm.parts` on first use, because training does not need it.
    if name in __all__:
        from gmlp_lm import parts

        return getattr(parts, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
