"""The heap of this process."""

import ctypes
from contextlib import suppress


def trim() -> None:
    """Gives the system back what is free in the heap, where its C library can do that (glibc).

    A compiler leaves some hundred MiB behind, in pieces, which would lie below a training run as long as it lasts.
    """
    with suppress(OSError, TypeError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
