"""Standard output and standard error, whose reader or terminal may be gone before the program ends."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any, NoReturn

from common.errors import UserError, write_error


class Stream:
    """A text or binary stream that calls `lost` with the error if it cannot be written, and then discards the data."""

    def __init__(self, stream: IO[Any], lost: Callable[[OSError], None]):
        self._stream, self._lost = stream, lost

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def buffer(self) -> "Stream":
        return Stream(self._stream.buffer, self._lost)

    def write(self, data: str | bytes) -> int:
        self._call(self._stream.write, data)
        return len(data)

    def flush(self) -> None:
        self._call(self._stream.flush)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> None:
        try:
            function(*arguments)
        except OSError as error:
            # All later writes must succeed, also the last one, by Python at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            self._lost(error)


@contextmanager
def guarded(trains: bool) -> Iterator[None]:
    """Context manager for the whole program: decides what happens after a standard stream cannot be written.

    Without standard error, the program goes on. Without standard output, a program that trains also goes on, with a
    warning, because a closed terminal or a killed `tee` must not end a run as if it were complete. Any other program
    exits with code 0 if the reader of its output has exited (head, less), and otherwise raises a UserError.
    """
    before = sys.stdout, sys.stderr
    # Python sets a stream to None if its file descriptor is closed.
    if sys.stdout:
        sys.stdout = Stream(sys.stdout, _warn if trains else _exit)
    if sys.stderr:
        sys.stderr = Stream(sys.stderr, lambda _: None)
    try:
        yield
    finally:
        # At exit, Python flushes the original stream, and changes the exit code if this fails.
        with suppress(SystemExit, UserError):
            flush()
        sys.stdout, sys.stderr = before


def flush() -> None:
    """Writes the text that standard output has buffered."""
    if sys.stdout and not sys.stdout.closed:
        sys.stdout.flush()


def _warn(error: OSError) -> None:
    print(
        f"warning: cannot write to standard output ({error.strerror}): the program goes on without it",
        file=sys.stderr,
    )


def _exit(error: OSError) -> NoReturn:
    if isinstance(error, BrokenPipeError):
        sys.exit(0)
    raise write_error("standard output", error, "redirect it to a file") from error
