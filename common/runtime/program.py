"""The entry point of every program: compilation cache, error lines, exit codes."""

import errno
import hashlib
import os
import platform
import re
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

from common.errors import Preempted, UserError, check, full_disk, write_error
from common.runtime import streams

# Environment variables that a launcher sets to start several processes.
COORDINATOR = "TRAINLESS_COORDINATOR"
PROCESSES = "TRAINLESS_NUM_PROCESSES"


def run(main: Callable[[], None], joins: bool = False, trains: bool = False) -> None:
    """Calls `main`. Prints one line on stderr for a UserError, a full disk or a file name that is too long.

    Exit codes: 0 for success; 2 for these errors; 128 + N after signal N (during training, the run first saves a
    checkpoint); 1 for any other exception, with a traceback; `common.runtime.heartbeat.LOST` after a process was lost
    or missed the rendezvous. If the reader of stdout exits, a program that only prints exits with code 0.

    Args:
      joins: whether `main` calls `processes.initialize` and trains. If False, and a launcher has started several
        processes, exits with an error, because each process would do all the work.
      trains: whether `main` trains in one process. A program that trains goes on without the reader of stdout.
    """
    with streams.guarded(joins or trains):
        _run(main, joins, joins or trains)


def _run(main: Callable[[], None], joins: bool, trains: bool) -> None:
    keep_compiled(Path(".cache"))
    # Ctrl-C exits at once until a run installs its signal handlers. Until then, nothing has to be saved. During the
    # run, the second Ctrl-C exits at once.
    signal.signal(signal.SIGINT, partial(_interrupted, trains))
    try:
        check(
            joins or not several(),
            f"this program runs as one process, but {PROCESSES} is {os.environ.get(PROCESSES)}: start it without a"
            f" launcher, and unset {PROCESSES}",
        )
        main()
        streams.flush()  # At exit, an error could not be handled.
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        leave(2)
    except Preempted as stop:
        print(stop, file=sys.stderr)
        sys.exit(stop.exit_code)
    except Exception as error:
        if getattr(error, "errno", None) == errno.ENAMETOOLONG:
            print(
                f"error: {error.strerror}: {error.filename or 'unknown file'};"
                " choose a shorter name for this file or its folders",
                file=sys.stderr,
            )
            leave(2)
        if not full_disk(error):
            if not several():
                raise
            from common.runtime import heartbeat

            heartbeat.hold(error)
            traceback.print_exc()
            leave(1)
        # The message of a storage library quotes the path, among others.
        quoted = re.search('"(/[^"]+)"', str(error))
        place = getattr(error, "filename", None) or (quoted[1] if quoted else "a file")
        print(f"error: {write_error(place, error, '')}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(2)


def several() -> bool:
    """Returns whether a launcher has started several processes."""
    return (os.environ.get(PROCESSES) or "1") != "1"


def leave(code: int) -> NoReturn:
    """Exits with `code` after an error.

    In a run of several processes, skips the exit handlers, which would wait for all processes.
    """
    if several():
        from common.runtime import heartbeat

        heartbeat.leave(code)
    sys.exit(code)


def keep_compiled(folder: Path) -> None:
    """Sets JAX's compilation cache to a folder below `folder`, unless JAX_COMPILATION_CACHE_DIR is set.

    The folder depends on the type of processor, because code compiled for one type may fail on another. Also lets JAX
    cache programs that take 0.5 s or more to compile (JAX's default is one second), unless
    JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS is set.
    """
    features = platform.processor()
    with suppress(OSError):  # only Linux has /proc
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    kind = hashlib.sha256(f"{platform.machine()} {features}".encode()).hexdigest()[:8]
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder.absolute() / f"compiled-{kind}"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")


def _interrupted(trains: bool, number: int, frame: object) -> None:
    resume = ": the same command resumes a run from its last checkpoint, if it has saved one"
    print(f"interrupted{resume * trains}", file=sys.stderr)
    sys.stderr.flush()
    os._exit(128 + number)
