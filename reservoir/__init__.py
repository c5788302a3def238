"""Reservoir Transformers, with layers that stay frozen at random values (reservoirs).

`freeze` and `Backskip` (skips the gradient of reservoirs in some steps) also work in other Flax NNX models: see
`reservoir.parts`. `load_run` loads a trained translator.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reservoir.loading import load_run
    from reservoir.parts import Backskip, Frozen, freeze, is_skipping_step, thaw

__all__ = ["Backskip", "Frozen", "freeze", "is_skipping_step", "load_run", "thaw"]


def __getattr__(name: str) -> object:
    # Import these modules on first use, because training does not need them.
    if name in __all__:
        module = "loading" if name == "load_run" else "parts"
        return getattr(import_module(f"reservoir.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
