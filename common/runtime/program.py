"""How every program of the project starts and ends."""

import errno
import hashlib
import os
import platform
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from common.errors import UserError
from common.runtime import heartbeat

_TUNABLE = "glibc.malloc.hugetlb=1"


def run(main: Callable[[], None]) -> None:
    """Calls main: a UserError is one line on stderr and exit code 2, a lost process exit code `heartbeat.LOST`.

    The module that calls this imports what is slow to import inside its main, so that the restart below costs nothing.
    """
    keep_compiled(Path(".cache"))
    _use_huge_pages()
    # Until a run takes its signals over there is nothing to save, and an exception may be lost in foreign code.
    signal.signal(signal.SIGINT, _interrupted)
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        heartbeat.leave(2)
    except BrokenPipeError:
        # Whoever read our output (head, less) has left. Python would complain once more while closing it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if heartbeat.several():
            heartbeat.leave(1)
    except Exception as error:
        # Storage libraries pass it on in exceptions of their own.
        if os.strerror(errno.ENOSPC) not in str(error):
            heartbeat.hold(error)
            if not heartbeat.several():
                raise
            traceback.print_exc()
            heartbeat.leave(1)
        print(
            f"error: {os.strerror(errno.ENOSPC).lower()}: what was saved before is whole",
            file=sys.stderr,
        )
        sys.stderr.flush()
        os._exit(2)


def keep_compiled(folder: Path) -> None:
    """Has JAX keep below `folder` what it compiles, unless the environment says where: the next start takes seconds.

    Machine code is of one kind of machine: each has a folder of its own.
    """
    features = platform.processor()
    with suppress(OSError):  # not on Linux
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    kind = hashlib.sha256(f"{platform.machine()} {features}".encode()).hexdigest()[:8]
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder.absolute() / f"compiled-{kind}"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")


def _interrupted(number: int, frame: object) -> None:
    print("interrupted", file=sys.stderr)
    sys.stderr.flush()
    os._exit(128 + number)


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
