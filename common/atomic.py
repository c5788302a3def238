"""Atomic file writes: readers see the old file or the whole new file."""

import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from common.errors import write_error


@contextmanager
def replacing(path: Path, option: str = "") -> Iterator[Path]:
    """Context manager that yields a temporary path, to which the caller writes a file. Creates the folder of `path`.

    On exit, renames the temporary file to `path`; after an exception, deletes the temporary file. If several processes
    write the same path, the last rename wins. An OSError, such as a full disk, becomes a UserError, which names
    `option`, the command-line option of the folder ("" for no option).
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        temporary.replace(path)
    except OSError as error:
        place = f"{option}={path.parent} ({path.name})" if option else path
        raise write_error(place, error, _REMEDY) from error
    finally:
        if temporary.exists():
            temporary.unlink()


def write_atomic(path: Path, write: Callable[[BinaryIO], None], option: str = "") -> None:
    """Writes a binary file atomically: calls `write` with an open temporary file. See `replacing`."""
    with replacing(path, option) as temporary, temporary.open("xb") as file:
        write(file)


def write_output(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Writes the file of --output: atomically, or directly if `path` is a pipe or a device. Follows links.

    Raises a UserError if the file cannot be written.
    """
    if path.is_file() or not path.exists():
        write_atomic(path.resolve(), write)
        return
    try:
        with path.open("wb") as file:
            write(file)
    except OSError as error:
        raise write_error(f"--output={path}", error, "choose another file") from error


def write_whole(path: Path, text: str) -> None:
    """Writes a text file atomically. The folder must exist, and only one process may write the file at a time.

    Raises a UserError if the file cannot be written.
    """
    try:
        with partial(path).open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial(path).replace(path)
    except OSError as error:
        raise write_error(path, error, _REMEDY) from error


def partial(path: Path) -> Path:
    """Returns the temporary path at which `write_whole` writes the file `path`."""
    return path.with_name(path.name + ".partial")


_REMEDY = "make the folder writable, or choose another folder"
