"""How every program of the project starts and ends."""

import os
import platform
import sys
from collections.abc import Callable

from common.errors import UserError

_TUNABLE = "glibc.malloc.hugetlb=1"


def run(main: Callable[[], None]) -> None:
    """Calls main. A UserError becomes one line on stderr and exit code 2.

    The module that calls this imports what is slow to import inside its main, so that the restart below costs nothing.
    """
    _use_huge_pages()
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        # Whoever read our output (head, less) has left. Python would complain once more while closing it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _use_huge_pages() -> None:
    """Restarts the program once with glibc asking for huge pages.

    XLA takes the memory of each call afresh on a CPU. In pages of 4 KiB a training step spends a fifth of its
    time in page
    faults. glibc reads its settings only when a process starts; the process keeps its number and its files.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if platform.libc_ver()[0] != "glibc" or "glibc.malloc.hugetlb" in tunables:
        return
    os.environ["GLIBC_TUNABLES"] = f"{tunables}:{_TUNABLE}" if tunables else _TUNABLE
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
