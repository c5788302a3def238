"""Language models with spatial gating units (gMLP) instead of, or in addition to, attention.

`SpatialGating` is the spatial gating unit, and `GatedMLP` the gMLP block. Both work in any Flax NNX model.
`load_run` loads a trained language model.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gmlp_lm.loading import load_run
    from gmlp_lm.parts import GatedMLP, SpatialGating

__all__ = ["GatedMLP", "SpatialGating", "load_run"]


def __getattr__(name: str) -> object:
    # Import these modules on first use, because training does not need them.
    if name in __all__:
        module = "loading" if name == "load_run" else "parts"
        return getattr(import_module(f"gmlp_lm.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
