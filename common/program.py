"""How every program of the project starts and ends."""

import os
import platform
import sys
from collections.abc import Callable

from common.errors import UserError

# Huge pages; one heap for all threads that never shrinks, so that freed memory is used again.
_TUNABLES = (
    "glibc.malloc.hugetlb=1",
    "glibc.malloc.arena_max=1",
    "glibc.malloc.mmap_max=0",
    f"glibc.malloc.trim_threshold={2**40}",
)


def run(main: Callable[[], None]) -> None:
    """Calls main. A UserError becomes one line on stderr and exit code 2.

    The module that calls this imports what is slow to import inside its main, so that the restart below costs nothing.
    """
    _keep_memory()
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        # Whoever read our output (head, less) has left. Python would complain once more while closing it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _keep_memory() -> None:
    """Restarts the program once with glibc keeping its memory, in huge pages.

    XLA takes the memory of each call afresh on a CPU, and glibc would map and unmap it each time: in pages of 4 KiB a
    training step spends a fifth of its time in page faults, and in a virtual machine whose free pages go back to the
    host a step after a pause takes half as long again. glibc reads its settings only when a process starts; the
    process keeps its number and its files.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if platform.libc_ver()[0] != "glibc" or "glibc.malloc" in tunables:
        return
    os.environ["GLIBC_TUNABLES"] = ":".join(filter(None, (tunables, *_TUNABLES)))
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
