"""Explicit optimization. `head_start` and `head_from_counts` compute closed-form weights of a linear head."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from explicit_opt.heads import HeadStart, head_from_counts, head_start

__all__ = ["HeadStart", "head_from_counts", "head_start"]


def __getattr__(name: str) -> object:
    # Import `explicit_opt.heads` on first use, because most programs do not need it.
    if name in __all__:
        from explicit_opt import heads

        return getattr(heads, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
