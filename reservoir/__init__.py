"""Reservoir Transformers. `freeze` and `Backskip` work in any Flax NNX model."""

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
