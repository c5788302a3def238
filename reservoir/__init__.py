"""Reservoir Transformers, with layers that stay frozen at random values (reservoirs).

`freeze` and `Backskip` (skips the gradient of reservoirs in some steps) also work in other Flax NNX models: see
`reservoir.parts`.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reservoir.parts import Backskip, Frozen, freeze, is_skipping_step, thaw

__all__ = ["Backskip", "Frozen", "freeze", "is_skipping_step", "thaw"]


def __getattr__(name: str) -> object:
    # Import `reservoir.parts` on first use, because training does not need it.
    if name in __all__:
        from reservoir import parts

        return getattr(parts, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
