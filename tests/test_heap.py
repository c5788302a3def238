import ctypes
import os
from pathlib import Path

import pytest

from common import heap


def resident() -> int:
    """Returns the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_free_memory_is_returned_to_the_operating_system():
    library = ctypes.CDLL(None)
    if not hasattr(library, "malloc_trim"):
        pytest.skip("the C library has no malloc_trim")
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    # Pieces of this size are allocated in the heap. The last piece stays allocated, so the heap cannot shrink at its
    # end when the other pieces are freed.
    size, count = 32 * 1024, 4096
    pieces = [library.malloc(size) for _ in range(count)]
    for piece in pieces:
        ctypes.memset(piece, 1, size)
    for piece in pieces[:-1]:
        library.free(piece)
    before = resident()
    heap.release_free_memory()
    after = resident()
    library.free(pieces[-1])
    assert before - after > size * count // 2
